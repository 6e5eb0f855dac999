"""A watch over what a job writes while it runs: outputs that loop or are cut off, shards that are unlike the others.

It costs nothing in the engine: receipts carry counts, and the driver compares them. A warning stops nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from pipeline.records import PartReceipt

LONGEST_PERIOD, REPEATS, SHORTEST_LOOP = 160, 4, 120
"""Characters of the longest repeated piece; how often it must stand there; characters that a loop has at least."""

ENOUGH_ROWS = 64
LOOPING_SHARE, CUT_OFF_SHARE = 0.05, 0.5
ENOUGH_SHARDS, REMEMBERED_SHARDS = 8, 256
APART, SPREADS = 0.2, 6.0
"""A shard is unlike the others when it is 20 % and six robust standard deviations from their median."""

_SD_OF_MAD = 1.4826


def ends_in_loop(text: str) -> bool:
    """Whether a text ends in one piece over and over: four times, and over 120 characters, at least.

    Worked example: `"well, " + "no, " * 40` does; `"=" * 100` does not (too short), nor does a verse sung three times.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        length = max(REPEATS * period, SHORTEST_LOOP)
        if length > len(text):
            return False
        tail = text[-length:]
        if tail[period:] == tail[:-period]:
            return True
    return False


class QualityWatch:
    """Takes in receipts as they are committed, in any order, and says in sentences what looks wrong."""

    def __init__(self, *, expects_ends: bool = True) -> None:
        """`expects_ends`: a sample should end by itself (not so with `sampling.ignore_eos`)."""
        self._expects_ends = expects_ends
        self._rows = self._looping = self._cut_off = 0
        self._told: dict[str, float] = {}
        self._acceptance: deque[float] = deque(maxlen=REMEMBERED_SHARDS)
        self._lengths: deque[float] = deque(maxlen=REMEMBERED_SHARDS)

    def observe(self, receipt: PartReceipt) -> list[str]:
        """The warnings that this receipt gives rise to; a share is told once, and again when it has doubled."""
        delivered = receipt.num_rows - receipt.num_failed
        self._rows += delivered
        self._looping += receipt.num_looping
        self._cut_off += receipt.num_cut_off * self._expects_ends
        shares = (
            self._share("end in a loop (the same piece over and over)", self._looping, LOOPING_SHARE),
            self._share("were cut off at sampling.max_tokens", self._cut_off, CUT_OFF_SHARE),
        )
        told = [sentence for sentence in shares if sentence]
        if delivered:
            mean_length = receipt.completion_tokens / delivered
            told += _unlike(self._lengths, mean_length, f"{_named(receipt)}: {{:.0f}} tokens a sample, others {{:.0f}}")
        if receipt.stats.num_draft_tokens:
            acceptance = receipt.stats.mean_acceptance_length
            told += _unlike(self._acceptance, acceptance, f"{_named(receipt)}: {{:.2f}} tokens a step, others {{:.2f}}")
        return told

    def _share(self, what: str, count: int, threshold: float) -> str | None:
        if self._rows < ENOUGH_ROWS or count <= max(threshold, 2 * self._told.get(what, 0.0)) * self._rows:
            return None
        self._told[what] = count / self._rows
        return f"{count:,} of {self._rows:,} outputs {what}"


def _unlike(others: deque[float], value: float, sentence: str) -> list[str]:
    """The sentence, with the value and the median of the others, if they are far apart; the value joins the others."""
    told = []
    if len(others) >= ENOUGH_SHARDS:
        middle = median(others)
        spread = _SD_OF_MAD * median(abs(other - middle) for other in others)
        if abs(value - middle) > max(APART * middle, SPREADS * spread):
            told = [sentence.format(value, middle)]
    others.append(value)
    return told


def _named(receipt: PartReceipt) -> str:
    return f"shard {receipt.shard_index} is unlike the others"
