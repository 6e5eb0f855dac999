"""Memory that runs out costs time, never tokens: the engine takes on half as much, and every output stays the same."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.config_io import parse_job
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig, DecodingConfig
from pipeline.errors import RowError, TransientError
from workers import actor, kv_cache
from workers.engine import Engine, Request, SampleResult
from workers.engine_thread import EngineThread
from workers.memory_faults import FEWEST_TOKENS_PER_STEP, admission, is_out_of_memory
from workers.model_loading import LoadedModel, load_model

ENGINE = EngineConfig(max_sequences=8, max_tokens_per_step=64, kv_memory_gb=2**-6, compile="off")
SAMPLING = SamplingConfig(max_tokens=24, temperature=0.8, seed=3, n=2)
GREEDY_EATER = (1, 1, 1)
"""Tokens with which a prompt takes all memory there is."""


class Memory:
    """What the device has: a forward of more than `rows` rows, or one that reads the greedy eater, finds none."""

    def __init__(self) -> None:
        self.rows = 1 << 30
        self.error: Callable[[], Exception] = lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.faults = 0

    def check(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        tokens = kwargs["input_ids"].flatten().tolist()
        if len(tokens) > self.rows or ", ".join(map(str, GREEDY_EATER)) in str(tokens):
            self.faults += 1
            raise self.error()


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float64", device="cpu"))


@pytest.fixture
def memory(loaded: LoadedModel) -> Any:
    memory = Memory()
    hook = loaded.model.register_forward_pre_hook(memory.check, with_kwargs=True)
    yield memory
    hook.remove()


def requests(count: int, sampling: SamplingConfig = SAMPLING) -> list[Request]:
    return [Request(f"r{i}", tuple(range(10 + i, 22 + 5 * i)), sampling) for i in range(count)]


def plain(loaded: LoadedModel, asked: list[Request]) -> list[tuple[int, ...]]:
    results = Engine(loaded, ENGINE, AutoregressiveConfig()).generate(asked)
    return [result.token_ids for result in results]


def through_thread(thread: EngineThread, asked: list[Request]) -> list[tuple[int, ...]]:
    futures = [thread.submit(request) for request in asked]
    answers: list[list[SampleResult]] = [future.result(timeout=60) for future in futures]
    return [result.token_ids for answer in answers for result in answer]


def cpu_error() -> Exception:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    ("decoding", "error"),
    [
        (AutoregressiveConfig(), MemoryError),
        (AutoregressiveConfig(), lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
        (AutoConfig(), cpu_error),  # here memory runs out while the engine is built: it times steps of many rows
    ],
)
def test_the_engine_goes_on_with_half_and_gives_the_same_tokens(
    loaded: LoadedModel,
    memory: Memory,
    caplog: pytest.LogCaptureFixture,
    decoding: DecodingConfig,
    error: Callable[[], Exception],
) -> None:
    asked = requests(6)
    expected = plain(loaded, asked)
    engines: list[weakref.ref[Engine]] = []

    def make(halvings: int) -> Engine:
        engine = Engine(loaded, ENGINE, decoding, halvings=halvings)
        engines.append(weakref.ref(engine))
        return engine

    memory.rows, memory.error = 20, error
    with caplog.at_level(logging.WARNING, logger="workers"):
        thread = EngineThread(make)
        assert through_thread(thread, asked) == expected
    # 64 rows a step, then 32, then 16, which there is memory for.
    assert memory.faults == thread.counters.memory_halvings == 2
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "memory ran out, the engine goes on with 1/2 of its limits",
        "memory ran out, the engine goes on with 1/4 of its limits",
    ]
    last = engines[-1]()
    assert last is not None
    assert (last.scheduler.max_running, last.scheduler.max_tokens_per_step) == (2, 16)
    assert last.scheduler.cache.budget_bytes == 2**24 // 4
    thread.close()
    gc.collect()
    assert all(engine() is None for engine in engines[:-1]), "an engine that was given up still takes memory"


def test_a_request_that_alone_finds_no_memory_fails_alone(loaded: LoadedModel, memory: Memory) -> None:
    good = requests(5)
    expected = plain(loaded, good)
    thread = EngineThread(lambda halvings: Engine(loaded, ENGINE, AutoregressiveConfig(), halvings=halvings))
    futures = [thread.submit(request) for request in good[:2]]
    bad = [thread.submit(Request(f"bad{i}", (5, *GREEDY_EATER, 6), SAMPLING)) for i in range(2)]
    futures += [thread.submit(request) for request in good[2:]]
    for future in bad:
        with pytest.raises(RowError, match=r"^OutOfMemoryError: CUDA out of memory") as caught:
            future.result(timeout=60)
        assert caught.value.error_type == "out_of_memory"
    assert [r.token_ids for future in futures for r in future.result(timeout=60)] == expected
    # 8 sequences, 4, 2, 1; from then on every fault is the end of a request.
    assert (thread.counters.memory_halvings, memory.faults) == (3, 3 + len(bad))
    assert through_thread(thread, good) == expected
    thread.close()


def test_memory_may_run_out_while_a_bad_request_is_looked_for(
    loaded: LoadedModel, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = requests(4)
    expected = plain(loaded, good)
    steps, step = [0], Engine.step

    def fail_first(engine: Engine) -> list[SampleResult]:
        steps[0] += 1
        if steps[0] == 3:
            memory.rows = 20
            raise RuntimeError("a fault of another kind")
        return step(engine)

    monkeypatch.setattr(Engine, "step", fail_first)
    thread = EngineThread(lambda halvings: Engine(loaded, ENGINE, AutoregressiveConfig(), halvings=halvings))
    assert through_thread(thread, good) == expected
    assert thread.counters.memory_halvings == 2
    thread.close()


def test_keys_and_values_beyond_what_there_is(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator of slabs fails above 3 slots of the smallest size."""
    long = SAMPLING.model_copy(update={"max_tokens": 150, "ignore_eos": True, "n": 1})
    asked = requests(6, long)
    expected = plain(loaded, asked)
    zeros = torch.zeros

    def zeros_below_limit(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = zeros(*shape, **options)
        if tensor.dim() == 6 and tensor.shape[2] * tensor.shape[3] > 3 * kv_cache.MIN_CAPACITY:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate keys and values")
        return tensor

    monkeypatch.setattr(torch, "zeros", zeros_below_limit)
    thread = EngineThread(lambda halvings: Engine(loaded, ENGINE, AutoregressiveConfig(), halvings=halvings))
    assert through_thread(thread, asked) == expected
    assert 1 <= thread.counters.memory_halvings <= 3
    thread.close()


def test_limits_are_halved_down_to_one_short_sequence() -> None:
    engine = EngineConfig(max_sequences=16, max_tokens_per_step=1024, kv_memory_gb=8.0)
    assert admission(engine, 0) == engine
    five = admission(engine, 5)
    assert (five.max_sequences, five.max_tokens_per_step, five.kv_memory_gb) == (1, 32, 0.25)
    assert admission(engine, 30).max_tokens_per_step == FEWEST_TOKENS_PER_STEP
    assert admission(EngineConfig(max_tokens_per_step=4), 9).max_tokens_per_step == 4


def test_what_is_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("not enough memory of the past"))


