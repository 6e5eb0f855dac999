"""Planning a large input: time, and the memory of the driver's process.

    python -m infra.scale.planning [--files 10000] [--rows 1000]

Writes small Parquet files with real footers and makes the plan of a job from them in a process of its own, as
`sevenleague run` does before it starts Ray; then of the first ten files, in another process. Prints one JSON line; the
growth is that of the most memory that the process had at any time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

FEW_FILES = 10
SCHEMA = pa.schema([("prompt", pa.string())])


def write_files(folder: Path, files: int, rows: int) -> None:
    """Files of `rows` equal prompts each, stored once through Parquet's dictionary; no two files are equal."""
    for number in range(files):
        prompts = pa.array([f"the prompt of file {number}"]).take(pa.array([0] * rows))
        pq.write_table(pa.table([prompts], schema=SCHEMA), folder / f"{number:06d}.parquet")


def planned(pattern: str) -> dict[str, Any]:
    """Plans in a new process (see `_plan_here`)."""
    command = [sys.executable, "-m", "infra.scale.planning", "--plan-here", pattern]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _plan_here(pattern: str) -> dict[str, Any]:
    """What the driver does before its loop begins, with all that it imports: the plan made, written and kept."""
    from pipeline import driver  # noqa: F401
    from pipeline.commits import JobStore
    from pipeline.config import JobConfig, ModelConfig
    from pipeline.data_config import InputConfig, OutputConfig
    from pipeline.preparation import prepare

    with tempfile.TemporaryDirectory() as output:
        job = JobConfig(
            model=ModelConfig(id="simulated"), input=InputConfig(path=(pattern,)), output=OutputConfig(path=output)
        )
        began = time.perf_counter()
        prepared = prepare(job)
        plan_s = time.perf_counter() - began
        JobStore(output).create_or_resume(prepared.config, prepared.plan, "simulated")
        stored = (Path(output) / "_plan.parquet").stat().st_size
    plan = prepared.plan
    return {
        "plan_files": len(plan.files),
        "plan_rows": plan.num_rows,
        "plan_shards": len(plan.shards),
        "plan_s": round(plan_s, 2),
        "written_s": round(time.perf_counter() - began, 2),
        "plan_bytes": stored,
        "peak_mb": round(_peak_mb(), 1),
    }


def _peak_mb() -> float:
    """Most resident memory of this process so far. (`ru_maxrss` would count its parent's.)"""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def run(folder: Path, files: int, rows: int) -> dict[str, Any]:
    """The figures of planning all files, and the growth of memory against planning FEW_FILES of them."""
    write_files(folder, files, rows)
    few = planned(f"{folder}/{'0' * 5}?.parquet")
    all_files = planned(f"{folder}/*.parquet")
    assert few["plan_files"] == FEW_FILES, few
    assert (all_files["plan_files"], all_files["plan_rows"]) == (files, files * rows), all_files
    return all_files | {"driver_rss_growth_mb": round(all_files["peak_mb"] - few["peak_mb"], 1)}


@click.command()
@click.option("--files", default=10_000, show_default=True)
@click.option("--rows", default=1000, show_default=True)
@click.option("--plan-here", hidden=True)
def main(files: int, rows: int, plan_here: str | None) -> None:
    if plan_here is not None:
        print(json.dumps(_plan_here(plan_here)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Path(folder), files, rows)))


if __name__ == "__main__":
    main()
