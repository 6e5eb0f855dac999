"""A real benchmark of a tiny model through the command line, and the sentences for what cannot be measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jobs.cli import cli, main

from .conftest import write_prompts

TinyModel = Callable[[str], Path]

PROMPTS = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):",
    "One step of seven-league boots covers seven leagues. One step of this covers",
    "assert add(1, 2) == 3",
]
SPARE = ["The dog sleeps", "fox runs on"]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def figures(tiny_model_dir: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one benchmark of everything that runs in this process writes; its chart is checked on the way."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = write_prompts(folder / "prompts.parquet", [*PROMPTS, *SPARE])
    arguments = ["bench", "--model", tiny_model_dir("llama"), "--prompts", prompts, "--limit", len(PROMPTS)]
    arguments += ["--max-tokens", NUM_TOKENS, "--batch", "1,2", "--rounds", 2, "--dtype", "float32", "--threads", 1]
    arguments += ["--contestants", "autoregressive,auto,hf-generate,hf-generate-batch,hf-prompt-lookup"]
    arguments += ["--set", "engine.max_tokens_per_step=64", "--set", "decoding.max_window=4"]
    arguments += ["--json", folder / "bench.json", "--chart", folder / "bench.png"]
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    written: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    written["stdout"] = result.stdout
    written["stderr"] = result.stderr
    return written


def row(figures: dict[str, Any], contestant: str, batch: int) -> dict[str, Any]:
    (found,) = [r for r in figures["rows"] if (r["contestant"], r["batch"]) == (contestant, batch)]
    assert isinstance(found, dict)
    return found


def test_json_tells_machine_versions_and_settings(figures: dict[str, Any]) -> None:
    assert figures["machine"]["cpu"]
    assert figures["machine"]["cpus"] >= 1
    assert {"python", "torch", "transformers", "vllm"} <= set(figures["versions"])
    assert figures["versions"]["vllm"] is None
    assert figures["settings"]["threads"] == 1
    assert figures["settings"]["overrides"] == ["engine.max_tokens_per_step=64", "decoding.max_window=4"]
    assert figures["prompts"]["count"] == len(PROMPTS)


def test_every_contestant_has_a_row_per_batch_size(figures: dict[str, Any]) -> None:
    names = ["autoregressive", "auto", "hf-generate", "hf-generate-batch", "hf-prompt-lookup"]
    assert [(r["contestant"], r["batch"]) for r in figures["rows"]] == [(n, b) for n in names for b in (1, 2)]
    for name in names:
        for batch in (1, 2):
            r = row(figures, name, batch)
            if (name, batch) != ("hf-prompt-lookup", 2):
                assert r["tokens"] == len(PROMPTS) * NUM_TOKENS, r
                assert len(r["seconds"]) == 2
                rates = sorted(r["tokens"] / seconds for seconds in r["seconds"])
                told = r["tokens_per_s"]
                assert math.isclose(told["min"], rates[0])
                assert math.isclose(told["max"], rates[1])
                assert math.isclose(told["median"], sum(rates) / 2)
                assert r["startup_s"] > 0


def test_prompt_lookup_beyond_batch_1_is_passed_over_with_a_note(figures: dict[str, Any]) -> None:
    r = row(figures, "hf-prompt-lookup", 2)
    assert r["tokens_per_s"] is None
    assert r["note"] == "no prompt lookup beyond batch 1"
    assert "hf-prompt-lookup at batch 2: no prompt lookup beyond batch 1" in figures["stdout"]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("contestant", ["auto", "hf-generate", "hf-generate-batch"])
def test_all_say_the_same_in_float32(figures: dict[str, Any], contestant: str, batch: int) -> None:
    """Greedy outputs of transformers, padded, paged or not, are those of our plain decoding, token by token."""
    assert row(figures, contestant, batch)["same_as_plain"] == 1.0


def test_tokens_per_step(figures: dict[str, Any]) -> None:
    for batch in (1, 2):
        for plain in ("autoregressive", "hf-generate", "hf-generate-batch"):
            assert row(figures, plain, batch)["tokens_per_step"] == 1.0
    assert row(figures, "auto", 1)["tokens_per_step"] > 1.0
    assert row(figures, "hf-prompt-lookup", 1)["tokens_per_step"] >= 1.0


def test_contestants_take_turns_in_a_rotating_order(figures: dict[str, Any]) -> None:
    turns = [line for line in figures["stderr"].splitlines() if "batch 1," in line]
    names = [line.split(", ")[2].split(":")[0] for line in turns]
    assert names[:5] == ["autoregressive", "auto", "hf-generate", "hf-generate-batch", "hf-prompt-lookup"]
    assert names[5:] == ["auto", "hf-generate", "hf-generate-batch", "hf-prompt-lookup", "autoregressive"]


def test_an_adapter_takes_part(tiny_model_dir: TinyModel, adapter_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Slot 0 of this adapter draws what plain decoding draws, so its steps give at least two tokens."""
    prompts = write_prompts(tmp_path / "prompts.parquet", [*PROMPTS, *SPARE])
    arguments = ["bench", "--model", tiny_model_dir("llama"), "--prompts", prompts, "--limit", len(PROMPTS)]
    arguments += ["--max-tokens", NUM_TOKENS, "--batch", "1,2", "--rounds", 1, "--dtype", "float32", "--threads", 1]
    arguments += ["--contestants", "autoregressive,ptp,auto", "--temperature", 0.8, "--coupling", "inverse_cdf"]
    arguments += ["--set", f"decoding.adapter={adapter_dir('llama', head='c')}", "--set", "decoding.mode=serial"]
    arguments += ["--json", tmp_path / "bench.json"]
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "bench.json").read_text())
    for contestant in ("ptp", "auto"):
        assert all(row(figures, contestant, batch)["same_as_plain"] == 1.0 for batch in (1, 2))
    assert row(figures, "ptp", 1)["tokens_per_step"] > 1.7


