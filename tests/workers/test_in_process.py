"""The engine for Python users: the same tokens as a job, errors as results, one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.config import ModelConfig, SamplingConfig
from pipeline.config_io import parse_job
from pipeline.decoding_config import SuffixConfig
from pipeline.errors import ConfigError, PermanentError
from pipeline.parts import read_part_rows
from pipeline.records import ShardTask
from pipeline.shards import plan
from workers.actor import GenerationWorker
from workers.engine import Request
from workers.generation import GenerateProgress, Generation
from workers.in_process import Engine

QUESTION = [{"role": "user", "content": "Why boots?"}]


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir("llama")), dtype="float32", device="cpu", engine={"max_sequences": 4}) as engine:
        yield engine


def test_a_job_with_the_same_ids_and_seed_gives_the_same_tokens(engine: Engine, tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": f"Question {i}"}] for i in range(5)]
    ids = [f"row {i}" for i in range(5)]
    sampling = {"n": 2, "temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 10}
    pq.write_table(pa.table({"key": ids, "messages": prompts}), tmp_path / "in.parquet")
    config = parse_job(
        {
            "model": engine._loaded.name,
            "input": {"path": str(tmp_path / "in.parquet"), "id_column": "key"},
            "output": str(tmp_path / "out"),
            "sampling": sampling,
            "decoding": "autoregressive",
        },
        ["model.dtype=float32", "model.device=cpu"],
    )
    shard = plan(config).shards[0]
    receipt = GenerationWorker(config, "w").generate(ShardTask(shard, 1, "run", str(tmp_path / "out"), pa.schema([])))
    rows = list(read_part_rows(str(tmp_path / "out" / receipt.path), ()))
    results = engine.generate(prompts, sampling, ids=ids)
    assert [(r.id, r.sample_index, list(r.token_ids), r.text, r.finish_reason, r.prompt_tokens) for r in results] == [
        (
            row["id"],
            row["sample_index"],
            row["completion_token_ids"],
            row["generation"],
            row["finish_reason"],
            row["prompt_tokens"],
        )
        for row in rows
    ]


def test_errors_are_results_in_the_place_of_the_prompt(engine: Engine) -> None:
    prompts: list[Any] = ["One step", "", QUESTION, [{"role": "robot", "content": "beep"}], None, "fox " * 800, [{}]]
    results = engine.generate(prompts, {"n": 2, "max_tokens": 4})
    assert [(r.prompt_index, r.sample_index) for r in results] == [(i, j) for i in range(7) for j in range(2)]
    kinds = [None, "empty_prompt", None, "chat_template_error", "null_prompt", "prompt_too_long", "invalid_messages"]
    assert [r.error_type for r in results] == [kind for kind in kinds for _ in range(2)]
    for result in results:
        assert (result.text is None) == (result.finish_reason == "error") == (result.error is not None)
        assert result.stats.completion_tokens == len(result.token_ids)


def test_progress_counts_up_to_all_samples(engine: Engine) -> None:
    seen: list[GenerateProgress] = []
    results = engine.generate(["One", "Two", ""], {"n": 2, "max_tokens": 4}, on_progress=seen.append)
    assert [one.done for one in seen] == [1, 2, 3, 4, 5, 6]
    assert {one.total for one in seen} == {6}
    assert seen[-1].completion_tokens == sum(len(result.token_ids) for result in results)


def test_every_way_of_decoding_gives_the_same_tokens(engine: Engine) -> None:
    sampling = SamplingConfig(max_tokens=16, temperature=0.7)
    prompts = ["The quick brown fox", "One step of seven-league boots"]
    by_default = engine.generate(prompts, sampling)
    for decoding in ("autoregressive", {"strategy": "lookahead", "width": 3}, SuffixConfig()):
        assert tokens(engine.generate(prompts, sampling, decoding)) == tokens(by_default)


def tokens(results: list[Generation]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def test_a_stream_takes_prompts_as_it_has_room(engine: Engine) -> None:
    taken = 0

    def prompts() -> Iterator[str]:
        nonlocal taken
        for i in range(1000):
            taken += 1
            yield f"prompt {i}"

    stream = engine.stream(prompts(), {"max_tokens": 2})
    first = [next(stream) for _ in range(3)]
    assert taken < 200
    with pytest.raises(ConfigError, match="an engine must be open and idle when it is called, got one that is busy"):
        engine.generate(["another"])
    stream.close()
    again = engine.generate([f"prompt {i}" for i in range(64)], {"max_tokens": 2})
    assert [again[result.prompt_index].token_ids for result in first] == tokens(first)


def test_short_samples_leave_a_stream_first(engine: Engine) -> None:
    prompts = ["One step of seven-league boots", ""]
    assert [r.prompt_index for r in engine.stream(prompts, {"max_tokens": 30, "ignore_eos": True})] == [1, 0]


def test_extras_are_there_when_asked_for(tiny_model_dir: Callable[[str], Path]) -> None:
    model = ModelConfig(id=str(tiny_model_dir("llama")), dtype="float32", device="cpu")
    with Engine(model, extras=["logprobs", "topk", "cdf"]) as engine:
        (result,) = engine.generate(["One"], {"max_tokens": 5, "logprobs": 3, "coupling": "inverse_cdf"})
        for values in (result.token_logprobs, result.topk_token_ids, result.topk_logprobs, result.cdf_low):
            assert values is not None
            assert len(values) == len(result.token_ids) > 0
        with pytest.raises(ConfigError, match=r"^output.extras 'cdf' needs sampling.coupling to be inverse_cdf"):
            engine.generate(["One"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sampling": {"top_p": 1.7}}, "sampling.top_p must be in (0, 1], got 1.7"),
        ({"decoding": "magic"}, "decoding.strategy must be one of autoregressive"),
        ({"ids": ["a", "a"]}, "ids must be unique, got 'a' twice"),
        ({"prompts": "One"}, "prompts must be a list of prompts, got the string 'One'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(engine: Engine, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine.generate(**{"prompts": ["One", "Two"], **arguments})
    assert str(caught.value).startswith(sentence)
    assert engine.generate(["One"], {"max_tokens": 2})[0].finish_reason != "error"


def test_ids_must_be_as_many_as_prompts(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="ids must be as many as prompts"):
        engine.generate(["One", "Two"], ids=["a"])


def test_a_closed_engine_says_so(tiny_model_dir: Callable[[str], Path]) -> None:
    engine = Engine(str(tiny_model_dir("llama")), device="cpu")
    engine.close()
    with pytest.raises(ConfigError, match="got one that is closed"):
        engine.generate(["One"])


def test_a_stream_ends_with_its_engine(tiny_model_dir: Callable[[str], Path]) -> None:
    with Engine(str(tiny_model_dir("llama")), device="cpu") as engine:
        stream = engine.stream([f"prompt {i}" for i in range(64)], {"max_tokens": 30, "ignore_eos": True})
        next(stream)
    with pytest.raises(ConfigError, match="got one that is closed"):
        list(stream)


def test_a_lost_device_fails_the_call_and_not_the_process(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(str(tiny_model_dir("llama")), dtype="float32", device="cpu") as engine:
        engine.generate(["One"], {"max_tokens": 2})
        assert engine._steps is not None
        thread = engine._steps[1]

        def lost() -> None:
            raise torch.AcceleratorError("the device is gone", 999)

        monkeypatch.setattr(thread._engine, "step", lost)
        for _ in range(2):  # also what comes later
            with pytest.raises(PermanentError, match="the engine cannot go on: AcceleratorError"):
                engine.generate(["One"], {"max_tokens": 2})
        late = thread.submit(Request("late", (1, 2), SamplingConfig()))
        assert isinstance(late.exception(timeout=10), PermanentError)
    assert not thread._thread.is_alive()


def test_other_threads_wait_their_turn_or_are_told(engine: Engine) -> None:
    """Two calls at once: one of them may be refused, neither gives wrong tokens."""
    expected = tokens(engine.generate(["One"], {"max_tokens": 20}))
    barrier = threading.Barrier(2)

    def call(_: int) -> list[tuple[int, ...]] | str:
        barrier.wait()
        try:
            return tokens(engine.generate(["One"], {"max_tokens": 20}))
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(call, range(2)))
    assert expected in outcomes
    assert all(outcome == expected or "busy" in outcome for outcome in outcomes)
