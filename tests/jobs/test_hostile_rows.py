"""Rows that kill their worker or make the model raise become error rows, and all others are delivered.

The model is one for tests alone: a folder with code of its own, which the job has to trust.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.ray

KILLS = "<|start|><|end|>" * 3
RAISES = "<|start|>" * 5
CODE = """
import os
import signal

from transformers import LlamaForCausalLM


class HostileLlama(LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        read = str(input_ids.flatten().tolist())
        if "1, 0, 1, 0, 1, 0" in read:
            os.kill(os.getpid(), signal.SIGKILL)
        if "1, 1, 1, 1, 1" in read:
            raise RuntimeError("the model tastes poison")
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
"""


@pytest.fixture
def hostile_model(tmp_path: Path, tiny_model_dir: Callable[[str], Path]) -> Path:
    folder = tmp_path / "hostile"
    shutil.copytree(tiny_model_dir("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_hostile.HostileLlama"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_hostile.py").write_text(CODE)
    return folder


def test_hostile_rows_fail_alone(
    tmp_path: Path,
    hostile_model: Path,
    make_job: Callable[..., Any],
    run_cli: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    prompts = ["One step", KILLS, RAISES, "The dog"]
    job = make_job(
        prompts,
        model={"id": str(hostile_model), "trust_remote_code": True},
        output={"rows_per_shard": 1},
        engine={"compile": "off"},
        decoding={"strategy": "autoregressive"},
    )
    result = run_cli("run", job.file, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert result.returncode == 3, result.stderr
    assert not [line for line in result.stderr.splitlines() if line.startswith("Traceback")]
    manifest = json.loads((job.output / "_manifest.json").read_text())
    rows = [row for part in manifest["parts"] for row in pq.read_table(job.output / part["path"]).to_pylist()]
    errors = {row["prompt"]: row["error_type"] for row in rows}
    assert len(rows) == len(prompts)
    assert errors == {**dict.fromkeys(prompts), KILLS: "worker_crash", RAISES: "engine_error"}
    assert {row["error"] for row in rows} == {
        None,
        "decoding this row ended the worker's process",
        "RuntimeError: the model tastes poison",
    }
    assert all(row["generation"] for row in rows if row["error_type"] is None)
