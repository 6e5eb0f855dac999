"""docs/deploy.md names every manifest, with the command that uses it, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
FOLDERS = ("docker", "ray", "kuberay", "slurm", "skypilot", "s3", "monitoring")
HELPERS = {"infra/ray/drain.sh", "infra/ray/spot_watch.sh", "infra/ray/wait_for_nodes.py"}
"""Run by the manifests, not by a person."""


def on_disk() -> set[str]:
    found = (path for folder in FOLDERS for path in (ROOT / "infra" / folder).rglob("*"))
    return {str(path.relative_to(ROOT)) for path in found if path.is_file() and "__pycache__" not in path.parts}


def test_every_manifest_is_linked_and_every_link_leads_somewhere() -> None:
    linked = set(re.findall(r"\]\(\.\./(infra/[\w./]+)\)", PAGE))
    assert linked == on_disk() - {"infra/ray/wait_for_nodes.py"}
    for target in re.findall(r"\]\(([\w./]+\.md)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_every_manifest_has_its_command() -> None:
    commands = "\n".join(re.findall(r"^    (.*)$", PAGE, re.MULTILINE))
    used = set(re.findall(r"infra/[\w./]+", commands))
    # Grafana's board is imported by hand.
    assert used == on_disk() - HELPERS - {"infra/monitoring/grafana.json"}


def test_helpers_are_run_by_what_is_there() -> None:
    files = [path for path in (ROOT / "infra").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    for helper in HELPERS:
        name = Path(helper).name
        assert any(name in path.read_text() for path in files if path.name != name), helper
