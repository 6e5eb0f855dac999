"""Check the invariants of the metrics columns in every row of outputs: check_metrics.py OUTPUT .."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq


def check(output: Path) -> int:
    manifest = json.loads((output / "_manifest.json").read_text())
    rows = [row for part in manifest["parts"] for row in pq.read_table(output / part["path"]).to_pylist()]
    keys = [(row["id"], row["sample_index"]) for row in rows]
    assert len(set(keys)) == len(keys), "a sample is there twice"
    for row in rows:
        steps, accepted = row["num_steps"], row["num_accepted_draft_tokens"]
        histogram = row["acceptance_histogram"]
        assert sum(histogram) == sum(row["window_histogram"]) == steps, row["id"]
        assert sum(j * count for j, count in enumerate(histogram)) == accepted <= row["num_draft_tokens"], row["id"]
        assert sum(j * count for j, count in enumerate(row["window_histogram"])) == row["num_draft_tokens"], row["id"]
        assert sum(entry["accepted"] for entry in row["accepted_by_drafter"]) == accepted, row["id"]
        assert row["completion_tokens"] == steps + accepted == len(row["completion_token_ids"]), row["id"]
        assert abs(row["mean_acceptance_length"] - (1 + accepted / max(steps, 1))) < 1e-9, row["id"]
    return len(rows)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: metrics of {check(Path(name))} rows hold")
