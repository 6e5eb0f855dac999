"""Attempts at the shards of a job: which comes next, which are out, and what follows when one comes back undone.

Knows nothing of Ray. What a failure means for the next attempt is in `retries`, what is next in `dispatch`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from pipeline import retries
from pipeline.dispatch import Pace, ShardQueue
from pipeline.errors import PermanentError
from pipeline.fleet import Flight
from pipeline.logs import tracing
from pipeline.preparation import Prepared
from pipeline.records import ShardTask
from pipeline.retries import Generate, Probe, Troubles

logger = logging.getLogger(__name__)


class Attempts:
    """`open_shards` counts those whose part has not come back yet, wherever they are."""

    def __init__(self, prepared: Prepared, run_id: str) -> None:
        self._prepared = prepared
        self._run_id = run_id
        self._max_attempts = prepared.config.cluster.max_attempts
        self._shards = {shard.index: shard for shard in prepared.remaining}
        self._troubles = {index: Troubles() for index in self._shards}
        self._queue = ShardQueue(self._shards.values())
        self._out: dict[int, list[Flight]] = defaultdict(list)
        self._pace = Pace()
        self.redone = 0
        """Attempts that came back undone: work that is done again."""

    @property
    def open_shards(self) -> int:
        return len(self._shards)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def are_out(self) -> bool:
        """Whether any attempt is out that still matters."""
        return any(index in self._shards for index in self._out)

    def is_open(self, flight: Flight) -> bool:
        """Whether its shard still waits for a part."""
        return flight.shard_index in self._shards

    def needs_own_worker(self, flights: Iterable[Flight]) -> bool:
        """Whether one of these tasks may end its worker, so that no other should be beside it."""
        return any(self._troubles[flight.shard_index].needs_own_worker for flight in flights)

    def take(self, now: float, is_busy: bool) -> Flight | None:
        """The next attempt, for a worker that has others in hand (`is_busy`) or none."""
        index = self._queue.take(now, is_busy)
        return None if index is None else self._begin(index, now)

    def take_straggler(self, now: float) -> Flight | None:
        """A second attempt at the shard that has been out for longest, where that is much longer than others took."""
        if self._queue:
            return None
        for flight in sorted((flights[0] for flights in self._out.values()), key=lambda flight: flight.began):
            index, away_s = flight.shard_index, now - flight.began
            is_alone = index in self._shards and len(self._out[index]) == 1 and self._troubles[index].is_clean
            if is_alone and self._pace.is_straggling(flight.task.shard.num_rows, away_s):
                logger.info("shard %d has been out for %.0f s and is given to a second worker too", index, away_s)
                return self._begin(index, now)
        return None

    def came_back(self, flight: Flight) -> None:
        """It is with a worker no more, however it ended; one of the methods below says how."""
        flights = self._out[flight.shard_index]
        flights.remove(flight)
        if not flights:
            del self._out[flight.shard_index]

    def delivered(self, flight: Flight, now: float) -> list[Flight]:
        """The part of the shard is there. The attempts at it that are still out."""
        self._shards.pop(flight.shard_index, None)
        self._pace.learn(flight.task.shard.num_rows, now - flight.began)
        return list(self._out.get(flight.shard_index, ()))

    def faulted(self, flight: Flight, message: str, now: float) -> None:
        self._redo(flight, retries.after_fault(self._troubles[flight.shard_index], message), now, "fault")

    def died(self, flight: Flight, message: str, now: float) -> None:
        troubles = self._troubles[flight.shard_index]
        self._redo(flight, retries.after_death(flight.task.shard, troubles, flight.action, message), now, "death")

    def lost(self, flight: Flight, message: str, now: float) -> None:
        """The worker went for reasons of its own, or gave the task back."""
        troubles = self._troubles[flight.shard_index]
        self._redo(flight, retries.after_loss(flight.task.shard, troubles, flight.action, message), now, "loss")

    def survived(self, flight: Flight, probe: Probe, now: float) -> None:
        troubles = retries.after_survival(self._troubles[flight.shard_index], probe)
        self._put_back(flight.shard_index, troubles, now)

    def _begin(self, index: int, now: float) -> Flight:
        troubles = replace(self._troubles[index], attempts=self._troubles[index].attempts + 1)
        self._troubles[index] = troubles
        shard = self._shards[index]
        task = ShardTask(
            shard=shard,
            attempt=troubles.attempts,
            run_id=self._run_id,
            output=self._prepared.config.output.path,
            passthrough=self._prepared.plan.passthrough,
            dead_rows=troubles.dead_rows,
            redo=self._prepared.redo.get(index),
        )
        flight = Flight(task, retries.next_action(shard, troubles, self._max_attempts), now)
        self._out[index].append(flight)
        return flight

    def _redo(self, flight: Flight, troubles: Troubles, now: float, kind: str) -> None:
        index = flight.shard_index
        if index not in self._shards:  # another attempt was first
            return
        self.redone += isinstance(flight.action, Generate)
        with tracing(flight.task.trace):
            logger.warning("shard %d goes back (%s): %s", index, kind, troubles.message)
        if retries.is_hopeless(troubles, self._max_attempts):
            raise PermanentError(f"shard {index} cannot be written, not even as errors: {troubles.message}")
        self._put_back(index, troubles, now)

    def _put_back(self, index: int, troubles: Troubles, now: float) -> None:
        self._troubles[index] = troubles
        if index not in self._out:
            self._queue.put_back(index, now + retries.pause_s(troubles), troubles.needs_own_worker)
