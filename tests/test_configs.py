"""The job files in configs/ load and do what their names say; the README explains every key of a job file."""

from __future__ import annotations

import importlib.util
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infra.docs.reference import default_of
from pipeline.cluster_config import ClusterConfig
from pipeline.config import JobConfig, ModelConfig
from pipeline.config_io import dump_job, load_job, parse_job
from pipeline.data_config import InputConfig
from pipeline.schema import OUTPUT_COLUMNS
from pipeline.shards import plan
from pipeline.train_config import TrainConfig, arms_of, load_train

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
NAMES = ("quickstart", "lookahead", "distillation", "throughput", "cluster")


def job(name: str) -> JobConfig:
    return load_job(str(CONFIGS / f"{name}.yaml"))


def test_no_job_file_is_forgotten() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_loads_and_survives_a_round_trip(name: str) -> None:
    config = job(name)
    assert config.output.path.endswith(("out/" + name, "generations/first"))
    assert parse_job(yaml.safe_load(dump_job(config))) == config


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cluster"])
def test_plans_the_committed_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert plan(job(name)).num_rows == 32


@pytest.mark.parametrize("path", sorted((CONFIGS / "ptp").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_load(path: Path) -> None:
    """A file that trains has `base`, a file that generates has `model`."""
    if "base" in yaml.safe_load(path.read_text()):
        arms = arms_of(load_train(str(path)))
        assert len({arm.name for arm in arms}) == len(arms) >= 1
    else:
        assert load_job(str(path)).sampling.coupling == "inverse_cdf"


def test_quickstart_keeps_two_workers_busy_on_the_builtin_model() -> None:
    config = job("quickstart")
    assert config.model.id == "builtin:smollm2-135m"
    assert config.cluster.workers == 2
    assert 32 / config.output.rows_per_shard >= 2 * config.cluster.workers


def test_lookahead_has_the_parameters_of_the_paper() -> None:
    decoding = job("lookahead").decoding
    assert decoding.strategy == "lookahead"
    assert (decoding.width, decoding.ngram, decoding.candidates) == (5, 4, 5)


def test_distillation_stores_all_that_a_student_needs() -> None:
    config = job("distillation")
    assert set(config.output.extras) == {"prompt_ids", "token_ids", "logprobs", "topk", "cdf"}
    assert config.sampling.n > 1
    assert config.sampling.temperature == 1.0


def test_cluster_joins_a_running_ray_with_a_gpu_for_each_worker() -> None:
    cluster = job("cluster").cluster
    assert cluster.address == "auto"
    assert cluster.gpus_per_worker == 1


def test_committed_prompts_are_those_of_the_script() -> None:
    script = load_script(CONFIGS / "data" / "make_quickstart.py")
    committed = pq.read_table(CONFIGS / "data" / "quickstart.parquet")
    assert committed.equals(script.table())
    assert len(set(committed["id"].to_pylist())) == 32


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fields(annotation: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted keys of a job file with what they declare: `model.id`, .., `decoding.width`, .."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            inner = list(fields(field.annotation, f"{prefix}{name}."))
            yield from inner or [(prefix + name, field)]
    else:
        for part in typing.get_args(annotation):
            yield from fields(part, prefix)


def test_readme_explains_every_key_with_its_default() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+\.[\w.]+)` \| (\S+) \| \S", readme, re.MULTILINE)
    explained = dict(rows)
    assert len(rows) == len(explained)
    declared = {key: default_of(field) for key, field in reversed(list(fields(JobConfig)))}
    declared["decoding.strategy"] = "`auto`"  # each strategy declares its own
    assert declared["decoding.max_window"] == "`16`"  # the one of most strategies
    assert explained == declared


def test_readme_names_every_output_column() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [column for column in sorted(OUTPUT_COLUMNS) if f"| `{column}` |" not in readme] == []


def test_training_page_explains_every_key_with_its_default() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    explained = dict(re.findall(r"^\| `([\w.]+)` \| (\S*) ?\| \S", page, re.MULTILINE))
    assert explained == dict(training_keys(TrainConfig, ""))


def training_keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted keys with their defaults, down to the sections that job files have too."""
    for name, field in section.model_fields.items():
        key = prefix + name
        parts = [part for part in (field.annotation, *typing.get_args(field.annotation)) if is_section(part)]
        if key == "base.pretrain.training":
            yield key, ""
        elif not parts or parts[0] in (ModelConfig, InputConfig, ClusterConfig):
            yield key, "" if isinstance(field.default, BaseModel) else default_of(field)
        else:
            if field.description:
                yield key, default_of(field)
            yield from training_keys(parts[0], key + ".")


def is_section(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)
