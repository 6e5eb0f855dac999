"""Whether a disturbed job's data is that of the undisturbed one, and whether its output is whole and nothing more."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.schema import STATS_COLUMNS

Rows = Sequence[Mapping[str, Any]]

CHANGING = frozenset({*STATS_COLUMNS, "mean_acceptance_length", "draft_acceptance_rate", "latency_s"})
"""Columns that tell how a row was decoded; all others tell what, and must not change."""
_SHOWN = 5


@dataclass(slots=True)
class Comparison:
    """`lost` and `duplicated` count output rows; `problems` are sentences, none when all is as it must be."""

    lost: int = 0
    duplicated: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.duplicated or self.problems)


def compare(expected: Rows, found: Rows, poisoned: Mapping[str, str]) -> Comparison:
    """Compare rows by (id, sample_index). `poisoned`: ids that must be error rows of this type in `found`."""
    comparison = Comparison()
    counts = Counter(map(_key, found))
    wanted = {_key(row): row for row in expected}
    lost = sorted(wanted.keys() - counts.keys())
    comparison.lost = len(lost)
    comparison.duplicated = sum(count - 1 for count in counts.values())
    _say(comparison, "lost", lost)
    _say(comparison, "twice", sorted(key for key, count in counts.items() if count > 1))
    _say(comparison, "never asked for", sorted(counts.keys() - wanted.keys()))
    different = [
        f"{_key(row)}: {difference}"
        for row in found
        if _key(row) in wanted and (difference := _difference(wanted[_key(row)], row, poisoned))
    ]
    _say(comparison, "different", different)
    return comparison


def _key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["id"], row["sample_index"]


def _say(comparison: Comparison, what: str, cases: Sequence[object]) -> None:
    if cases:
        shown = "; ".join(map(str, cases[:_SHOWN]))
        comparison.problems.append(f"{len(cases)} rows {what}: {shown}{'; ..' if len(cases) > _SHOWN else ''}")


def _difference(expected: Mapping[str, Any], row: Mapping[str, Any], poisoned: Mapping[str, str]) -> str | None:
    if row["id"] in poisoned:
        is_right = row["finish_reason"] == "error" and row["error_type"] == poisoned[row["id"]]
        return None if is_right else f"must be an error row of {poisoned[row['id']]}, got {row['error_type']}"
    names = [name for name in expected if name not in CHANGING and expected[name] != row.get(name)]
    names += sorted(row.keys() - expected.keys())
    return "; ".join(f"{name} {expected.get(name)!r} became {row.get(name)!r}" for name in names) or None


def read_rows(output: str) -> list[dict[str, Any]]:
    """All rows of the parts that the manifest names."""
    manifest = json.loads(storage.read_bytes(storage.join(output, "_manifest.json")))
    parts = [part["path"] for part in manifest["parts"]]
    return [row for path in parts for row in _read(storage.join(output, path))]


def _read(path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(storage.read_bytes(path))).to_pylist()
    return rows


def inconsistencies(output: str, num_shards: int) -> list[str]:
    """What is wrong with the objects of a finished output, in sentences."""
    if not storage.exists(storage.join(output, "_SUCCESS")):
        return ["there is no _SUCCESS"]
    receipts = JobStore(output).committed()
    manifest = json.loads(storage.read_bytes(storage.join(output, "_manifest.json")))
    listed = Counter(part["path"] for part in manifest["parts"])
    stored = {f"data/{name}" for name in storage.list_names(storage.join(output, "data"))}
    problems = [] if len(receipts) == num_shards else [f"{len(receipts)} of {num_shards} shards are committed"]
    problems += _unequal("the manifest names", listed, "the commits name", {r.path for r in receipts.values()})
    problems += _unequal("the manifest names", listed, "the store has", stored)
    problems += [f"the manifest names {path} {count} times" for path, count in listed.items() if count > 1]
    for receipt in receipts.values():
        if receipt.path in stored and (rows := len(_read(storage.join(output, receipt.path)))) != receipt.num_rows:
            problems.append(f"{receipt.path} has {rows} rows, its receipt says {receipt.num_rows}")
    if manifest["rows"] != (total := sum(receipt.num_rows for receipt in receipts.values())):
        problems.append(f"the manifest counts {manifest['rows']} rows, the receipts {total}")
    return problems


def _unequal(one: str, first: Iterable[str], other: str, second: Iterable[str]) -> list[str]:
    missing, extra = sorted(set(first) - set(second)), sorted(set(second) - set(first))
    return [f"{one} {missing}, not so {other}"] * bool(missing) + [f"{other} {extra}, not so {one}"] * bool(extra)
