"""The command line as a person meets it: help, overrides, and one sentence for every mistake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from jobs.cli import PACKAGES, cli, main
from pipeline.errors import ConnectionLost

ROOT = Path(__file__).parents[2]
MakeJob = Callable[..., Any]


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The sentence on stderr of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert caught.value.code == 2, captured
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("sevenleague: ").strip()


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The resolved job that a dry run prints."""
    with pytest.raises(SystemExit) as caught:
        main(["run", "--dry-run", *map(str, arguments)])
    assert caught.value.code == 0
    resolved, _ = capsys.readouterr().out.split("\n\n", 1)
    data = yaml.safe_load(resolved)
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("command", ["run", "preview", "status", "verify", "submit", "stop", "logs", "list"])
def test_help_shows_examples(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert f"Examples:\n    sevenleague {command} " in result.output


def test_an_error_type_alone_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(capsys, "run", "job.yaml", "--error-type", "odd") == (
        "--error-type needs --retry-failed, got --error-type odd alone"
    )


def test_the_bare_command_shows_help() -> None:
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 0
    assert "Exit codes: 0 done" in result.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from jobs.cli import cli; cli(['run', '--help'], standalone_mode=False); "
        "print([name for name in ('torch', 'ray', 'transformers', 'pyarrow', 'pydantic') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_own_options_are_overrides(make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = make_job(["a", "b", "c"])
    other = tmp_path / "1e3.parquet"
    pq.write_table(pa.table({"prompt": ["x", "y"]}), other)
    options = ["--max-tokens=5", "--temperature=0", "--top-p=0.5", "--top-k=9", "--n=2", "--seed=3", "--workers=4"]
    data = dry_run(capsys, job.file, *options, "--limit=1", f"--input={other}", "--output=1e3", "--model=0.5")
    assert data["model"]["id"] == "0.5"
    assert data["output"]["path"] == "1e3"
    assert data["input"]["path"] == [str(other)]
    assert data["input"]["limit"] == 1
    assert data["cluster"]["workers"] == 4
    chosen = {key: data["sampling"][key] for key in ("max_tokens", "temperature", "top_p", "top_k", "n", "seed")}
    assert chosen == {"max_tokens": 5, "temperature": 0.0, "top_p": 0.5, "top_k": 9, "n": 2, "seed": 3}


def test_several_inputs(make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [tmp_path / "x.parquet", tmp_path / "y.parquet"]
    for path in paths:
        pq.write_table(pa.table({"prompt": ["x"]}), path)
    data = dry_run(capsys, make_job(["a"]).file, f"--input={paths[0]}", f"--input={paths[1]}")
    assert data["input"]["path"] == [str(path) for path in paths]


def test_an_own_option_wins_over_set(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(["a"])
    data = dry_run(capsys, job.file, "--seed=2", "--set", "sampling.seed=1", "--set", "decoding.strategy=lookahead")
    assert data["sampling"]["seed"] == 2
    assert data["decoding"]["strategy"] == "lookahead"


def test_a_dry_run_counts_and_writes_nothing(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job([f"prompt {i}" for i in range(10)], sampling={"n": 2})
    with pytest.raises(SystemExit):
        main(["run", "--dry-run", str(job.file)])
    rows, lengths = capsys.readouterr().out.splitlines()[-2:]
    assert rows == "10 rows of 1 files, in 3 shards; 2 samples of each."
    assert lengths.startswith("Prompt tokens, in 10 sampled rows: mean ")
    assert not job.output.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["runn"], "No such command 'runn'. Did you mean 'run'?"),
        (["run"], "Missing argument 'JOB.yaml'."),
        (["run", "x.yaml", "--seed", "one"], "Invalid value for '--seed': 'one' is not a valid integer."),
        (["verify", "x", "--samples", "0"], "Invalid value for '--samples': 0 is not in the range x>=1."),
    ],
)
def test_mistakes_of_usage(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], sentence: str) -> None:
    assert mistake(capsys, *arguments) == sentence


