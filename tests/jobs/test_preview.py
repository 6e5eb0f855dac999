"""A preview shows prompts, token counts and generations, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main

MakeJob = Callable[..., Any]


def preview(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["preview", *map(str, arguments)])
    assert not caught.value.code
    return capsys.readouterr().out


def test_the_first_prompts_through_the_template(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [[{"role": "user", "content": f"Question {i}"}] for i in range(5)]
    job = make_job(messages, sampling={"n": 2, "ignore_eos": True})
    shown = preview(capsys, job.file, "-n", "2", "--max-tokens", "5")
    for i in range(2):
        assert f"<|start|>user\nQuestion {i}<|end|>\n<|start|>assistant\n" in shown
    assert "Question 2" not in shown
    assert shown.count("sample 1: ") == 2
    assert shown.count(" 5 new tokens in ") == 4
    assert not job.output.exists()


def test_bad_rows_are_shown_as_such(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    shown = preview(capsys, make_job(["fine", None]).file)
    assert "error null_prompt: the prompt is null in column " in shown
    assert "sample 0: " in shown
