"""What an export is asked to do, and the parsing of its options. Mistakes are ConfigErrors that name the option."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import ConfigError

FileFormat = Literal["parquet", "jsonl"]
FILE_MB = 16
"""A file is made in memory, so this bounds memory; the hub and `datasets` are content with many files."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Which samples stay. None and False: whatever they are. Ranges are inclusive."""

    finish_reasons: tuple[str, ...] = ()
    min_tokens: int | None = None
    max_tokens: int | None = None
    acceptance: tuple[float, float] | None = None
    no_loops: bool = False
    dedup: bool = False
    best: int | None = None


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """One export. `splits` are names and shares that sum to 1; `file_format` None is the natural one of the format."""

    format: str
    file_format: FileFormat | None = None
    splits: tuple[tuple[str, float], ...] = (("train", 1.0),)
    filters: Filters = field(default_factory=Filters)
    license: str | None = None
    sequence_length: int | None = None
    trailing_tokens: int = 0
    file_mb: int = FILE_MB
    allow_unfinished: bool = False


def parse_splits(text: str) -> tuple[tuple[str, float], ...]:
    """Worked example: `train=0.98,test=0.02` gives `(("train", 0.98), ("test", 0.02))`."""
    splits = []
    for item in text.split(","):
        name, _, share = item.strip().partition("=")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if re.fullmatch(r"\w+", name) is None or not 0 < value <= 1:
            raise ConfigError(f"--split must be NAME=SHARE,.. with shares above 0, got {text!r}")
        splits.append((name, value))
    if len({name for name, _ in splits}) < len(splits):
        raise ConfigError(f"--split must name each split once, got {text!r}")
    if not math.isclose(sum(share for _, share in splits), 1.0, abs_tol=1e-9):
        raise ConfigError(f"--split must have shares that sum to 1, got {text!r}")
    return tuple(splits)


def parse_range(text: str) -> tuple[float, float]:
    """Worked example: `1.2:4` gives `(1.2, 4.0)`, `:4` gives `(-inf, 4.0)`."""
    low, colon, high = text.partition(":")
    try:
        bounds = float(low or "-inf"), float(high or "inf")
    except ValueError:
        bounds = math.nan, math.nan
    if not colon or not bounds[0] <= bounds[1]:
        raise ConfigError(f"--acceptance must be LOW:HIGH with LOW at most HIGH, got {text!r}")
    return bounds


def described(options: ExportOptions, ends: bool) -> Sequence[tuple[str, str]]:
    """(name of the drop, how the card words the rule), in the order in which rules are applied.

    `ends`: the format takes only answers that came to an end.
    """
    filters, sequence_length = options.filters, options.sequence_length
    low, high = filters.acceptance or (0.0, 0.0)
    rules = [
        ("failed", "rows that failed (`finish_reason` is `error`) are left out"),
        ("cut_off", "answers that were cut off at `sampling.max_tokens` are left out" * ends),
        ("finish_reason", f"`finish_reason` is {' or '.join(filters.finish_reasons)}" * bool(filters.finish_reasons)),
        ("min_tokens", "" if filters.min_tokens is None else f"at least {filters.min_tokens} new tokens"),
        ("max_tokens", "" if filters.max_tokens is None else f"at most {filters.max_tokens} new tokens"),
        ("acceptance", "" if filters.acceptance is None else f"`mean_acceptance_length` from {low:g} to {high:g}"),
        ("loops", "does not end in a loop (the same piece over and over)" * filters.no_loops),
        ("sequence_length", "" if sequence_length is None else f"prompt and output fit into {sequence_length} tokens"),
        ("dedup", "the first of samples with the same prompt and the same text" * filters.dedup),
        ("best", "" if filters.best is None else f"the best {filters.best} of a prompt by mean log-probability"),
    ]
    return [(name, rule) for name, rule in rules if rule]
