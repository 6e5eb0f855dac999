from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config_io import dump_job, load_job, parse_job
from pipeline.decoding_config import LookaheadConfig, SuffixConfig
from pipeline.errors import ConfigError

BASE: dict[str, Any] = {"model": "m", "input": "x.parquet", "output": "out"}
STRATEGIES = "autoregressive, jacobi, lookahead, suffix, recycling, auto, prompt_lookup, draft_model, ptp"


def test_shorthands_stand_for_sections() -> None:
    job = parse_job({"model": "m", "input": ["a", "b"], "output": "o", "decoding": "suffix"})
    assert (job.model.id, job.input.path, job.output.path) == ("m", ("a", "b"), "o")
    assert isinstance(job.decoding, SuffixConfig)


def test_dump_and_parse_are_inverse() -> None:
    job = parse_job({**BASE, "decoding": {"strategy": "lookahead", "width": 7}, "sampling": {"stop": ["a"], "n": 2}})
    assert parse_job(yaml.safe_load(dump_job(job))) == job


def test_overrides_are_yaml_and_reach_into_shorthands() -> None:
    overrides = ["sampling.stop=[a, b]", "model.dtype=float32", "decoding={strategy: lookahead, ngram: 3}"]
    data = dict(BASE)
    job = parse_job(data, overrides)
    assert job.sampling.stop == ("a", "b")
    assert (job.model.id, job.model.dtype) == ("m", "float32")
    assert job.decoding == LookaheadConfig(ngram=3)
    assert data == BASE, "the caller's data must stay as it was"


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"sampling": {"top_p": 1.7}}, "sampling.top_p must be in (0, 1], got 1.7"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature must be in [0, 100], got -1"),
        ({"sampling": {"n": 0}}, "sampling.n must be at least 1, got 0"),
        ({"sampling": {"seed": -1}}, "sampling.seed must be in [0, 2^63), got -1"),
        ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty must be greater than 0, got 0"),
        ({"sampling": {"n": "x"}}, "sampling.n must be an integer, got 'x'"),
        ({"sampling": {"n": 1.5}}, "sampling.n must be an integer, got 1.5"),
        ({"sampling": {"ignore_eos": "maybe"}}, "sampling.ignore_eos must be true or false, got 'maybe'"),
        ({"sampling": {"stop": [""]}}, "sampling.stop must hold no empty string, got ''"),
        ({"sampling": 5}, "sampling must be a mapping of keys, got 5"),
        ({"sampling": {"coupling": "x"}}, "sampling.coupling must be one of gumbel, inverse_cdf, got 'x'"),
        (
            {"sampling": {"temprature": 1}},
            "sampling.temprature must be a known key (did you mean 'sampling.temperature'?)",
        ),
        ({"temperature": 1}, "temperature must be a known key (did you mean 'sampling.temperature'?)"),
        (
            {"zzqq": 1},
            "zzqq must be a known key (known keys: model, input, output, sampling, decoding, engine, cluster)",
        ),
        ({"decoding": "foo"}, f"decoding.strategy must be one of {STRATEGIES}, got 'foo'"),
        ({"decoding": {"width": 3}}, f"decoding.strategy must be one of {STRATEGIES}, got nothing"),
        (
            {"decoding": {"strategy": "lookahead", "widht": 3}},
            "decoding.widht must be a known key (did you mean 'decoding.width'?)",
        ),
        (
            {"decoding": {"strategy": "prompt_lookup", "window": 3, "max_window": 9}},
            "decoding.max_window must be left out where window (3) fixes it, got 9",
        ),
        (
            {"decoding": {"strategy": "prompt_lookup", "window": 0}},
            "decoding.window must be in [1, 256], got 0",
        ),
        ({"decoding": {"strategy": "lookahead", "width": 0}}, "decoding.width must be in [1, 64], got 0"),
        (
            {"decoding": {"strategy": "auto", "min_window": 5, "max_window": 2}},
            "decoding.min_window must be at most max_window (2), got 5",
        ),
        ({"input": []}, "input.path must name at least one file, got nothing"),
        (
            {"output": {"path": "o", "extras": ["cdf"]}},
            "output.extras 'cdf' needs sampling.coupling to be inverse_cdf, got gumbel",
        ),
        ({"model": ""}, "model.id must not be empty, got ''"),
        (
            {"cluster": {"tensor_parallel": 2, "gpus_per_worker": 2}},
            "cluster.gpus_per_worker must be 0 or 1, for each process, where tensor_parallel is above 1, got 2",
        ),
        (
            {"cluster": {"tensor_parallel": 2, "cpus_per_worker": 0}},
            "cluster.cpus_per_worker must be above 0 where tensor_parallel is above 1, got 0",
        ),
        (
            {"cluster": {"tensor_parallel": 2}, "engine": {"compile": "on"}},
            "engine.compile must be auto or off where cluster.tensor_parallel is above 1, got on",
        ),
        (
            {
                "cluster": {"tensor_parallel": 2},
                "decoding": {"strategy": "ptp", "adapter": "a"},
                "sampling": {"coupling": "inverse_cdf"},
            },
            "decoding.adapter of the model itself needs cluster.tensor_parallel to be 1, got 2",
        ),
    ],
)
def test_mistakes_are_told_in_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_job({**BASE, **sections})
    assert str(raised.value) == sentence


def test_another_strategy_drops_the_parameters_of_the_old_one() -> None:
    data = {**BASE, "decoding": {"strategy": "lookahead", "width": 7, "max_window": 30}}
    job = parse_job(data, ["decoding.max_window=9", "decoding.strategy=suffix", "decoding.max_match=4"])
    assert job.decoding == SuffixConfig(max_window=9, max_match=4)
    assert parse_job(data, ["decoding.strategy=lookahead"]).decoding == LookaheadConfig(width=7, max_window=30)


def test_a_missing_section_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^input must be given$"):
        parse_job({"model": "m", "output": "o"})


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sampling.n", "an override must be key=value, got 'sampling.n'"),
        ("=3", "an override must be key=value, got '=3'"),
        ("sampling.stop=[", "the value of an override must be valid YAML, got 'sampling.stop=['"),
        ("sampling.nn=3", "sampling.nn must be a known key (did you mean 'sampling.n'?)"),
    ],
)
def test_bad_overrides(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_job(BASE, [override])
    assert str(raised.value) == sentence


def test_job_files(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(BASE))
    assert load_job(str(file), ["sampling.n=2"]).sampling.n == 2
    file.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="the job file must be a mapping of keys, got a list in"):
        load_job(str(file))
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="the job file must be valid YAML, got"):
        load_job(str(file))
    with pytest.raises(
        ConfigError, match=r"the job file must be a readable text file, got '.*none.yaml': No such file"
    ):
        load_job(str(tmp_path / "none.yaml"))


def test_configuration_loads_without_torch_and_ray() -> None:
    code = "import sys, pipeline.config_io; sys.exit(bool({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
