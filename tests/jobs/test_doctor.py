"""`doctor` finds what is there and what is broken, says what to do, and never ends in a traceback."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import s3fs

from jobs.checkup.machine import memory_finding
from jobs.cli import main
from jobs.doctor import examine
from tests.s3_server import s3_for_clients

RunCli = Callable[..., subprocess.CompletedProcess[str]]


def by_name(output: str | None = None, model: str | None = None, address: str | None = None) -> dict[str, Any]:
    return {finding.name: finding for finding in examine(output, model, address)}


@pytest.fixture
def small(tiny_model_dir: Callable[[str], Path]) -> str:
    """A model, so that the demo model is not looked for."""
    return str(tiny_model_dir("llama"))


@pytest.fixture
def bucket() -> Iterator[str]:
    with s3_for_clients():
        s3fs.S3FileSystem(use_listings_cache=False).mkdir("doctor")
        yield "s3://doctor/out"


def test_a_machine_that_can_run_jobs(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["doctor", "--output", str(tmp_path / "made" / "out"), "--model", small, "--json"])
    assert ending.value.code == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {finding["state"] for finding in findings.values()} <= {"ok", "warn"}
    assert all(finding["advice"] for finding in findings.values() if finding["state"] == "warn")
    assert findings["torch"]["found"] == metadata.version("torch")
    assert f"of {os.cpu_count()} cores" in findings["CPU"]["found"]
    assert "context 512" in findings["weights"]["found"]
    assert findings["conditional put"]["state"] == "ok"
    assert not (tmp_path / "made").exists()  # the probe leaves no folders behind


def test_a_store_that_works(small: str, bucket: str) -> None:
    findings = by_name(output=bucket, model=small)
    assert findings["output"].state == findings["conditional put"].state == "ok"
    assert s3fs.S3FileSystem(use_listings_cache=False).find("doctor") == []


def test_what_fails_is_told_with_a_remedy(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: whoever connects is refused
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(SystemExit) as ending:
            main(["doctor", "--output", f"{blocked}/out", "--model", "./nowhere", "--address", address])
        http = by_name(model=small, address=f"http://{address}")["Ray"]
    assert ending.value.code == 1
    table = " ".join(capsys.readouterr().out.split())
    assert "3 failed" in table
    assert "Traceback" not in table
    assert (http.state, http.found.partition(",")[0]) == (
        "fail",
        "--address must be the http://host:port of a running Ray head",
    )


def test_a_model_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    finding = by_name(model=str(tmp_path))["model"]
    assert finding.state == "fail"
    assert "encoder" in finding.found


def test_packages_that_are_broken_old_or_missing(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import, real_version = importlib.import_module, metadata.version

    def broken(name: str, package: str | None = None) -> Any:
        if name == "datasets":
            raise OSError("libarrow.so: cannot open shared object file")
        return real_import(name, package)

    def versions(name: str) -> str:
        if name == "s3fs":
            raise metadata.PackageNotFoundError(name)
        return "2.1.9+cpu" if name == "torch" else real_version(name)

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr(metadata, "version", versions)
    findings = by_name(model=small)
    assert (findings["datasets"].state, findings["torch"].state) == ("fail", "fail")
    assert "libarrow.so" in findings["datasets"].found
    assert "2.9" in findings["torch"].advice
    assert "[s3]" in findings["s3fs"].found


def test_memory_of_a_container_is_not_that_of_the_machine() -> None:
    gib = 2**30
    assert memory_finding(20 * gib, 64 * gib, "max").state == "ok"
    assert memory_finding(1 * gib, 64 * gib, "").state == "warn"
    limited = memory_finding(20 * gib, 64 * gib, str(8 * gib))
    assert limited.state == "warn"
    assert "8.0 GiB" in limited.found
    assert "engine.kv_memory_gb" in limited.advice


def test_without_torch_there_is_still_a_table(tmp_path: Path) -> None:
    """In a process of its own, in which importing torch fails as with a library that is missing."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    code = "from jobs.cli import entry; entry()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
    )
    assert done.returncode == 1
    assert "libcudart.so.12" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_bash_completes_commands_and_options(run_cli: RunCli) -> None:
    """The script of click asks the command itself, in this form, for what may follow."""

    def completed(*words: str) -> set[str]:
        line = " ".join(words)
        done = run_cli(_SEVENLEAGUE_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
        return {answer.partition(",")[2] for answer in done.stdout.split()}

    script = run_cli(_SEVENLEAGUE_COMPLETE="bash_source").stdout
    assert "complete -o nosort -F _sevenleague_completion sevenleague" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True).returncode == 0
    assert completed("sevenleague", "st") == {"status", "stop"}
    assert "--retry-failed" in completed("sevenleague", "run", "--re")
