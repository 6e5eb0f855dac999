"""How long a forward takes: measured once at the start, corrected by every step that follows.

    seconds = table(rows) - per_unsampled * (rows without logits) + per_column * (columns attended to, over all rows)

The table holds forwards whose rows are all sampled and see next to nothing. It never falls with more rows. Between two
entries it is a line, or, where forwards are captured for certain row counts, the entry above: rows up to it are free.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from workers.blocks import Block
from workers.kv_cache import Slot
from workers.model_runner import ModelRunner

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Row counts that are measured, as far as a job can come to them."""
CALIBRATION_S = 3.0
"""Seconds after which no further row count is begun."""
_COLUMNS = 448  # that a row sees when the price of columns is measured
_REPEATS = 3  # of which, on a GPU, the first runs as it is and the second is captured
_RATE = 0.05  # of the online correction
_MOST = math.log(2.0)  # a single step counts for no more than a factor of 2: it may have met a pause


@dataclass(frozen=True, slots=True)
class Calibration:
    """Forward times in seconds: `seconds[i]` with `rows[i]` rows, and what a column and an unsampled row change."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_column: float
    per_unsampled: float


class CostModel:
    """Predicts the forward of a step. Worked example, entries 1: 10 ms, 8: 12 ms, 16: 20 ms: 12 rows take 16 ms."""

    def __init__(self, calibration: Calibration, *, stepwise: bool = False) -> None:
        self._rows = calibration.rows
        self._measured = [math.log(seconds) for seconds in accumulate(calibration.seconds, max)]
        self._per_column = calibration.per_column
        self._per_unsampled = calibration.per_unsampled
        self._stepwise = stepwise
        self._log_scale = 0.0
        self._table = [math.exp(entry) for entry in self._measured]

    def seconds(self, rows: int, sampled: int, columns: float) -> float:
        """The first point of `curve`."""
        return self.curve(rows, (0,), sampled, columns, 0.0)[0]

    def curve(
        self, rows: int, added: Iterable[int], sampled: int, columns: float, columns_per_row: float
    ) -> list[float]:
        """Seconds with so many further sampled rows, each of which sees `columns_per_row` columns.

        No arrays: a step asks for a dozen points, and small arrays cost more than the loop.
        """
        least, saved, scale = self._table[0] * 0.5, self._per_unsampled * (rows - sampled), math.exp(self._log_scale)
        return [
            (max(self._at(rows + more) - saved, least) + self._per_column * (columns + columns_per_row * more)) * scale
            for more in added
        ]

    def bends(self, rows: int, most: int) -> list[int]:
        """Numbers of further rows, below `most`, at which the price of the next one changes."""
        return [entry - rows for entry in self._rows if rows < entry < rows + most]

    def observe(self, rows: int, sampled: int, columns: float, seconds: float) -> None:
        """Correct the scale of everything and the entries next to `rows` by a forward that was timed."""
        error = math.log(seconds / self.seconds(rows, sampled, columns))
        error = min(max(error, -_MOST), _MOST)
        self._log_scale += _RATE * error
        right = bisect_left(self._rows, rows)
        for entry in {max(0, right - 1), min(right, len(self._rows) - 1)}:
            near = max(0.0, 1.0 - abs(rows - self._rows[entry]) / max(rows, self._rows[entry]))
            self._measured[entry] += _RATE * near * error
        self._table = [math.exp(entry) for entry in accumulate(self._measured, max)]

    def _at(self, rows: int) -> float:
        """The table at `rows`; beyond the last entry its last slope goes on."""
        known, table = self._rows, self._table
        right = bisect_left(known, rows)
        if right == 0:
            return table[0]
        if right == len(known):
            if len(known) == 1:
                return table[0]
            slope = (table[-1] - table[-2]) / (known[-1] - known[-2])
            return table[-1] + slope * (rows - known[-1])
        if self._stepwise:
            return table[right]
        part = (rows - known[right - 1]) / (known[right] - known[right - 1])
        return table[right - 1] + part * (table[right] - table[right - 1])


_calibrations: WeakKeyDictionary[PreTrainedModel, dict[tuple[object, ...], Calibration]] = WeakKeyDictionary()


def calibrate(runner: ModelRunner, max_rows: int) -> Calibration:
    """Time forwards of up to `max_rows` rows; once for engines that share a model and its settings."""
    known = _calibrations.setdefault(runner.model, {})
    key = (runner.native is not None, runner.bucket_edges, torch.get_num_threads(), max_rows)
    if key not in known:
        known[key] = _measure(runner, max_rows)
    return known[key]


def _measure(runner: ModelRunner, max_rows: int) -> Calibration:
    deadline = time.perf_counter() + CALIBRATION_S
    wanted = [rows for rows in ROWS if rows <= max_rows] or [1]
    most = wanted[-1]
    slot = runner.new_cache(1 << 62, max_slots=1).allocate(most + _COLUMNS)
    assert slot is not None
    seconds: dict[int, float] = {}
    for rows in _coarse_to_fine(wanted):
        if rows == most or time.perf_counter() < deadline:
            seconds[rows] = _time(runner, slot, rows, start=0, sampled=rows)
    few = max(rows for rows in seconds if rows <= 8)
    per_column = max(0.0, _time(runner, slot, few, start=_COLUMNS, sampled=few) - seconds[few]) / (few * _COLUMNS)
    per_unsampled = max(0.0, seconds[few] - _time(runner, slot, few, start=0, sampled=1)) / max(1, few - 1)
    rows_known = tuple(sorted(seconds))
    return Calibration(rows_known, tuple(seconds[rows] for rows in rows_known), per_column, per_unsampled)


def _coarse_to_fine(rows: Sequence[int]) -> Iterator[int]:
    """The ends first, then every fourth, then the rest: a slow model must do with few."""
    order = [0, len(rows) - 1, *range(0, len(rows), 4), *range(len(rows))]
    yield from (rows[i] for i in dict.fromkeys(order))


def _time(runner: ModelRunner, slot: Slot, rows: int, start: int, sampled: int) -> float:
    """Seconds of a forward of one block, the best of a few: what disturbs a measurement only ever adds to it."""
    tokens = tuple(i % 7 for i in range(rows))
    positions = tuple(range(start, start + rows))
    block = Block(slot, start, tokens, positions, None, tuple(range(rows - sampled, rows)))
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        runner.forward([block])[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - began)
    return min(times)
