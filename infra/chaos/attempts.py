"""What was decoded more than once, from the events that the hook in the workers wrote down. Pure functions.

An attempt is lost when another one at the same shard follows that is no mere duplicate (one that was sent while the
first was alive and well, and ended later). It counts as redone when a row of it had begun to decode: an attempt may
also wait behind another one in the same worker, and nothing is lost with it then.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Event = Mapping[str, object]


@dataclass(slots=True)
class Attempt:
    """One call of a worker for a shard. `ended` is None where its process died or was stopped for good."""

    shard: int
    run: str
    pid: int
    began: float
    ended: float | None = None
    is_decoded: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """An attempt that had to be repeated, and when the next one began."""

    shard: int
    again_at: float
    is_redone: bool


def read_events(lines: Sequence[str]) -> list[Event]:
    return [json.loads(line) for line in lines]


def attempts_of(events: Sequence[Event], shard_of: Mapping[str, int]) -> list[Attempt]:
    """`shard_of` names the shard of each row id."""
    attempts: list[Attempt] = []
    alive: dict[tuple[int, int], Attempt] = {}
    for event in sorted(events, key=lambda event: float(str(event["at"]))):
        at, pid = float(str(event["at"])), int(str(event["pid"]))
        shard = shard_of[str(event["row"])] if event["event"] == "decoded" else int(str(event["shard"]))
        attempt = alive.get((pid, shard))
        if event["event"] == "began":
            alive[pid, shard] = Attempt(shard, str(event["run"]), pid, at)
            attempts.append(alive[pid, shard])
        elif attempt is not None and event["event"] == "decoded":
            attempt.is_decoded = True
        elif attempt is not None:
            attempt.ended = at
            del alive[pid, shard]
    return attempts


def lost_attempts(attempts: Sequence[Attempt]) -> list[Lost]:
    """All but the last attempt of each shard, duplicates left out."""
    by_shard: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda attempt: attempt.began):
        by_shard[attempt.shard].append(attempt)
    return [
        Lost(first.shard, second.began, first.is_decoded)
        for tries in by_shard.values()
        for first, second in itertools.pairwise(tries)
        if not _is_duplicate(first, second)
    ]


def _is_duplicate(first: Attempt, second: Attempt) -> bool:
    return first.run == second.run and first.ended is not None and first.ended > second.began
