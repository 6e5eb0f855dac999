"""What to do with a shard that has failed: pure functions from what happened to what comes next.

A fault (TransientError) is met by another attempt, after a pause. A death of the worker is met by another attempt,
alone on a worker so that the next death can be blamed on this shard; the second death starts a search: one half of the
suspects is probed, decoded with nothing written, and the half that kills is halved in turn. A single row that kills
twice is dead (once may be an accident): later attempts write it as an error row and never decode it. What cannot be
settled is given up as a whole, all its rows errors.

A loss (the machine is gone, or the worker was told to end) is nobody's fault and is met by another attempt at once.
Only when a shard meets one after another is it a death: there may be rows that take the machine down.

Worked example, rows 0-7 of which row 5 kills: generate (death), generate alone (death), probe 0-3 (survives), probe 4-5
(death), probe 4 (survives), probe 5 (death), probe 5 (death: row 5 is dead), generate without row 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.records import Shard

MAX_DEAD_ROWS = 8
"""A shard with more rows that kill is given up: each of them costs several starts of a worker."""

_DEATHS_BEFORE_SEARCH = 2
_LOSSES_FORGIVEN = 5


@dataclass(frozen=True, slots=True)
class Generate:
    """Decode the shard and write its part."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Decode some rows and write nothing, to see whether the worker survives it."""

    rows: range


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Write the part with every row as this error."""

    error_type: str
    message: str


Action = Generate | Probe | GiveUp


@dataclass(frozen=True, slots=True)
class Troubles:
    """What a shard has been through.

    `suspects` are rows of the file among which a search looks for one that kills, `accused` is one that has killed when
    it was alone, and `fruitless` counts the searches in which no single row did. `attempts` counts everything that was
    sent to a worker, `losses` those in a row that were nobody's fault.
    """

    attempts: int = 0
    faults: int = 0
    deaths: int = 0
    losses: int = 0
    suspects: range | None = None
    accused: int | None = None
    dead_rows: tuple[int, ...] = ()
    fruitless: int = 0
    message: str = ""

    @property
    def needs_own_worker(self) -> bool:
        return self.deaths > 0

    @property
    def is_clean(self) -> bool:
        """Nothing speaks against a second attempt beside the first."""
        return self.deaths == 0 and self.faults == 0 and self.suspects is None


def next_action(shard: Shard, troubles: Troubles, max_attempts: int) -> Action:
    if troubles.fruitless >= max_attempts or len(troubles.dead_rows) > MAX_DEAD_ROWS:
        return GiveUp("worker_crash", f"the shard kept ending its worker: {troubles.message}")
    if troubles.faults >= max_attempts:
        return GiveUp("shard_failed", f"the shard failed {troubles.faults} times: {troubles.message}")
    if troubles.suspects is None:
        return Generate()
    return Probe(first_half(troubles.suspects))


def is_hopeless(troubles: Troubles, max_attempts: int) -> bool:
    """Whether not even giving the shard up works, as when the store is gone."""
    return troubles.faults >= 2 * max_attempts


def pause_s(troubles: Troubles) -> float:
    """Seconds before the next attempt: none after a death, 1, 2, 4.. up to 30 after faults."""
    return min(2.0 ** (troubles.faults - 1), 30.0) if troubles.faults else 0.0


def after_fault(troubles: Troubles, message: str) -> Troubles:
    return replace(troubles, faults=troubles.faults + 1, message=message)


def after_death(shard: Shard, troubles: Troubles, action: Action, message: str) -> Troubles:
    """The worker died while it worked on `action`."""
    if isinstance(action, GiveUp):  # which decodes nothing, so the shard is not to blame
        return after_fault(troubles, message)
    if isinstance(action, Probe):
        row = action.rows.start
        if len(action.rows) > 1:
            return replace(troubles, suspects=action.rows, message=message)
        if troubles.accused != row and shard.num_rows > 1:  # the one row of a shard was alone before the search
            return replace(troubles, suspects=action.rows, accused=row, message=message)
        dead = (*troubles.dead_rows, row)
        return replace(troubles, dead_rows=dead, suspects=None, accused=None, deaths=1, message=message)
    deaths = troubles.deaths + 1
    all_rows = range(shard.start_row, shard.start_row + shard.num_rows)
    return replace(
        troubles, deaths=deaths, suspects=all_rows if deaths >= _DEATHS_BEFORE_SEARCH else None, message=message
    )


def after_loss(shard: Shard, troubles: Troubles, action: Action, message: str) -> Troubles:
    """The worker went for reasons of its own while it worked on `action`."""
    if troubles.losses >= _LOSSES_FORGIVEN:
        return after_death(shard, replace(troubles, losses=0), action, message)
    return replace(troubles, losses=troubles.losses + 1, message=message)


def after_survival(troubles: Troubles, probe: Probe) -> Troubles:
    """A probe came back: the suspects are the other rows, or there is no single row to blame."""
    assert troubles.suspects is not None, troubles
    rest = range(probe.rows.stop, troubles.suspects.stop)
    if rest:
        return replace(troubles, suspects=rest)
    return replace(troubles, suspects=None, accused=None, deaths=1, fruitless=troubles.fruitless + 1)


def first_half(rows: range) -> range:
    """`range(0, 5)` gives `range(0, 3)`; a single row gives itself."""
    return range(rows.start, rows.start + (len(rows) + 1) // 2)
