"""Turns: in each round, at each batch size, every contestant once, in an order that rotates from round to round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from jobs.bench.contestants import Contestant, Turn
from jobs.bench.workload import Workload
from pipeline.errors import ConfigError


@dataclass(slots=True)
class Entry:
    """What is known of one contestant at one batch size.

    Of the turns only seconds and counts stay, and the tokens of the last one.
    """

    contestant: Contestant
    batch: int
    startup_s: float | None = None
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    note: str | None = None
    error: str | None = None

    @property
    def plays(self) -> bool:
        return self.note is None and self.error is None

    @property
    def rates(self) -> list[float]:
        """New tokens per second of each turn."""
        return [tokens / seconds for tokens, seconds in zip(self.num_tokens, self.seconds, strict=True)]

    @property
    def tokens_per_step(self) -> float | None:
        return sum(self.num_tokens) / sum(self.num_steps) if sum(self.num_steps) else None

    def add(self, turn: Turn) -> None:
        self.seconds.append(turn.seconds)
        self.num_tokens.append(turn.num_tokens)
        self.num_steps.append(turn.num_steps)
        self.token_ids = turn.token_ids


def compete(
    contestants: Sequence[Contestant],
    batches: Sequence[int],
    rounds: int,
    workload: Workload,
    entries: list[Entry],
    on_turn: Callable[[int, Entry], None],
) -> None:
    """Fills `entries`, one per contestant and batch size, while it goes; `on_turn(round, entry)` follows each turn.

    A contestant that fails is out, its error is kept, and the others go on. A ConfigError at start is raised.
    """
    entries += [Entry(contestant, batch) for contestant in contestants for batch in batches]
    for contestant in contestants:
        _start(contestant, [entry for entry in entries if entry.contestant is contestant])
    for number in range(rounds):
        for batch in batches:
            for entry in _rotated([entry for entry in entries if entry.batch == batch], number):
                if entry.plays:
                    _play(entry, workload)
                    on_turn(number, entry)


def _start(contestant: Contestant, entries: Sequence[Entry]) -> None:
    for entry in entries:
        entry.note = contestant.refusal(entry.batch)
    players = [entry for entry in entries if entry.plays]
    if not players:
        return
    try:
        seconds = contestant.start()
        for entry in players:
            entry.startup_s = seconds
    except ConfigError:
        raise
    except Exception as error:
        for entry in players:
            entry.error = _words(error)


def _rotated(entries: list[Entry], by: int) -> Iterator[Entry]:
    """Worked example: a, b, c rotated by 1 is b, c, a."""
    for i in range(len(entries)):
        yield entries[(i + by) % len(entries)]


def _play(entry: Entry, workload: Workload) -> None:
    """One turn. The first preparation counts as start-up: it compiles, calibrates and warms up."""
    contestant = entry.contestant
    try:
        with _at_rest_after(contestant):
            began = time.perf_counter()
            contestant.prepare(entry.batch)
            if not entry.seconds and entry.startup_s is not None:
                entry.startup_s += time.perf_counter() - began
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # a full collection in a turn would take 250 ms of it
            turn = contestant.run(entry.batch)
        workload.check(turn.token_ids)
        entry.add(turn)
    except Exception as error:
        entry.error = _words(error)


@contextmanager
def _at_rest_after(contestant: Contestant) -> Iterator[None]:
    try:
        yield
    finally:
        contestant.rest()


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
