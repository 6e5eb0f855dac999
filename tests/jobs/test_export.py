"""`export` and `push` from the command line, on the output of a tiny model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.fake_hub import fake_hub
from tests.jobs.conftest import call

CHATS = [[{"role": "user", "content": f"Seven leagues, number {i}?"}] for i in range(8)]
MakeJob = Callable[..., Any]


@pytest.fixture
def job(make_job: MakeJob, run_here: Callable[[Any], None]) -> Any:
    """A finished job, which would be pushed at its end."""
    finished = make_job(
        CHATS,
        output={"extras": ["prompt_ids", "token_ids", "logprobs", "topk"], "push_to_hub": {"repo": "me/answers"}},
        sampling={"logprobs": 3, "n": 2},
    )
    run_here(finished)
    return finished


def read(dest: Path, split: str = "train") -> datasets.Dataset:
    return datasets.load_dataset(str(dest), split=split, cache_dir=str(dest.parent / "cache"))


def test_exports_of_a_real_job(job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest = tmp_path / "kd"
    code, shown, _ = call(
        capsys, "export", job.output, dest, "--format", "distillkit", "--best", "1", "--license", "mit"
    )
    assert code == 0
    assert "left out: 8 samples (the best 1 of a prompt by mean log-probability)" in shown
    assert f"8 samples are in {dest}" in shown
    rows = read(dest)
    with_rows = [sum(label >= 0 for label in row["labels"]) for row in rows]
    code, _, _ = call(capsys, "export", job.output, tmp_path / "all", "--format", "jsonl")
    lines = [json.loads(line) for line in (tmp_path / "all/data/train-00000.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    tokens = {(*line["prompt_token_ids"], *line["completion_token_ids"]): line for line in lines}
    assert with_rows == [tokens[tuple(row["input_ids"])]["completion_tokens"] for row in rows]
    assert all(len(line["prompt_token_ids"]) == line["prompt_tokens"] for line in lines)


def test_mistakes_are_one_sentence(job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        ((job.output, job.output, "--format", "messages"), "DEST must be empty or not there"),
        ((tmp_path, tmp_path / "x", "--format", "messages"), "must be the output of a job"),
        ((job.output, tmp_path / "x", "--format", "messages", "--split", "a=2"), "--split must be NAME=SHARE"),
        ((job.output, tmp_path / "x", "--format", "messages", "--trailing-tokens", "1"), "needs --format axolotl_kd"),
        ((job.output, tmp_path / "x", "--format", "messages", "--push-to-hub", "mine"), "must be USER/NAME"),
    ):
        code, _, told = call(capsys, "export", *arguments)
        assert code == 2
        assert sentence in told
        assert told.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_push_at_the_end_of_a_job(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shards are done, so the run only ends the job."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    code, _, told = call(capsys, "run", job.file)
    assert (code, "HF_TOKEN must be set in the environment" in told) == (2, True)
    token = "hf_" + "b" * 30
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.is_broken = True
        code, shown, told = call(capsys, "run", job.file)
        assert code == 0
        assert f"16 of 16 samples are in {job.output}" in shown
        assert f"push it with `sevenleague push {job.output} me/answers`" in told
        assert token not in told + shown
        code, _, told = call(capsys, "push", job.output, "me/answers")
        assert (code, "the same command tries again" in told) == (1, True)
        hub.is_broken = False
        assert call(capsys, "push", job.output, "me/answers")[0] == 0
        assert call(capsys, "run", job.file)[0] == 0
        assert len(hub.commits) == 1
        assert hub.files["me/answers", "main"]["README.md"] == (job.output / "README.md").read_bytes()
    assert all(token.encode() not in path.read_bytes() for path in job.output.rglob("*") if path.is_file())


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("format_name", ["messages", "prompt_completion"])
def test_trl_prepares_it(
    job: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    format_name: str,
    tiny_model_dir: Callable[[str], Path],
) -> None:
    trl = importlib.import_module("trl")
    call(capsys, "export", job.output, tmp_path / "sft", "--format", format_name)
    config = trl.SFTConfig(output_dir=str(tmp_path / "trained"), max_steps=1, report_to=[], use_cpu=True, bf16=False)
    trainer = trl.SFTTrainer(str(tiny_model_dir("llama")), config, train_dataset=read(tmp_path / "sft"))
    ids = trainer.train_dataset[0]["input_ids"]
    text = trainer.processing_class.decode(ids)
    assert "Seven leagues, number 0?" in text
    assert read(tmp_path / "sft")[0]["messages" if format_name == "messages" else "completion"][-1]["content"] in text
    trainer.train()
