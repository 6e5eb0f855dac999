"""`make scale`: plans ten million rows, then runs a thousand shards through 32 simulated engines.

The last line is one JSON object; the lines before it hold all figures of each part.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from infra.scale import actors, planning

FILES, ROWS_PER_FILE = 10_000, 1000
SHARDS, WORKERS, SPEED = 1000, 32, 5.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan = planning.run(Path(folder), FILES, ROWS_PER_FILE)
    print(json.dumps(plan), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        job = actors.run(Path(folder), SHARDS, WORKERS, SPEED)
    print(json.dumps(job), flush=True)
    print(
        json.dumps(
            {key: plan[key] for key in ("plan_files", "plan_rows", "plan_s", "driver_rss_growth_mb")}
            | {key: job[key] for key in ("overhead_ms_per_shard", "efficiency")}
        )
    )


if __name__ == "__main__":
    main()