def test_a_missing_job_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    said = f"the job file must be a readable text file, got {str(path)!r}: No such file or directory"
    assert mistake(capsys, "run", path) == said


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sampling.top_p=1.7", "sampling.top_p must be in (0, 1], got 1.7"),
        ("sampling.max_token=7", "sampling.max_token must be a known key (did you mean 'sampling.max_tokens'?)"),
        ("input.limit=0", "input.limit must be at least 1, got 0"),
        ("seed", "an override must be key=value, got 'seed'"),
    ],
)
def test_mistakes_in_the_job(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str], override: str, sentence: str
) -> None:
    assert mistake(capsys, "run", make_job(["a"]).file, "--set", override) == sentence


def test_missing_input(make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    assert mistake(capsys, "run", make_job(path).file) == (
        f"input.path must name existing .parquet, .jsonl or .csv files, got {str(path)!r} "
        "(for a datasets name set input.format to datasets)"
    )


def test_empty_input(make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    assert mistake(capsys, "run", make_job(path).file) == f"input.path must hold at least one row, got none in {path}"


def test_no_such_column(make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = make_job(["a"], input={"prompt_column": "promt"})
    assert mistake(capsys, "run", job.file) == (
        f"input.prompt_column must name columns of the input, got 'promt' for file "
        f"{str(tmp_path / 'job.parquet')!r} (did you mean 'prompt'?)"
    )


def test_a_column_of_the_wrong_type(make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = make_job([1, 2])
    assert mistake(capsys, "run", job.file) == (
        "input.prompt_column must be a string or a messages list, got int64 for column 'prompt' in file "
        f"{str(tmp_path / 'job.parquet')!r}"
    )


def test_duplicate_ids(make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "twins.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "key": ["x", "y", "x"]}), path)
    job = make_job(path, input={"id_column": "key"})
    assert mistake(capsys, "run", job.file) == (
        f"input.id_column must hold unique ids, got 'x' twice: row 0 of {path} and row 2 of {path}"
    )


def test_a_corrupt_footer(make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "corrupt.parquet"
    path.write_bytes(b"PAR1 not really PAR1")
    said = mistake(capsys, "run", make_job(path).file)
    assert said.startswith(f"input.path must name readable Parquet files, got {str(path)!r}: ")


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:1", "[Errno 111] Connection refused"), ("here", "invalid literal for int() with base 10: 'here'")],
)
def test_no_cluster_at_the_address(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str], address: str, reason: str
) -> None:
    said = mistake(capsys, "run", make_job(["a"], cluster={"address": address}).file)
    assert said == f"cluster.address must be auto or the host:port of a running Ray cluster, got {address!r}: {reason}"


@pytest.mark.parametrize("command", ["status", "verify"])
def test_no_job_at_the_output(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    path = tmp_path / "nothing"
    assert mistake(capsys, command, path) == f"output.path must be the output of a job, got {str(path)!r}"


def test_a_shadowed_package_is_named(tmp_path: Path) -> None:
    for name in PACKAGES:
        if name != "jobs":
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; from jobs.cli import main; main(['--help'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 2
    assert result.stderr == (
        f"sevenleague: the package 'pipeline' of sevenleague must be beside its others in {ROOT}, got one in {tmp_path}"
        ", where another distribution or folder shadows it\n"
    )


def test_a_cluster_that_is_lost_leaves_the_job_resumable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_cluster(*arguments: Any) -> None:
        raise ConnectionLost("the Ray cluster has not answered for 30 s")

    monkeypatch.setattr("jobs.run.command", lose_the_cluster)
    with pytest.raises(SystemExit) as caught:
        main(["run", "job.yaml"])
    assert caught.value.code == 4
    said = "sevenleague: the Ray cluster has not answered for 30 s; run the same command again to resume\n"
    assert capsys.readouterr().err == said
