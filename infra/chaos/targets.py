"""The job of a round, as files: prompts, the disturbed job, and the same job undisturbed."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from infra.chaos.schedule import Round
from infra.chaos.site import BUCKET, Site, make_prompts
from pipeline import storage

STEP_S = 0.02
MAX_TOKENS = 32
_MARKS = {"killing_row": "kills", "raising_row": "raises"}
_ERRORS = {"killing_row": "worker_crash", "raising_row": "engine_error"}


@dataclass(frozen=True)
class Target:
    """`poisoned` maps the ids of rows that must end as errors to the type of the error."""

    round: Round
    folder: Path
    output: str
    calm_output: str
    calm_file: Path
    poisoned: dict[str, str]
    data: dict[str, Any]

    @property
    def file(self) -> Path:
        return self.folder / "job.yaml"

    @property
    def events_file(self) -> Path:
        return self.folder / "events.jsonl"

    def write(self, address: str | None) -> None:
        """The job file, for a cluster at this address."""
        cluster = {**self.data["cluster"], **({"address": address} if address else {})}
        self.file.write_text(yaml.safe_dump({**self.data, "cluster": cluster}))

    @property
    def is_calm_done(self) -> bool:
        """Whether the undisturbed job was run before, by a run of the same seed in this folder."""
        return storage.exists(storage.join(self.calm_output, "_SUCCESS"))

    def write_hook(self, file: Path) -> None:
        named = {mark: f"-{mark}" if kind in self.round.poisons else "" for kind, mark in _MARKS.items()}
        file.write_text(json.dumps({**named, "step_s": STEP_S, "events": str(self.events_file)}))


def make_target(site: Site, round: Round) -> Target:
    folder = site.folder / round.name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "output", ignore_errors=True)
    rng = random.Random(round.seed)
    ids = [f"row-{i:04d}" for i in range(round.num_rows)]
    for kind, place in zip(round.poisons, rng.sample(range(len(ids) // 2), len(round.poisons)), strict=True):
        ids[place] += f"-{_MARKS[kind]}"
    local = folder / "prompts.parquet"
    pq.write_table(make_prompts(rng, ids), local, row_group_size=8)
    calm_output, calm_file = str(folder / "undisturbed"), folder / "undisturbed.yaml"
    prompts, output = str(local), str(folder / "output")
    if round.store == "s3":
        prompts, output = f"s3://{BUCKET}/{round.name}/prompts.parquet", f"s3://{BUCKET}/{round.name}/output"
        storage.write_bytes(prompts, local.read_bytes())
    data = _job(round, str(site.model), prompts, output)
    calm = {**data, "input": {**data["input"], "path": str(local)}, "cluster": {"workers": 1}}
    calm_file.write_text(yaml.safe_dump({**calm, "output": {**data["output"], "path": calm_output}}))
    poisoned = {uid: _ERRORS[kind] for kind in round.poisons for uid in ids if uid.endswith(_MARKS[kind])}
    return Target(round, folder, output, calm_output, calm_file, poisoned, data)


def _job(round: Round, model: str, prompts: str, output: str) -> dict[str, Any]:
    return {
        "model": {"id": model, "dtype": "float32", "device": "cpu"},
        "input": {"path": prompts, "id_column": "id"},
        "output": {"path": output, "rows_per_shard": round.rows_per_shard},
        "sampling": {
            "n": round.n,
            "temperature": round.temperature,
            "max_tokens": MAX_TOKENS,
            "seed": round.seed,
        },
        "decoding": {"strategy": round.strategy},
        "engine": {"max_sequences": round.rows_per_shard * round.n, "compile": "off"},
        "cluster": {"workers": round.workers, "hang_timeout_s": 8.0, "grace_s": 10.0},
    }
