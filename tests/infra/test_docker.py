"""The Dockerfile through hadolint, and what hadolint does not ask: stages, users, sources, pinned bases."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "infra" / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, arguments in instructions():
        if name == "FROM":
            current = found.setdefault(arguments.split(" AS ")[1], [])
        elif found:
            current.append((name, arguments))
    return found


def test_hadolint_is_content() -> None:
    done = subprocess.run([Path(sys.executable).parent / "hadolint", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_bases_are_pinned_and_nothing_comes_from_elsewhere() -> None:
    bases = [arguments.split(" AS ")[0] for name, arguments in instructions() if name == "FROM"]
    assert set(bases) == {"${PYTHON_IMAGE}", "base"}
    (image,) = [value for name, value in instructions() if name == "ARG" and value.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.11\.\d+-slim-\w+", image)
    assert "latest" not in DOCKERFILE.read_text()
    assert "ADD" not in [name for name, _ in instructions()]


def test_both_targets_install_pinned_packages_and_run_as_a_user() -> None:
    for target in ("cpu", "cuda"):
        steps = stages()[target]
        assert steps[-1] == ("USER", "1000:1000")
        installs = [arguments for name, arguments in steps if name == "RUN"]
        assert len(installs) == 2
        assert all("--constraint /opt/sevenleague/constraints.txt" in install for install in installs)
        assert "sevenleague-*.whl)[${EXTRAS}]" in installs[1]
    base = dict(reversed(stages()["base"]))
    assert "useradd --uid 1000" in base["RUN"]
    assert all(f" {package} " in base["RUN"] for package in ("g++", "wget", "procps"))  # see the comment there


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [rule[1:].rstrip("/") for rule in rules if rule.startswith("!")]
    copied = [
        source.rstrip("/")
        for name, arguments in instructions()
        if name == "COPY"
        for source in re.sub(r"--\S+ ", "", arguments).split()[:-1]
    ]
    assert "infra/constraints.txt" in copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, rule) for rule in allowed), source
    assert sorted(allowed) == sorted(copied)
