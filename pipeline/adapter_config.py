"""What an adapter of Parallel Token Prediction says about itself: `adapter.json`, next to `adapter.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from pipeline import storage
from pipeline.config import SamplingConfig
from pipeline.config_io import parse_section
from pipeline.errors import ConfigError, SevenLeagueError
from pipeline.section import Section

CONFIG_FILE = "adapter.json"
WEIGHTS_FILE = "adapter.safetensors"

Head = Literal["o", "c"]
EmbeddingKind = Literal["arithmetic", "bits32", "threshold", "linear", "constant"]
SlotZero = Literal["context_token", "plain"]
Variant = Literal["lora", "full"]


class BaseShape(Section):
    """What weights must fit: an adapter of another shape cannot be put on a base."""

    vocabulary: int = Field(ge=1)
    hidden: int = Field(ge=1)
    layers: int = Field(ge=1)


class AdaptConfig(Section):
    """How logits became the distribution that the training data was drawn from."""

    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0.0, le=1.0)

    @classmethod
    def of(cls, sampling: SamplingConfig) -> AdaptConfig:
        return cls(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)

    def sampling(self) -> SamplingConfig:
        return SamplingConfig.model_validate({**self.model_dump(), "coupling": "inverse_cdf"})


class AdapterConfig(Section):
    """One adapter: what it was made for, how it is built, what it was trained on, and how well it does."""

    format: Literal[1] = 1
    base: str = Field(min_length=1, description="model.id of the base model")
    base_revision: str = Field(description="changes whenever the files of the base model do")
    base_shape: BaseShape
    head: Head = Field("o", description="o: one-hot, sees the noise of its own token; c: categorical, does not")
    embedding: EmbeddingKind = Field("arithmetic", description="features of the noise; constant: noise is not shown")
    slots: int = Field(16, ge=1, le=256, description="tokens that one window predicts")
    slot_zero: SlotZero = Field("context_token", description="whether slot 0 is also shown the last context token")
    variant: Variant = Field("lora", description="lora: low-rank; full: a copy of the decoder layers")
    rank: int = Field(0, ge=0, description="of lora; 0 for full")
    scale: float = Field(1.0, gt=0.0, description="of lora: the factor of B(Ax) itself, no alpha / rank")
    adapt: AdaptConfig = AdaptConfig()
    data: str = Field("", description="what it was trained on")
    steps: int = Field(0, ge=0)
    seed: int = Field(0, ge=0)
    metrics: Mapping[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _ranked(self) -> AdapterConfig:
        if self.variant == "lora" and self.rank == 0:
            raise ValueError("rank must be at least 1 for variant lora, got 0")
        if self.variant == "full" and (self.rank or self.scale != 1.0):
            raise ValueError(f"rank must be 0 and scale 1 for variant full, got {self.rank} and {self.scale:g}")
        return self


def write_adapter_config(folder: str, config: AdapterConfig) -> None:
    """Written last, so that a folder with an `adapter.json` is whole."""
    storage.write_bytes(storage.join(folder, CONFIG_FILE), (config.model_dump_json(indent=2) + "\n").encode())


def read_adapter_config(folder: str) -> AdapterConfig:
    """The configuration in an adapter's folder (any fsspec path). Raises ConfigError."""
    path = storage.join(folder, CONFIG_FILE)
    try:
        data = json.loads(storage.read_bytes(path))
    except (OSError, SevenLeagueError) as error:
        raise ConfigError(f"an adapter must be a folder with {CONFIG_FILE}, got {folder!r}") from error
    except ValueError as error:
        raise ConfigError(f"an adapter's {CONFIG_FILE} must be valid JSON, got {path!r}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"an adapter's {CONFIG_FILE} must be a mapping of keys, got {path!r}")
    try:
        return parse_section(AdapterConfig, data)
    except ConfigError as error:
        raise ConfigError(f"an adapter must be one that this version reads, got {folder!r}: {error}") from error