def test_samples_by_sampling_until_the_end_token(tiny_model_dir: TinyModel, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.parquet", PROMPTS[:2])
    arguments = ["bench", "--model", tiny_model_dir("llama"), "--prompts", prompts, "--n", 3, "--temperature", 0.9]
    arguments += ["--top-p", 0.9, "--no-ignore-eos", "--max-tokens", 9, "--batch", 2, "--dtype", "float32"]
    arguments += ["--contestants", "autoregressive,suffix,hf-generate", "--rounds", 1, "--json", tmp_path / "out.json"]
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert row(written, "suffix", 2)["same_as_plain"] == 1.0  # the same noise, so the same samples
    assert row(written, "hf-generate", 2)["same_as_plain"] is None  # noise of its own
    assert 6 <= row(written, "hf-generate", 2)["tokens"] <= 6 * 9


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The sentence of a benchmark that ends with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(["bench", *map(str, arguments)])
    captured = capsys.readouterr()
    assert caught.value.code == 2, captured
    return captured.err.removeprefix("sevenleague: ").strip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--batch", "1,x"], "Invalid value for '--batch': '1,x' must be numbers of at least 1 with commas between."),
        (["--batch", "0"], "Invalid value for '--batch': '0' must be numbers of at least 1 with commas between."),
        (["--rounds", "0"], "Invalid value for '--rounds': 0 is not in the range x>=1."),
        (["--peer-python", "vllm"], "Invalid value for '--peer-python': 'vllm' must be NAME=PATH."),
        (["--peer-python", "tgi=x"], "--peer-python must be for vllm, got 'tgi'"),
        (["--contestants", "vllm"], "--peer-python must name an interpreter for vllm (vllm=PATH), got 'nothing'"),
        (
            ["--contestants", "vllm-ngram", "--peer-python", "vllm=/none/python"],
            "--peer-python must name an interpreter for vllm-ngram (vllm=PATH), got '/none/python'",
        ),
        (["--json", "/none/a.json"], "--json must name a file in a folder that exists, got '/none/a.json'"),
        (["--chart", "a.jpg"], "--chart must name a .png file, got 'a.jpg'"),
        (["--temperature", "-1"], "sampling.temperature must be in [0, 100], got -1.0"),
        (
            ["--set", "sampling.top_k=5"],
            "--set must name a key of decoding, engine, input, model, got 'sampling.top_k=5'",
        ),
        (
            ["--set", "engine.max_sequences=5"],
            "--set must not name engine.max_sequences, for which there is --batch, got 'engine.max_sequences=5'",
        ),
        (
            ["--set", "decoding.max_windw=5"],
            "decoding.max_windw must be a known key (did you mean 'decoding.max_window'?)",
        ),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert mistake(capsys, "--model", "m", "--prompts", "p.parquet", *arguments) == sentence


def test_an_unknown_contestant_is_told_whom_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = mistake(capsys, "--model", "m", "--prompts", "p.parquet", "--contestants", "auto,lookahed")
    assert said.startswith("--contestants must be among autoregressive, ")
    assert said.endswith("hf-prompt-lookup, vllm, vllm-ngram, got 'lookahed'")


def test_no_prompt_fits(capsys: pytest.CaptureFixture[str], tiny_model_dir: TinyModel, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.parquet", PROMPTS)
    said = mistake(capsys, "--model", tiny_model_dir("llama"), "--prompts", prompts, "--max-prompt-chars", "5")
    assert said == f"--prompts must hold at least one prompt that fits, got none in {prompts}"


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(cli, ["bench", "--help"])
    assert result.exit_code == 0
    assert "Examples:\n    sevenleague bench " in result.output
