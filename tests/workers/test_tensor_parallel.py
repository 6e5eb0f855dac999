"""Two processes that share a model, on a CPU: the tokens are those of one process, and no one outlives the other."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig as HFConfig

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig, DecodingConfig, LookaheadConfig
from pipeline.errors import ConfigError
from tests.workers.replica import Replica, decode
from workers.engine import Request
from workers.model_loading import load_model
from workers.tensor_parallel import check_divisible, load_replica

FAMILIES = ["llama", "qwen3"]
GREEDY = SamplingConfig(temperature=0.0, max_tokens=16)
SAMPLED = SamplingConfig(temperature=0.7, top_p=0.95, n=2, max_tokens=16, seed=3)
CASES: dict[str, tuple[DecodingConfig, SamplingConfig]] = {
    "plain, greedy": (AutoregressiveConfig(), GREEDY),
    "plain, sampled": (AutoregressiveConfig(), SAMPLED),
    "auto, greedy": (AutoConfig(), GREEDY),
    "auto, sampled": (AutoConfig(), SAMPLED),
    "trees in every step, so that accepted rows move": (LookaheadConfig(min_window=16), GREEDY),
}
SMALL = EngineConfig(max_sequences=4, max_tokens_per_step=96, kv_memory_gb=265 / 2**20)
"""So little memory that slots move, slabs come and go, and kept prompts are given up."""
ENDS_S = 20.0


@pytest.fixture(scope="module")
def replica_of(tiny_model_dir: Callable[[str], Path]) -> Iterator[Callable[[str], Replica]]:
    """`replica_of("llama")`, started once. In float64, as sums over processes round in another order."""
    started: dict[str, Replica] = {}

    def get(family: str) -> Replica:
        if family not in started:
            started[family] = Replica(ModelConfig(id=str(tiny_model_dir(family)), dtype="float64", device="cpu"))
        return started[family]

    yield get
    for replica in started.values():
        replica.close()


def some_requests(sampling: SamplingConfig) -> list[list[Request]]:
    """First prompts that begin alike, then one that shares less of that, and long ones that need its memory."""
    rng = random.Random(5)
    head = random_tokens(rng, 60)
    first = [head + random_tokens(rng, length) for length in (1, 9, 20)] + [random_tokens(rng, 1)]
    second = [head[:24] + random_tokens(rng, 5)] + [random_tokens(rng, length) for length in (100, 130, 140, 150, 160)]
    return [
        [Request(f"row-{wave}-{i}", tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
        for wave, prompts in enumerate((first, second))
    ]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, 300) for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_one_process(
    family: str, replica_of: Callable[[str], Replica], tiny_model_dir: Callable[[str], Path]
) -> None:
    replica = replica_of(family)
    single = load_model(ModelConfig(id=str(tiny_model_dir(family)), dtype="float64", device="cpu"))
    for name, (decoding, sampling) in CASES.items():
        waves = some_requests(sampling)
        assert replica.decode(SMALL, decoding, waves) == decode(single, SMALL, decoding, waves), name
    every = {"resize", "remove", "copy", "move", "keep", "load", "cut", "drop", "end"}
    assert replica.operations() == every, "the requests are to exercise everything that can happen to the cache"


def test_a_follower_that_stands_still_ends_the_replica(replica_of: Callable[[str], Replica]) -> None:
    """The time-out of a collective ends rank 0 within a step."""
    replica = replica_of("llama")
    replica.bound_collectives(2.0)
    os.kill(replica.follower_pid, signal.SIGSTOP)
    try:
        with pytest.raises(EOFError):
            replica.decode(SMALL, AutoregressiveConfig(), some_requests(GREEDY))
        replica.leader.join(ENDS_S)
        assert replica.leader.exitcode == 1
    finally:
        os.kill(replica.follower_pid, signal.SIGKILL)


def test_a_follower_does_not_outlive_rank_0(replica_of: Callable[[str], Replica]) -> None:
    replica = replica_of("qwen3")
    replica.leader.kill()
    assert ends(replica.follower_pid)


def test_a_model_that_is_refused_after_all_ends_the_followers_alone(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rank 0 says what is wrong, and may be asked again."""
    folder = shutil.copytree(tiny_model_dir("llama"), tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    replica = Replica(ModelConfig(id=str(folder), device="cpu"))
    try:
        assert replica.refused == f"model.id must have all its weights, got {str(folder)!r} without model.norm.weight"
        assert ends(replica.follower_pid)
        assert replica.leader.is_alive()
    finally:
        replica.close()


def ends(pid: int) -> bool:
    """Whether a process ends in time; it may stay as a zombie that nobody buries."""
    deadline = time.monotonic() + ENDS_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


def never(_: Any) -> None:
    raise AssertionError("nothing is to be started")


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (3, "cluster.tensor_parallel must divide the 4 attention heads of {id}, got 3"),
        (4, "cluster.tensor_parallel must divide the 2 key/value heads of {id}, got 4"),
    ],
)
def test_heads_must_be_divisible(size: int, reason: str, tiny_model_dir: Callable[[str], Path]) -> None:
    model = ModelConfig(id=str(tiny_model_dir("llama")), device="cpu")
    with pytest.raises(ConfigError) as raised:
        load_replica(model, size, never)
    assert str(raised.value) == reason.format(id=repr(model.id))


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cluster.tensor_parallel must be 1 for a model that has no .* type opt$"):
        check_divisible("m", HFConfig.for_model("opt"), 2)
