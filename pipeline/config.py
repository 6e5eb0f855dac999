"""The job file as typed, frozen models. Loads without torch; unknown keys are refused (sentences: see config_io).

Every field documents itself: its description is what the reference documentation and the error messages quote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """Base of all sections: immutable, hashable unless it holds a mapping, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


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


class InputConfig(Section):
    """Which prompts. Formats are told by name (`.parquet`, `.jsonl`) unless `format` says otherwise.

    All column names are those that `columns` gives.
    """

    path: tuple[str, ...] = Field(description="file, glob, folder, fsspec URL or datasets name, or a list of these")
    format: Literal["auto", "parquet", "jsonl", "csv", "tsv", "openai_batch", "datasets"] = Field(
        "auto", description="auto: by name and content of each file; a datasets name needs datasets"
    )
    split: str = Field("train", description="split of a datasets name or saved-to-disk folder")
    subset: str | None = Field(None, description="configuration name of a datasets name")
    columns: dict[str, str] = Field({}, description="new names of columns: {name in the input: name in the job}")
    prompt_column: str | None = Field(
        None, description="a string column or a messages column; default: the first of messages, prompt, text"
    )
    prompt_template: str | None = Field(None, description="Jinja template over the row's columns that makes the prompt")
    system_prompt: str | None = Field(None, description="put before messages that have no system message")
    chat_template: bool | None = Field(
        None, description="render through the model's chat template; default: messages yes, a plain string no"
    )
    id_column: str | None = Field(None, description="unique row ids; default: file and row number")
    sampling_column: str | None = Field(
        None, description="a struct column, or JSON text, whose keys override those of sampling for the row"
    )
    seed_column: str | None = Field(None, description="each row's own seed, unless its sampling_column has one")
    tools_column: str | None = Field(None, description="tools that the chat template describes: JSON text, or a list")
    limit: int | None = Field(None, ge=1, description="use only the first rows")
    on_too_long: Literal["error", "truncate_left"] = Field(
        "error", description="a prompt that leaves no room for one token: error row, or drop its oldest tokens"
    )
    allow_append: bool = Field(False, description="the same job again may bring new files, which are added to it")

    @field_validator("path", mode="before")
    @classmethod
    def _one_path_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("path")
    @classmethod
    def _some_path(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or any(not path.strip() for path in value):
            raise ValueError("must name at least one file, got nothing")
        return value

    @field_validator("columns")
    @classmethod
    def _one_column_each(cls, value: dict[str, str]) -> dict[str, str]:
        twice = next((name for name in value.values() if [*value.values()].count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"must give each column a name of its own, got {twice!r} twice")
        return value

    @model_validator(mode="after")
    def _all_rows_where_files_are_appended(self) -> InputConfig:
        if self.allow_append and self.limit is not None:
            raise ValueError(f"limit must be null where allow_append is true, got {self.limit}")
        return self

    def source_of(self, name: str) -> str | None:
        """What the input calls a column of the job; None where it was given another name."""
        renamed = {new: old for old, new in self.columns.items()}
        return renamed.get(name, None if name in self.columns else name)

    def identity(self) -> dict[str, Any]:
        """What decides the output, without keys that, left at their defaults, were not there when older jobs began."""
        newer: dict[str, Any] = {"columns": {}, "sampling_column": None, "seed_column": None, "tools_column": None}
        absent = {key for key, default in newer.items() if getattr(self, key) == default}
        return self.model_dump(mode="json", exclude={"path", "allow_append"} | absent)


REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class PushConfig(Section):
    """Where on the Hugging Face hub a finished output goes. The token is `HF_TOKEN` of the environment."""

    repo: str = Field(description="user/name of a dataset repository; made where absent")
    private: bool = Field(True, description="a repository that is made is private")
    revision: str = Field("main", min_length=1, description="branch that gets the commit")

    @field_validator("repo")
    @classmethod
    def _user_and_name(cls, value: str) -> str:
        if REPOSITORY.fullmatch(value) is None:
            raise ValueError(f"must be USER/NAME, got {value!r}")
        return value


OutputExtra = Literal["prompt_ids", "token_ids", "logprobs", "topk", "cdf"]


class OutputConfig(Section):
    """Where outputs go and what they hold."""

    path: str = Field(min_length=1, description="folder or fsspec URL; one folder holds one job")
    columns: tuple[str, ...] = Field((), description="input columns that are copied to the output")
    extras: tuple[OutputExtra, ...] = Field(
        ("token_ids",),
        description="prompt_ids: prompt_token_ids; token_ids: completion_token_ids; logprobs: token_logprobs; topk: "
        "topk_token_ids and topk_logprobs (k is sampling.logprobs); cdf: cdf_low and cdf_high (needs inverse_cdf)",
    )
    rows_per_shard: int = Field(256, ge=1, description="input rows of one shard, the unit of commit and of retry")
    trace: bool = Field(False, description="also draft_spans: which tokens of a sample were drafted, and by whom")
    topk_dtype: Literal["float32", "float16"] = Field("float32", description="precision of topk_logprobs")
    push_to_hub: PushConfig | None = Field(None, description="a dataset repository that gets the finished output")

    @property
    def recorded(self) -> frozenset[str]:
        """What the engine keeps of each token."""
        return frozenset([*self.extras, *(["trace"] if self.trace else [])])


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

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Windowed(Section):
    """Parameters of every strategy that drafts: draft rows of one sequence in one step.

    The window of a sequence grows while its drafts are accepted whole and shrinks when they break early; with
    min_window = max_window it is fixed.
    """

    min_window: int = Field(1, ge=0, le=256, description="fewest draft rows of a sequence")
    max_window: int = Field(16, ge=1, le=256, description="most draft rows of a sequence")
    max_draft_rows: int = Field(64, ge=1, description="most draft rows of a step, over all sequences")

    @property
    def extra_rows(self) -> int:
        """Rows of one sequence beside its drafts."""
        return 0

    @model_validator(mode="after")
    def _ordered(self) -> Windowed:
        if self.min_window > self.max_window:
            raise ValueError(f"min_window must be at most max_window ({self.max_window}), got {self.min_window}")
        return self


class AutoregressiveConfig(Section):
    """Plain decoding: one token per step. The reference that every other strategy must equal."""

    strategy: Literal["autoregressive"] = "autoregressive"


class JacobiConfig(Windowed):
    """Jacobi iteration: the guesses beyond the first mismatch, re-predicted in the same pass, are the next guesses."""

    strategy: Literal["jacobi"] = "jacobi"
    init: Literal["copy", "random", "suffix"] = Field("copy", description="what fills the empty end of the window")


class LookaheadConfig(Windowed):
    """Lookahead decoding (Fu et al. 2024): a two-dimensional window feeds an n-gram pool that is verified."""

    strategy: Literal["lookahead"] = "lookahead"
    width: int = Field(5, ge=1, le=64, description="W: columns of the two-dimensional window")
    ngram: int = Field(4, ge=2, le=16, description="N: tokens of an n-gram")
    candidates: int = Field(5, ge=1, le=64, description="G: n-grams verified per step")
    max_window: int = Field(64, ge=1, le=256, description="most draft rows of a sequence")

    @property
    def extra_rows(self) -> int:
        """Cells of the two-dimensional window without the pending token."""
        return (self.ngram - 1) * self.width - 1


class FixedWindow(Windowed):
    """Strategies that draft the same number of tokens in every step; they serve for comparison."""

    window: int = Field(4, ge=1, le=256, description="k: draft tokens of a sequence in each step")
    max_draft_rows: int = Field(4096, ge=1, description="most draft rows of a step, over all sequences")

    @model_validator(mode="before")
    @classmethod
    def _fixed(cls, data: dict[str, Any]) -> dict[str, Any]:
        """`min_window` and `max_window` are `window`."""
        window = data.get("window", cls.model_fields["window"].default)
        if not isinstance(window, int) or not 1 <= window <= 256:
            return data  # refused below
        for key in ("min_window", "max_window"):
            if data.get(key, window) != window:
                raise ValueError(f"{key} must be left out where window ({window}) fixes it, got {data[key]}")
        return {**data, "min_window": window, "max_window": window}


class PromptLookupConfig(FixedWindow):
    """Prompt lookup (Saxena 2023): one chain, copied from the latest longest match in prompt and own output."""

    strategy: Literal["prompt_lookup"] = "prompt_lookup"
    max_match: int = Field(3, ge=1, le=64, description="longest context that is matched, in tokens")


class DraftModelConfig(FixedWindow):
    """Speculative decoding (Leviathan et al. 2023): a small model with the same vocabulary drafts a chain."""

    strategy: Literal["draft_model"] = "draft_model"
    model: str = Field(min_length=1, description="hub id or folder of the draft model")


class PTPConfig(Windowed):
    """Parallel token prediction (arXiv 2512.21323): a trained adapter drafts a chain from the noise of its tokens."""

    strategy: Literal["ptp"] = "ptp"
    adapter: str = Field(min_length=1, description="folder or fsspec URL that `sevenleague train` wrote")
    model: str | None = Field(None, description="the adapter's base, where that is a smaller model than model.id")
    mode: Literal["auto", "serial", "one_pass"] = Field(
        "auto",
        description="serial: a pass that drafts, then one that verifies; one_pass: both at once, with a branch for "
        "each likely number of accepted drafts; auto: one_pass on GPUs, serial on CPUs",
    )
    branches: int = Field(3, ge=1, le=64, description="most branches of a sequence in one_pass mode")
    max_window: int = Field(8, ge=1, le=256, description="most draft rows of a sequence")

    @property
    def extra_rows(self) -> int:
        """Auxiliary rows of a sequence. A window has one row more than drafts where its first target is emitted anyway,
        or where the pending token runs in the drafting pass too."""
        return (1 if self.mode == "serial" else self.branches) * (self.max_window + 1)

    @model_validator(mode="after")
    def _own_model(self) -> PTPConfig:
        if self.model is not None and self.mode == "one_pass":
            raise ValueError("mode must be auto or serial where model names the adapter's base, got one_pass")
        return self


class SuffixConfig(Windowed):
    """Suffix drafts: what followed the longest earlier match in the prompt, the own output, or finished outputs."""

    strategy: Literal["suffix"] = "suffix"
    max_match: int = Field(16, ge=1, le=64, description="longest context that is matched, in tokens")
    use_finished: bool = Field(True, description="also match the finished outputs of this worker; false: prompt lookup")


class RecyclingConfig(Windowed):
    """Recycled continuations: a tree from the top candidates that earlier passes computed anyway."""

    strategy: Literal["recycling"] = "recycling"
    top_k: int = Field(8, ge=1, le=64, description="candidates kept per context")
    context: int = Field(2, ge=1, le=4, description="longest key in tokens, with back-off to shorter ones")


class AutoConfig(Windowed):
    """The model-free drafters, and an adapter if there is one, merged into one tree, of which rows run as far as they
    pay for their time."""

    strategy: Literal["auto"] = "auto"
    adapter: str | None = Field(None, description="an adapter of parallel token prediction that drafts too")
    lookahead_width: int = Field(
        0,
        ge=0,
        le=64,
        description="W: a two-dimensional window (N = 4) of 3 W - 1 more rows, run where it pays",
    )

    @property
    def extra_rows(self) -> int:
        """Cells of the two-dimensional window without the pending token, and rows of the adapter's windows."""
        auxiliary = 0 if self.adapter is None else PTPConfig(adapter=self.adapter).extra_rows
        return max(0, 3 * self.lookahead_width - 1) + auxiliary


DecodingConfig = Annotated[
    AutoregressiveConfig
    | JacobiConfig
    | LookaheadConfig
    | SuffixConfig
    | RecyclingConfig
    | AutoConfig
    | PromptLookupConfig
    | DraftModelConfig
    | PTPConfig,
    Field(discriminator="strategy"),
]


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


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """Workers that come and go with the machines of a cluster. Checked by `ClusterConfig`."""

    min: int
    max: int


class ClusterConfig(Section):
    """Where it runs."""

    workers: int | WorkerRange = Field(1, description="model replicas, one Ray actor each; {min: .., max: ..}: elastic")
    cpus_per_worker: float = Field(1.0, ge=0.0, description="CPUs that Ray sets aside for a worker")
    gpus_per_worker: float = Field(0.0, ge=0.0, description="GPUs that Ray sets aside for a worker")
    tensor_parallel: int = Field(
        1, ge=1, description="processes of one replica, each with a part of every layer, cpus and gpus_per_worker"
    )
    address: str | None = Field(None, description="a running Ray cluster (auto or host:port); default: start one here")
    log_format: Literal["text", "json"] = Field(
        "text", description="what driver and workers write to stderr: warnings as text, or all as lines of JSON"
    )
    dashboard: bool = Field(False, description="Ray's dashboard, on 127.0.0.1 alone, for a Ray that starts here")
    max_attempts: int = Field(3, ge=1, description="attempts at a shard before its rows are given up")
    hang_timeout_s: float = Field(600.0, gt=0, description="a worker that does nothing for so long is replaced")
    grace_s: float = Field(30.0, ge=0, description="what driver and workers take to finish after a SIGTERM")
    duplicate_stragglers: bool = Field(True, description="idle workers also decode shards that take too long elsewhere")

    @field_validator("workers", mode="before")
    @classmethod
    def _number_or_range(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError(f"must be at least 1, got {value}")
            return value
        if isinstance(value, WorkerRange):
            value = {"min": value.min, "max": value.max}
        if not (isinstance(value, dict) and set(value) == {"min", "max"} and {*map(type, value.values())} == {int}):
            raise ValueError(f"must be a whole number or {{min: .., max: ..}}, got {value!r}")
        if not 1 <= value["min"] <= value["max"]:
            raise ValueError(f"must have 1 <= min <= max, got {value!r}")
        return WorkerRange(**value)

    @model_validator(mode="after")
    def _one_device_for_each_process(self) -> ClusterConfig:
        if self.tensor_parallel > 1:
            if self.gpus_per_worker not in (0, 1):
                raise ValueError(
                    f"gpus_per_worker must be 0 or 1, for each process, where tensor_parallel is above 1, got "
                    f"{self.gpus_per_worker:g}"
                )
            if self.cpus_per_worker + self.gpus_per_worker == 0:
                raise ValueError("cpus_per_worker must be above 0 where tensor_parallel is above 1, got 0")
        return self

    @property
    def cpus_per_replica(self) -> float:
        """Of all processes of a worker; so for `gpus_per_replica`."""
        return self.cpus_per_worker * self.tensor_parallel

    @property
    def gpus_per_replica(self) -> float:
        return self.gpus_per_worker * self.tensor_parallel

    @property
    def min_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else self.workers.min

    @property
    def max_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else self.workers.max


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
            "sampling": self.sampling.model_dump(mode="json"),
            "output": self.output.model_dump(mode="json", exclude=self._not_identity()),
            "engine": {"max_context": self.engine.max_context},
        }

    def _not_identity(self) -> set[str]:
        """Keys of output that do not decide rows or, left at their defaults, were not there when older jobs began."""
        defaults = {"trace": False, "topk_dtype": "float32"}
        return {"path", "push_to_hub"} | {key for key, value in defaults.items() if getattr(self.output, key) == value}
