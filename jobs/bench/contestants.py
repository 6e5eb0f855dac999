"""What takes part in a benchmark, and our own engine as such."""

from __future__ import annotations

import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jobs.bench.workload import Workload
from pipeline.config import EngineConfig
from pipeline.decoding_config import DecodingConfig
from pipeline.records import AcceptanceStats
from workers.engine import Engine, Request
from workers.model_loading import LoadedModel

WARM_UP_TOKENS = 8
"""New tokens of a warm-up: enough steps to compile, to calibrate and to let allocators grow."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One timed pass over the workload.

    `token_ids` holds the new tokens of each sequence in the order of `Workload.sequences`. `num_steps` counts, over all
    sequences, the forward passes in which a sequence gained tokens; so tokens / num_steps is tokens per step.
    """

    seconds: float
    token_ids: list[list[int]]
    num_steps: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


class Contestant(Protocol):
    """Something that generates. Only `run` is timed; whatever it needs first belongs into `start` and `prepare`.

    The life of one: start, then turns of (prepare, run, rest) at any batch size in any order, then close.
    """

    name: str
    is_own: bool

    def refusal(self, batch: int) -> str | None:
        """Why it cannot run at this batch size, in a few words; None when it can."""

    def start(self) -> float:
        """Load what all batch sizes need; returns the seconds that it takes when nothing is shared."""

    def prepare(self, batch: int) -> None:
        """Get ready for one turn, warm-up included. The warm-up must not show it the prompts of the workload."""

    def run(self, batch: int) -> Turn:
        """Generate for the whole workload with at most `batch` sequences in flight."""

    def rest(self) -> None:
        """The turn is over: use no CPU until the next one."""

    def close(self) -> None:
        """End whatever still runs. May be called at any time, also when `start` failed."""


def strategies() -> dict[str, type[DecodingConfig]]:
    """Every decoding strategy that a job can name, with its section."""
    union, *_ = typing.get_args(DecodingConfig)
    return {section.model_fields["strategy"].default: section for section in typing.get_args(union)}


class OwnContestant:
    """Our engine with one decoding strategy.

    Every turn has an engine of its own: drafters learn from finished outputs, and a second pass over the same prompts
    would find its answers there. The model is shared.
    """

    is_own = True

    def __init__(
        self,
        name: str,
        model: Callable[[], tuple[LoadedModel, float]],
        engine: EngineConfig,
        decoding: DecodingConfig,
        workload: Workload,
    ) -> None:
        self.name = name
        self._model = model
        self._engine_config = engine
        self._decoding = decoding
        self._workload = workload
        self._engine: Engine | None = None

    def refusal(self, batch: int) -> str | None:
        return None

    def start(self) -> float:
        _, seconds = self._model()
        return seconds

    def prepare(self, batch: int) -> None:
        loaded, _ = self._model()
        self._engine = Engine(loaded, self._engine_config.model_copy(update={"max_sequences": batch}), self._decoding)
        sampling = self._workload.sampling.model_copy(update={"max_tokens": WARM_UP_TOKENS, "n": 1})
        prompts = self._workload.warm_up(batch)
        self._engine.generate([Request(f"warm-up-{i}", ids, sampling) for i, ids in enumerate(prompts)])

    def run(self, batch: int) -> Turn:
        assert self._engine is not None
        workload = self._workload
        began = time.perf_counter()
        results = self._engine.generate(
            [Request(uid, ids, workload.sampling) for uid, ids in zip(workload.uids, workload.prompts, strict=True)]
        )
        seconds = time.perf_counter() - began
        stats = sum((result.stats for result in results), AcceptanceStats())
        return Turn(seconds, [list(result.token_ids) for result in results], stats.num_steps)

    def rest(self) -> None:
        self._engine = None

    def close(self) -> None:
        self._engine = None
