"""The thread between callers and the engine: nothing is lost, and a request that makes the model raise fails alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import AutoregressiveConfig, EngineConfig, ModelConfig, SamplingConfig
from pipeline.errors import RowError
from workers.engine import Engine, Request
from workers.engine_thread import EngineThread
from workers.model_loading import LoadedModel, load_model

POISON = (1, 1, 1)
SAMPLING = SamplingConfig(max_tokens=8, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    """A tiny model that raises when it reads three start tokens in a row."""
    loaded = load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float32", device="cpu"))

    def refuse_poison(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if "1, 1, 1" in str(kwargs["input_ids"].flatten().tolist()):
            raise RuntimeError("the model tastes poison")

    loaded.model.register_forward_pre_hook(refuse_poison, with_kwargs=True)
    return loaded


@pytest.fixture
def make_engine(loaded: LoadedModel) -> Callable[[], Engine]:
    return lambda: Engine(loaded, EngineConfig(max_sequences=4), AutoregressiveConfig())


@pytest.fixture
def thread(make_engine: Callable[[], Engine]) -> Iterator[EngineThread]:
    thread = EngineThread(make_engine)
    yield thread
    thread.close()


def requests(count: int, sampling: SamplingConfig = SAMPLING) -> list[Request]:
    return [Request(f"r{i}", (10 + i, 20, 30), sampling) for i in range(count)]


def test_many_callers_get_what_the_engine_alone_gives(thread: EngineThread, make_engine: Callable[[], Engine]) -> None:
    asked = requests(12, SAMPLING.model_copy(update={"n": 2}))
    with ThreadPoolExecutor(6) as callers:
        answers = list(callers.map(lambda request: thread.submit(request).result(timeout=60), asked))
    expected = {(r.uid, r.sample_index): r.token_ids for r in make_engine().generate(asked)}
    assert [[r.sample_index for r in answer] for answer in answers] == [[0, 1]] * 12
    assert {(r.uid, r.sample_index): r.token_ids for answer in answers for r in answer} == expected
    assert thread.counters.stats.completion_tokens == sum(len(ids) for ids in expected.values())
    assert (thread.counters.running, thread.counters.waiting) == (0, 0)


def test_only_the_request_that_makes_the_model_raise_fails(
    thread: EngineThread, make_engine: Callable[[], Engine]
) -> None:
    good = requests(9)
    futures = [thread.submit(request) for request in good[:5]]
    bad = [thread.submit(Request(f"bad{i}", (5, *POISON), SAMPLING)) for i in range(2)]
    futures += [thread.submit(request) for request in good[5:]]
    for future in bad:
        with pytest.raises(RowError, match="RuntimeError: the model tastes poison") as caught:
            future.result(timeout=60)
        assert caught.value.error_type == "engine_error"
    expected = [result.token_ids for result in make_engine().generate(good)]
    assert [future.result(timeout=60)[0].token_ids for future in futures] == expected
    assert thread.counters.stats.completion_tokens == sum(len(tokens) for tokens in expected)
    after = thread.submit(Request("after", (10, 20, 30), SAMPLING)).result(timeout=60)
    assert len(after) == 1


def test_a_refused_request_raises_at_its_caller(thread: EngineThread) -> None:
    with pytest.raises(RowError) as caught:
        thread.submit(Request("long", (7,) * 600, SAMPLING)).result(timeout=60)
    assert caught.value.error_type == "prompt_too_long"


def test_a_cancelled_request_leaves_the_engine(thread: EngineThread) -> None:
    long = SamplingConfig(max_tokens=400, ignore_eos=True)
    futures = [thread.submit(request) for request in requests(8, long)]
    for future in futures:
        assert future.cancel()
    # The same rows again, as a second attempt at their shard submits them.
    again = [thread.submit(request) for request in requests(8)]
    assert [len(future.result(timeout=60)) for future in again] == [1] * 8
    assert (thread.counters.running, thread.counters.waiting) == (0, 0)


def test_an_engine_that_cannot_be_renewed_ends_the_process(tiny_model_dir: Callable[[str], Path]) -> None:
    code = f"""
from pipeline.config import AutoregressiveConfig, EngineConfig, ModelConfig, SamplingConfig
from workers.engine import Engine, Request
from workers.engine_thread import EngineThread
from workers.model_loading import load_model

loaded = load_model(ModelConfig(id={str(tiny_model_dir("llama"))!r}, device="cpu"))
thread = EngineThread(lambda: Engine(loaded, EngineConfig(), AutoregressiveConfig()))
loaded.model.forward = None
del loaded
thread.submit(Request("r0", (10, 20), SamplingConfig())).result(timeout=60)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "the engine cannot go on, this worker ends" in result.stderr
