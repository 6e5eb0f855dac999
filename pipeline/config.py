"""The job file as typed, frozen models. Loads without torch; unknown keys are refused (sentences: see config_io).

Every field documents itself: its description is what the reference documentation and the error messages quote.
The sections that fill a page each have their own file: `data_config`, `decoding_config`, `cluster_config`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.cluster_config import ClusterConfig
from pipeline.data_config import InputConfig, OutputConfig
from pipeline.decoding_config import AutoConfig, DecodingConfig, PTPConfig
from pipeline.section import Section


class ModelConfig(Section):
    """What generates. `model: NAME` in a job file is short for `model: {id: NAME}`."""

    id: str = Field(min_length=1, description="hub id, local folder, fsspec URL, GGUF file, or builtin:smollm2-135m")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: what the checkpoint was saved in"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda when the worker has a GPU")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    allow_pickle: bool = Field(False, description="read pickled weights (.bin) where there are no safetensors")


Coupling = Literal["gumbel", "inverse_cdf"]


class SamplingConfig(Section):
    """How a token is chosen. Part of the job's identity. temperature 0 is greedy."""

    n: int = Field(1, ge=1, description="samples of each prompt")
    temperature: float = Field(1.0, ge=0.0, le=100.0, description="0: greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="keep the likeliest tokens that make up this probability")
    top_k: int = Field(0, ge=0, description="keep this many likeliest tokens; 0: off")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="drop tokens below this share of the likeliest; 0: off")
    max_tokens: int = Field(256, ge=1, description="most new tokens of a sample")
    stop: tuple[str, ...] = Field((), description="strings that end a sample; they are cut from the text")
    stop_token_ids: tuple[int, ...] = Field((), description="token ids that end a sample, besides the model's own")
    ignore_eos: bool = Field(False, description="go on after the model's own end token")
    seed: int = Field(0, ge=0, lt=2**63, description="the same seed gives the same samples")
    repetition_penalty: float = Field(1.0, gt=0.0, description="over prompt and output; 1: off")
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="over the output; 0: off")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="over the output; 0: off")
    logprobs: int = Field(0, ge=0, le=1024, description="k of the top-k log-probabilities (output.extras: topk)")
    coupling: Coupling = Field("gumbel", description="how noise picks a token: gumbel or inverse_cdf (needed by PTP)")
    noise_sets: int = Field(
        1,
        ge=1,
        le=1024,
        description="M: each stretch of tokens takes that of M sets of noise whose first token an adapter can hardly "
        "miss; the same seed gives other samples for each M",
    )
    noise_stretch: int = Field(8, ge=1, description="tokens of a stretch, where noise_sets is above 1")

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str | int) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("must hold no empty string, got ''")
        return value

    @model_validator(mode="after")
    def _sets_of_noise_that_pick(self) -> SamplingConfig:
        if self.noise_sets > 1 and (self.coupling != "inverse_cdf" or self.temperature == 0.0):
            raise ValueError(
                f"noise_sets must be 1 unless coupling is inverse_cdf and temperature above 0, got {self.noise_sets}"
            )
        return self

    @property
    def chooses_noise(self) -> bool:
        """Whether there are sets of noise to choose from. A row may be greedy where the others are not."""
        return self.noise_sets > 1 and self.temperature > 0.0

    def identity(self) -> dict[str, Any]:
        """What decides the output, without keys that were not there when older jobs began."""
        return self.model_dump(mode="json", exclude={"noise_sets", "noise_stretch"} if self.noise_sets == 1 else None)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class EngineConfig(Section):
    """Limits of one worker's engine. They decide speed and memory, never the output."""

    max_sequences: int = Field(16, ge=1, le=4096, description="samples decoded at once")
    max_tokens_per_step: int = Field(1024, ge=1, description="rows of one forward: prompt chunks, pending and drafts")
    kv_memory_gb: float | None = Field(None, gt=0, description="memory of the KV cache; default: by device")
    prefix_cache: bool = Field(True, description="compute what prompts begin with in common once")
    max_context: int | None = Field(None, ge=2, description="cut the model's own context length")
    compile: Literal["auto", "off", "on"] = Field(
        "auto", description="compiled kernels (CPU) or captured graphs (GPU); auto: where they pay, on: else refuse"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: the worker's cpus")


class JobConfig(Section):
    """One offline generation job."""

    model: ModelConfig
    input: InputConfig
    output: OutputConfig
    sampling: SamplingConfig = SamplingConfig()
    decoding: DecodingConfig = AutoConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, value: Any) -> Any:
        return {"id": value} if isinstance(value, str) else value

    @field_validator("input", mode="before")
    @classmethod
    def _input_by_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str | list | tuple) else value

    @field_validator("output", mode="before")
    @classmethod
    def _output_by_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @field_validator("decoding", mode="before")
    @classmethod
    def _decoding_by_name(cls, value: Any) -> Any:
        return {"strategy": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _extras_fit_sampling(self) -> JobConfig:
        if "cdf" in self.output.extras and self.sampling.coupling != "inverse_cdf":
            raise ValueError(
                f"output.extras 'cdf' needs sampling.coupling to be inverse_cdf, got {self.sampling.coupling}"
            )
        adapter = self.decoding.adapter if isinstance(self.decoding, PTPConfig | AutoConfig) else None
        if adapter is not None and self.sampling.coupling != "inverse_cdf":
            raise ValueError(
                f"decoding.adapter needs sampling.coupling to be inverse_cdf, got {self.sampling.coupling}"
            )
        if self.cluster.tensor_parallel > 1 and self.engine.compile == "on":
            raise ValueError("engine.compile must be auto or off where cluster.tensor_parallel is above 1, got on")
        own_model = isinstance(self.decoding, PTPConfig) and self.decoding.model is not None
        if self.cluster.tensor_parallel > 1 and adapter is not None and not own_model:
            raise ValueError(
                f"decoding.adapter of the model itself needs cluster.tensor_parallel to be 1, got "
                f"{self.cluster.tensor_parallel}"
            )
        if "topk" in self.output.extras and self.sampling.logprobs == 0:
            raise ValueError("output.extras 'topk' needs sampling.logprobs to be at least 1, got 0")
        return self

    def identity(self) -> dict[str, Any]:
        """What decides the output, as plain JSON values; input files are added by the plan (`shards.plan`).

        Left out is what only decides the speed or the place: decoding, engine, cluster, device, and the paths
        (input files enter with their size and etag instead), and what is only a permission.
        """
        return {
            "model": self.model.model_dump(mode="json", exclude={"device", "allow_pickle"}),
            "input": self.input.identity(),
            "sampling": self.sampling.identity(),
            "output": self.output.model_dump(mode="json", exclude=self._not_identity()),
            "engine": {"max_context": self.engine.max_context},
        }

    def _not_identity(self) -> set[str]:
        """Keys of output that do not decide rows or, left at their defaults, were not there when older jobs began."""
        defaults = {"trace": False, "topk_dtype": "float32"}
        return {"path", "push_to_hub"} | {key for key, value in defaults.items() if getattr(self.output, key) == value}
