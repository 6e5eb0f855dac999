"""Memory of `sevenleague export`: a finished output of many rows is written, then exported by a process of its own.

    python infra/trials/export_memory.py FOLDER [--rows 100000] [--tokens 128] [--topk 8] [--formats messages,..]

Rows are synthetic but go through the code that writes parts and commits. They hold prompt ids, token ids, log-
probabilities and the top K of each token, all of them random, as nothing compresses worse. Prints one line for each
format: the most memory that the exporting process had resident (VmHWM), its seconds, and what it wrote, which is
deleted then. Ends with 1 where a process had more than --limit-mb.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.export_commands import FORMATS
from pipeline.commits import JobStore
from pipeline.config_io import parse_job
from pipeline.parts import write_part
from pipeline.preparation import prepare
from pipeline.records import AcceptanceStats, SampleRecord, ShardTask

WORDS = ("the", "of", "and", "to", "a", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as")
VOCABULARY = 50_000
EXPORT = """
import json, sys
from jobs.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ending:
    code = ending.code
status = open("/proc/self/status").read()
print(json.dumps({"code": code, "kb": int(status.split("VmHWM:")[1].split()[0])}))
"""


def write_output(folder: Path, rows: int, topk: int, tokens: int) -> str:
    """A finished output of so many rows; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = str(folder / "prompts.parquet")
    pq.write_table(pa.table({"prompt": [f"question {i}" for i in range(rows)]}), prompts)
    job = {
        "model": "synthetic",
        "input": prompts,
        "output": {"path": str(folder / "output"), "extras": ["prompt_ids", "token_ids", "logprobs", "topk"]},
        "sampling": {"logprobs": topk, "max_tokens": 2 * tokens},
    }
    prepared = prepare(parse_job(job))
    store = JobStore(prepared.config.output.path)
    store.create_or_resume(prepared.config, prepared.plan, "revision")
    random = np.random.default_rng(0)
    for shard in prepared.plan.shards:
        task = ShardTask(shard, 1, "trial", prepared.config.output.path, prepared.plan.passthrough)
        ids = range(shard.start_row, shard.start_row + shard.num_rows)
        records = [record(f"row-{i}", random, topk, tokens) for i in ids]
        store.commit(write_part(task, records, prepared.config, "revision", "worker-0", 1.0))
    store.finish(prepared.config, store.committed().values(), {})
    return prepared.config.output.path


def record(uid: str, random: np.random.Generator, topk: int, tokens: int) -> SampleRecord:
    """A sample of half to one and a half times so many tokens."""
    count = int(random.integers(tokens // 2, tokens + tokens // 2, endpoint=True))
    logprobs = -np.sort(random.exponential(4.0, (count, topk)).astype(np.float32), axis=1)
    return SampleRecord(
        id=uid,
        sample_index=0,
        prompt=f"question {uid}",
        messages=None,
        generation=" ".join(random.choice(WORDS, count)),
        finish_reason="stop",
        error_type=None,
        error=None,
        prompt_tokens=20,
        completion_tokens=count,
        stats=AcceptanceStats(count, 0, 0, (count,), (count,), {}),
        latency_s=1.0,
        prompt_token_ids=tuple(range(20)),
        completion_token_ids=tuple(random.integers(0, VOCABULARY, count).tolist()),
        token_logprobs=tuple(logprobs[:, 0].tolist()),
        topk_token_ids=random.integers(0, VOCABULARY, (count, topk)).tolist(),
        topk_logprobs=logprobs.tolist(),
    )


def measure(output: str, dest: Path, arguments: list[str]) -> dict[str, Any]:
    """`sevenleague export` in a process of its own: its exit code, most kilobytes resident, and seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-c", EXPORT, "export", output, str(dest), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**figures, "seconds": time.perf_counter() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--limit-mb", type=int, default=300)
    arguments = parser.parse_args()
    output = write_output(arguments.folder, arguments.rows, arguments.topk, arguments.tokens)
    most = 0.0
    for name in arguments.formats.split(","):
        dest = arguments.folder / name
        figures = measure(output, dest, ["--format", name, "--dedup", "--no-loops", "--split", "train=0.9,test=0.1"])
        megabytes = figures["kb"] * 1024 / 1e6
        written = sum(file.stat().st_size for file in dest.rglob("*") if file.is_file())
        print(
            f"{name}: {megabytes:.0f} MB resident, {figures['seconds']:.1f} s, {written:,} bytes written",
            flush=True,
        )
        shutil.rmtree(dest)
        most = max(most, megabytes)
    return int(most > arguments.limit_mb)


if __name__ == "__main__":
    sys.exit(main())
