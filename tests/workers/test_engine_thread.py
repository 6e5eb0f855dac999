"""The thread between callers and the engine: nothing is lost, and a request that makes the model raise fails alone."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoregressiveConfig
from pipeline.errors import RowError
from pipeline.logs import current_trace, tracing
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
def make_engine(loaded: LoadedModel) -> Callable[[int], Engine]:
    config = EngineConfig(max_sequences=4)
    return lambda halvings: Engine(loaded, config, AutoregressiveConfig(), halvings=halvings)


@pytest.fixture
def thread(make_engine: Callable[[int], Engine]) -> Iterator[EngineThread]:
    thread = EngineThread(make_engine)
    yield thread
    thread.close()


def requests(count: int, sampling: SamplingConfig = SAMPLING) -> list[Request]:
    return [Request(f"r{i}", (10 + i, 20, 30), sampling) for i in range(count)]


def test_many_callers_get_what_the_engine_alone_gives(
    thread: EngineThread, make_engine: Callable[[int], Engine]
) -> None:
    asked = requests(12, SAMPLING.model_copy(update={"n": 2}))
    with ThreadPoolExecutor(6) as callers:
        answers = list(callers.map(lambda request: thread.submit(request).result(timeout=60), asked))
    expected = {(r.uid, r.sample_index): r.token_ids for r in make_engine(0).generate(asked)}
    assert [[r.sample_index for r in answer] for answer in answers] == [[0, 1]] * 12
    assert {(r.uid, r.sample_index): r.token_ids for answer in answers for r in answer} == expected
    assert thread.counters.stats.completion_tokens == sum(len(ids) for ids in expected.values())
    assert (thread.counters.running, thread.counters.waiting) == (0, 0)
    assert thread.counters.prompt_tokens == 3 * len(asked)
    seconds = thread.take_step_seconds()
    assert seconds
    assert all(second > 0 for second in seconds)
    assert thread.take_step_seconds() == []


def test_only_the_request_that_makes_the_model_raise_fails(
    thread: EngineThread, make_engine: Callable[[int], Engine]
) -> None:
    good = requests(9)
    futures = [thread.submit(request) for request in good[:5]]
    bad = [thread.submit(Request(f"bad{i}", (5, *POISON), SAMPLING)) for i in range(2)]
    futures += [thread.submit(request) for request in good[5:]]
    for future in bad:
        with pytest.raises(RowError, match="RuntimeError: the model tastes poison") as caught:
            future.result(timeout=60)
        assert caught.value.error_type == "engine_error"
    expected = [result.token_ids for result in make_engine(0).generate(good)]
    assert [future.result(timeout=60)[0].token_ids for future in futures] == expected
    assert thread.counters.stats.completion_tokens == sum(len(tokens) for tokens in expected)
    after = thread.submit(Request("after", (10, 20, 30), SAMPLING)).result(timeout=60)
    assert len(after) == 1


def test_what_the_engine_says_of_requests_carries_their_traces(
    thread: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[tuple[str, str]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((current_trace(), record.getMessage().partition(":")[0]))

    listener = Listener()
    loggers = [logging.getLogger(f"workers.{name}") for name in ("engine_thread", "in_flight")]
    for logger in loggers:
        logger.addHandler(listener)
        caplog.set_level(logging.INFO, logger.name)
    with tracing("00001-ab12cd34-1"):
        bad = thread.submit(Request("bad", (5, *POISON), SAMPLING))
    with tracing("00002-ab12cd34-1"):
        good = thread.submit(requests(1)[0])
    assert isinstance(bad.exception(timeout=60), RowError)
    good.result(timeout=60)
    for logger in loggers:
        logger.removeHandler(listener)
    assert said[0][0] in ("00001-ab12cd34-1", "00001-ab12cd34-1,00002-ab12cd34-1")  # as they had come in by then
    assert said[0][1] == "the engine raised; finding the request that caused it"
    assert said[1:] == [("00001-ab12cd34-1", "the request bad failed")]


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


def test_a_step_that_does_not_end_shows_as_a_stall(
    make_engine: Callable[[int], Engine], loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, is_in_step = threading.Event(), threading.Event()

    def hang(module: torch.nn.Module, args: Any) -> None:
        is_in_step.set()
        assert goes_on.wait(60)

    def build_slowly(halvings: int) -> Engine:
        if is_in_step.is_set():
            builds.set()
            assert built.wait(60)
        return make_engine(halvings)

    builds, built = threading.Event(), threading.Event()
    thread = EngineThread(build_slowly)
    assert thread.counters.stalled_s == 0.0  # however long ago it was made: there is no work
    hook = loaded.model.register_forward_pre_hook(hang)
    future = thread.submit(requests(1)[0])
    assert is_in_step.wait(60)
    first = thread.counters.stalled_s
    assert 0.0 < first < thread.counters.stalled_s
    hook.remove()
    poisoned = thread.submit(Request("bad", (5, *POISON), SAMPLING))
    goes_on.set()
    assert builds.wait(60)  # the engine is made anew, which is no stall
    assert thread.counters.stalled_s == 0.0
    built.set()
    assert len(future.result(timeout=60)) == 1
    assert isinstance(poisoned.exception(timeout=60), RowError)
    assert thread.counters.stalled_s == 0.0
    thread.close()


def test_an_engine_that_cannot_be_renewed_ends_the_process(tiny_model_dir: Callable[[str], Path]) -> None:
    code = f"""
from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoregressiveConfig
from workers.engine import Engine, Request
from workers.engine_thread import EngineThread
from workers.model_loading import load_model

loaded = load_model(ModelConfig(id={str(tiny_model_dir("llama"))!r}, device="cpu"))
thread = EngineThread(lambda halvings: Engine(loaded, EngineConfig(), AutoregressiveConfig()))
loaded.model.forward = None
del loaded
thread.submit(Request("r0", (10, 20), SamplingConfig())).result(timeout=60)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "the engine cannot go on, this worker ends" in result.stderr