def test_a_request_longer_than_the_halved_budget_is_served_alone(loaded: LoadedModel) -> None:
    probe = Engine(loaded, ENGINE, AutoregressiveConfig())
    slot_bytes = kv_cache.MIN_CAPACITY * probe.scheduler.cache.shape.bytes_per_token
    config = ENGINE.model_copy(update={"kv_memory_gb": 2 * slot_bytes / 2**30})
    long = SAMPLING.model_copy(update={"max_tokens": 150, "ignore_eos": True})
    asked = [Request("long", tuple(range(10, 100)), long), *requests(3)]
    halved = Engine(loaded, config, AutoregressiveConfig(), halvings=3)
    assert halved.scheduler.cache.budget_bytes == slot_bytes // 4
    assert [result.token_ids for result in halved.generate(asked)] == plain(loaded, asked)
    with pytest.raises(RowError, match=f"KV memory of {2 * slot_bytes} bytes"):
        halved.submit(Request("longer", tuple(range(10, 210)), long))


def test_a_model_without_room_may_find_it_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(config: ModelConfig) -> LoadedModel:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB\nMore")

    monkeypatch.setattr(actor, "load_model", no_room)
    worker = actor.GenerationWorker(
        parse_job({"model": "m", "input": "in.parquet", "output": str(tmp_path)}), "worker-0"
    )
    with pytest.raises(TransientError, match=r"^the model does not fit into the memory of its device: CUDA .* GiB$"):
        worker.ready()
