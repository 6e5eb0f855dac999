"""An engine that only waits: continuous batching by a fitted step time, the results being made up.

Sequences run until their length is reached, at most `slots` at once, and the next waiting one takes a free slot.
Between two ends the batch does not change, so the engine sleeps from end to end and not step by step. Its clock runs on
while Python is late (as a GPU does not slow down because the CPU is busy), but never ahead of the arrival of its work.
"""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_left
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

STEP_SECONDS = ((1, 0.00904), (8, 0.01256), (16, 0.01964))
"""Plain decoding of SmolLM2-135M on two cores, from the table of docs/performance.md: (rows, seconds of a step)."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by its rows, straight lines between what was measured, the last slope beyond it.

    `scale` makes all of it faster. Worked example, points 1: 10 ms and 3: 20 ms, scale 0.5: 2 rows take 7.5 ms.
    """

    points: tuple[tuple[int, float], ...] = STEP_SECONDS
    scale: float = 1.0

    def seconds(self, rows: int) -> float:
        right = min(max(bisect_left(self.points, (rows, 0.0)), 1), len(self.points) - 1)
        (rows_a, seconds_a), (rows_b, seconds_b) = self.points[right - 1], self.points[right]
        return (seconds_a + (rows - rows_a) * (seconds_b - seconds_a) / (rows_b - rows_a)) * self.scale

    def prefill(self, tokens: int) -> float:
        """What the rows of a prompt add to the step that they run in."""
        most = self.points[-1][0]
        return tokens * (self.seconds(most + 1) - self.seconds(most))


@dataclass(slots=True)
class _Sequence:
    prompt_tokens: int
    left: int
    done: Future[None] = field(default_factory=Future)


class SimulatedEngine:
    """Serves sequences in a thread of its own, until the process ends."""

    def __init__(self, step_time: StepTime, slots: int) -> None:
        self._step_time = step_time
        self._slots = slots
        self._inbox: queue.SimpleQueue[_Sequence] = queue.SimpleQueue()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._now = 0.0
        self.busy_s = 0.0
        self.tokens = 0
        self.work_s = 0.0
        """Time that all that was done takes in full batches: what the engine could at best have needed."""
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._inbox.qsize()

    def submit(self, prompt_tokens: int, completion_tokens: int) -> Future[None]:
        sequence = _Sequence(prompt_tokens, completion_tokens)
        self._inbox.put(sequence)
        return sequence.done  # cancelling it drops the sequence

    def _run(self) -> None:
        while True:
            if not self._running and not self._waiting:
                self._waiting.append(self._inbox.get())
                self._now = time.monotonic()
            self._take_in()
            prefill = self._admit()
            if self._running:
                self._advance(prefill)

    def _take_in(self) -> None:
        """What has arrived; what was cancelled goes."""
        while not self._inbox.empty():
            self._waiting.append(self._inbox.get())
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.done.cancelled())
        self._running = [sequence for sequence in self._running if not sequence.done.cancelled()]

    def _admit(self) -> float:
        """Fills the slots; the seconds of the prompts."""
        prefill = 0.0
        while self._waiting and len(self._running) < self._slots:
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            prefill += self._step_time.prefill(sequence.prompt_tokens)
        return prefill

    def _advance(self, prefill: float) -> None:
        """Until the next sequence ends, or one arrives while a slot is free (then to the end of the step)."""
        began, rows = self._now, len(self._running)
        step = self._step_time.seconds(rows)
        steps = min(sequence.left for sequence in self._running)
        arrived = self._sleep_until(began + prefill + steps * step)
        if arrived is not None:
            steps = min(steps, max(1, int((arrived - began - prefill) / step) + 1))
        self._now = began + prefill + steps * step
        self.busy_s += self._now - began
        self.work_s += prefill + steps * rows * self._step_time.seconds(self._slots) / self._slots
        self.tokens += steps * rows
        for sequence in self._running:
            sequence.left -= steps
        ended = [sequence for sequence in self._running if not sequence.left]
        self._running = [sequence for sequence in self._running if sequence.left]
        for sequence in ended:
            if sequence.done.set_running_or_notify_cancel():
                sequence.done.set_result(None)

    def _sleep_until(self, due: float) -> float | None:
        """When a sequence arrived that could start before `due`, None when none did."""
        while (left := due - time.monotonic()) > 0:
            if len(self._running) == self._slots:
                time.sleep(left)
                return None
            try:
                self._waiting.append(self._inbox.get(timeout=left))
            except queue.Empty:
                return None
            return time.monotonic()
        return None
