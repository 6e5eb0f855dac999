"""Which jobs run, and what happens to each of them when: a pure function of the seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Cluster = Literal["own", "nodes"]
"""`own`: the driver starts a Ray of its own. `nodes`: it joins a cluster of a head and two nodes."""
Store = Literal["disk", "s3"]

ANYWHERE = ("kill_worker", "terminate_worker", "stop_worker", "pause_worker", "kill_driver", "drain_driver")
BY_CLUSTER: dict[Cluster, tuple[str, ...]] = {"own": ("kill_machine",), "nodes": ("kill_node", "kill_head")}
STORAGE = ("storage_errors", "storage_resets", "storage_lost_answers", "storage_slow", "storage_cut", "storage_outage")
POISONS = ("killing_row", "raising_row")
KINDS = (*ANYWHERE, *BY_CLUSTER["own"], *BY_CLUSTER["nodes"], *STORAGE, *POISONS)

STRATEGIES = ("auto", "lookahead", "jacobi", "suffix", "recycling", "autoregressive")
SHARDS_PER_FAULT = 7
_FIRST, _LAST = 0.05, 0.75
"""Faults strike when between so many of the shards are committed."""
_OVERLAPPING = 0.25


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to break, once `after_commits` shards are committed.

    Unless it overlaps, it waits until the job has recovered from the fault before, that is, has committed a shard.
    """

    kind: str
    after_commits: int
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """A job and its faults. `poisons` are kinds of rows that no worker survives, or no engine computes."""

    index: int
    seed: int
    cluster: Cluster
    store: Store
    strategy: str
    n: int
    temperature: float
    workers: int
    rows_per_shard: int
    shards: int
    poisons: tuple[str, ...]
    faults: tuple[Fault, ...]

    @property
    def num_rows(self) -> int:
        return self.shards * self.rows_per_shard

    @property
    def name(self) -> str:
        return f"round-{self.index}"


def schedule(rounds: int, faults_per_round: int, seed: int, kinds: Sequence[str] = KINDS) -> list[Round]:
    """`rounds` jobs with `faults_per_round` faults each, rows that are faults included.

    All kinds come about equally often, as far as the jobs' places allow them: each draw is among those that were drawn
    least. Every third round has one row of the kinds in `POISONS`.
    """
    rng = random.Random(seed)
    drawn: Counter[str] = Counter()
    strategies = rng.sample(STRATEGIES, len(STRATEGIES))
    return [_round(index, faults_per_round, strategies, rng, drawn, kinds) for index in range(rounds)]


def _round(
    index: int,
    num_faults: int,
    strategies: Sequence[str],
    rng: random.Random,
    drawn: Counter[str],
    kinds: Sequence[str],
) -> Round:
    cluster: Cluster = "nodes" if index % 2 else "own"
    store: Store = "s3" if index % 4 in (1, 2) else "disk"
    allowed = [*ANYWHERE, *BY_CLUSTER[cluster], *(STORAGE if store == "s3" else ())]
    allowed = [kind for kind in allowed if kind in kinds]
    poisons = _draw([kind for kind in POISONS if kind in kinds], 1, rng, drawn) if index % 3 == 2 else []
    shards = max(12, SHARDS_PER_FAULT * num_faults)
    chosen = _draw(allowed, num_faults - len(poisons), rng, drawn)
    return Round(
        index=index,
        seed=rng.randrange(2**31),
        cluster=cluster,
        store=store,
        strategy=strategies[index % len(strategies)],
        n=rng.choice((1, 1, 2)),
        temperature=rng.choice((0.0, 0.7, 1.0)),
        workers=2 if cluster == "nodes" else rng.choice((2, 3)),
        rows_per_shard=rng.choice((2, 3, 4)),
        shards=shards,
        poisons=tuple(poisons),
        faults=_placed(chosen, shards, rng),
    )


def _draw(kinds: Sequence[str], count: int, rng: random.Random, drawn: Counter[str]) -> list[str]:
    chosen = []
    for _ in range(count if kinds else 0):
        least = min(drawn[kind] for kind in kinds)
        kind = rng.choice([kind for kind in kinds if drawn[kind] == least])
        drawn[kind] += 1
        chosen.append(kind)
    return chosen


def _placed(kinds: Sequence[str], shards: int, rng: random.Random) -> tuple[Fault, ...]:
    """One fault in each of equal stretches of the job, in random order."""
    stretch = (_LAST - _FIRST) * shards / max(1, len(kinds))
    places = [_FIRST * shards + stretch * (i + rng.random()) for i in range(len(kinds))]
    return tuple(
        Fault(kind, max(1, int(place)), overlaps=i > 0 and rng.random() < _OVERLAPPING)
        for i, (kind, place) in enumerate(zip(rng.sample(kinds, len(kinds)), places, strict=True))
    )
