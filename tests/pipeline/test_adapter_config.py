"""adapter.json: read back what was written, and sentences for what cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.adapter_config import AdaptConfig, AdapterConfig, read_adapter_config, write_adapter_config
from pipeline.config import SamplingConfig
from pipeline.errors import ConfigError

SHAPE = {"vocabulary": 320, "hidden": 32, "layers": 2}
LORA = {"base": "some/model", "base_revision": "abc", "base_shape": SHAPE, "rank": 4}


@pytest.mark.parametrize("root", ["local", "memory://adapters/one"])
def test_round_trip(root: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "new") if root == "local" else root
    config = AdapterConfig(**LORA, adapt=AdaptConfig(temperature=0.7, top_p=0.9), metrics={"correct": 6.5, "slot_0": 1})
    write_adapter_config(folder, config)
    assert read_adapter_config(folder) == config


def test_adapt_parameters_come_from_a_job_and_go_back() -> None:
    sampling = SamplingConfig(temperature=0.7, top_k=20, max_tokens=5, seed=3)
    back = AdaptConfig.of(sampling).sampling()
    assert (back.temperature, back.top_k, back.top_p, back.min_p) == (0.7, 20, 1.0, 0.0)
    assert back.coupling == "inverse_cdf"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "an adapter must be a folder with adapter.json, got '{}'"),
        ("{", "an adapter's adapter.json must be valid JSON, got "),
        ("[]", "an adapter's adapter.json must be a mapping of keys, got "),
        ('{"format": 2}', "an adapter must be one that this version reads, got '{}': format must be one of 1, got 2"),
        ('{"head": "o"}', "base must be given"),
        (json.dumps({**LORA, "ranks": 3}), "ranks must be a known key (did you mean 'rank'?)"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_sentence(text: str | None, sentence: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "adapter.json").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        read_adapter_config(str(tmp_path))
    assert sentence.format(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"variant": "full"}, {"rank": 0, "variant": "full", "scale": 2.0}])
def test_rank_and_scale_belong_to_lora(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="rank must be"):
        AdapterConfig.model_validate({**LORA, **wrong})


def test_needs_no_torch() -> None:
    code = "import sys, pipeline.adapter_config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
