"""What is imported when, and in which direction. Each check runs in a fresh interpreter: this one has loaded it all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules_after(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import sevenleague", {"torch", "transformers", "ray", "pydantic"}),
        ("from sevenleague import JobConfig", {"torch", "transformers", "ray"}),
        (
            "import pipeline.config_io, pipeline.shards, pipeline.parts, pipeline.summary",
            {"torch", "transformers", "ray"},
        ),
        ("from sevenleague import Engine", {"ray"}),
        ("import workers.model_loading", {"ray"}),
        ("import jobs.cli", {"torch", "transformers", "ray"}),
    ],
)
def test_import_leaves_out_what_it_does_not_need(statement: str, absent: set[str]) -> None:
    assert modules_after(statement) & absent == set()


def test_modules_after_tells_what_is_imported() -> None:
    assert {"torch", "workers.engine"} <= modules_after("from sevenleague import Engine")


def test_public_names_are_the_real_ones() -> None:
    import sevenleague
    from jobs.run import run_job
    from pipeline.config import JobConfig
    from workers.in_process import Engine

    assert sorted(sevenleague.__all__) == ["Engine", "Generation", "JobConfig", "SamplingConfig", "run_job"]
    assert (sevenleague.run_job, sevenleague.JobConfig, sevenleague.Engine) == (run_job, JobConfig, Engine)
    assert set(sevenleague.__all__) <= set(dir(sevenleague))


def test_unknown_public_name_is_an_attribute_error() -> None:
    import sevenleague

    with pytest.raises(AttributeError, match="module 'sevenleague' has no attribute 'run_jobs'"):
        _ = sevenleague.run_jobs


def test_imports_run_one_way() -> None:
    """The import-linter contracts of pyproject.toml: jobs -> workers -> pipeline, no torch below, no ray in between."""
    lint_imports = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_constraints_pin_plain_versions_only() -> None:
    """No local version labels, paths or addresses: another machine must be able to use the file."""
    lines = (ROOT / "infra" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 50
    assert all(line.count("==") == 1 and not set(line) & set("@/+ ") for line in pins)
