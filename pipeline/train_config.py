"""The training file as typed, frozen models: what `sevenleague train` trains, on what, and how. Loads without torch.

A file is a whole experiment: `arms` are named overrides, each merged onto the rest of the file, and `seeds` repeats
every arm. An arm that names nothing but itself is the file as it stands.

    adapter: {head: o}
    arms:
      - {name: o}
      - {name: constant, adapter: {embedding: constant}}
    seeds: [0, 1]          # four trainings: o-0, o-1, constant-0, constant-1
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.adapter_config import AdaptConfig, EmbeddingKind, Head, SlotZero, Variant
from pipeline.cluster_config import ClusterConfig
from pipeline.config import ModelConfig
from pipeline.config_io import parse_section, read_mapping
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError
from pipeline.section import Section

BASE = "base"
"""The folder of a base that is trained first, and its name in `--arms`; no arm may have this name."""

_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class LoopConfig(Section):
    """How long and how fast anything is trained; the defaults suit a model of some million parameters on a CPU."""

    steps: int = Field(1000, ge=1, description="optimizer steps")
    max_seconds: float | None = Field(
        None, gt=0, description="end early after this much training time (such a run cannot be repeated bit for bit)"
    )
    batch_size: int = Field(8, ge=1, description="sequences of one optimizer step, over all workers and accumulation")
    accumulation: int = Field(1, ge=1, description="forward passes that make up the batch; must divide it")
    lr: float = Field(1e-3, gt=0.0, description="peak learning rate of AdamW")
    adam_beta2: float = Field(
        0.999, gt=0.0, lt=1.0, description="memory of AdamW's squared gradients; less pays in short trainings"
    )
    schedule: Literal["cosine", "constant"] = Field("cosine", description="cosine: down to a tenth of lr at the end")
    warmup_steps: int = Field(50, ge=0, description="linear rise to lr")
    clip: float = Field(1.0, gt=0.0, description="largest norm of the gradient")
    weight_decay: float = Field(0.0, ge=0.0, description="of matrices; vectors are never decayed")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="bfloat16: autocast around the forward pass")
    seed: int = Field(0, ge=0, lt=2**63, description="of weights, data order, windows and noise")
    eval_every: int = Field(200, ge=1, description="steps between evaluations on held-out rows")
    eval_sequences: int = Field(16, ge=1, description="held-out sequences of an evaluation")
    patience: int = Field(0, ge=0, description="evaluations without a better loss that end the training; 0: never")
    checkpoint_every: int = Field(
        200, ge=1, description="steps between checkpoints that a repeated command goes on from"
    )

    @model_validator(mode="after")
    def _divides(self) -> LoopConfig:
        if self.batch_size % self.accumulation:
            raise ValueError(f"accumulation must divide batch_size ({self.batch_size}), got {self.accumulation}")
        return self


class TrainingConfig(LoopConfig):
    """How an adapter is trained."""

    objective: Literal["distill", "inverse", "autoregressive"] = Field(
        "distill",
        description="distill: u from the teacher's intervals; inverse: u from the student's own, no teacher (head c); "
        "autoregressive: an ordinary model of the base's shape from new weights, for comparison",
    )
    proposals: Literal["teacher", "student", "dataset"] = Field(
        "teacher",
        description="whose tokens a window holds: the data's, known to be the teacher's samples (teacher) or any "
        "text (dataset), or drafts of the student, judged by the teacher (student)",
    )
    beta: float = Field(1.0, gt=0.0, description="b of Beta(b, b), where u lies in its interval; 1: uniform")
    slots: Literal["all", "reached"] = Field(
        "all", description="reached: a slot is trained only where the student drafts all slots before it rightly"
    )
    loss: Literal["ce", "kl", "ce+kl"] = Field("ce", description="kl: KL(teacher || student), head c only")


class ShapeConfig(Section):
    """The shape of a Llama that is made new."""

    hidden: int = Field(192, ge=8)
    layers: int = Field(6, ge=1)
    heads: int = Field(6, ge=1)
    kv_heads: int | None = Field(None, ge=1, description="default: as many as heads")
    intermediate: int = Field(512, ge=8)
    context: int = Field(512, ge=2, description="most positions")
    init: float | None = Field(None, gt=0.0, description="deviation of new weights; default: 1 / sqrt(hidden)")

    @model_validator(mode="after")
    def _heads_fit(self) -> ShapeConfig:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden must be a multiple of twice heads ({2 * self.heads}), got {self.hidden}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads ({self.heads}), got {self.kv_heads}")
        return self


class PretrainConfig(Section):
    """A base model that is trained first, as an ordinary language model, and kept in OUTPUT/base.

    Without `input`, on `data.outputs`, it becomes a small draft model for the model that wrote them.
    """

    input: InputConfig | None = Field(
        None, description="texts that it learns from; default: data.exact or data.outputs"
    )
    vocabulary: int = Field(
        1024, ge=257, description="tokens of the BPE that is made for texts; outputs keep their model's tokenizer"
    )
    shape: ShapeConfig = ShapeConfig()
    sequence_length: int = Field(256, ge=2)
    training: LoopConfig = LoopConfig()


class BaseConfig(Section):
    """The teacher, whose rows the adapter's slots look at: a model as job files name it, or one trained first.

    `base: NAME` is short for `base: {model: {id: NAME}}`.
    """

    model: ModelConfig | None = None
    pretrain: PretrainConfig | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> BaseConfig:
        if (self.model is None) == (self.pretrain is None):
            raise ValueError("must hold exactly one of model and pretrain")
        return self


class ExactTeacherConfig(Section):
    """A random process whose conditional probabilities are known: a Markov chain, or one seen through noise."""

    kind: Literal["markov", "hmm"] = "markov"
    vocabulary: int = Field(32, ge=2)
    order: int = Field(1, ge=1, le=3, description="tokens that a Markov chain remembers")
    states: int = Field(16, ge=2, description="hidden states of an HMM")
    concentration: float = Field(0.1, gt=0.0, description="of the Dirichlet that rows are drawn from; small: sharp")
    seed: int = Field(0, ge=0, lt=2**63)


class DataConfig(Section):
    """What is trained on; exactly one of the three."""

    outputs: tuple[str, ...] = Field(
        (), description="outputs of `sevenleague run` with extras token_ids and cdf, whose completions are the targets"
    )
    teacher: Literal["base", "any"] = Field(
        "base", description="any: `outputs` may be another model's with the base's vocabulary, as for a draft model"
    )
    input: InputConfig | None = Field(
        None, description="any data set as in a job file; all of its tokens are targets, the teacher computes the edges"
    )
    ids_column: str | None = Field(None, description="column of `input` that holds token ids instead of text")
    exact: ExactTeacherConfig | None = Field(None, description="samples of an exact teacher, drawn while training")
    held_out: float = Field(0.05, gt=0.0, lt=1.0, description="share of the rows (by hash of their id) to evaluate on")

    @field_validator("outputs", mode="before")
    @classmethod
    def _one_path_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of_three(self) -> DataConfig:
        given = [bool(self.outputs), self.input is not None, self.exact is not None]
        if sum(given) != 1:
            raise ValueError("must hold exactly one of outputs, input and exact")
        if self.ids_column is not None and self.input is None:
            raise ValueError("ids_column must be left out unless input is given")
        if self.teacher != "base" and not self.outputs:
            raise ValueError(f"teacher must be base unless outputs is given, got {self.teacher}")
        return self


class WindowConfig(Section):
    """Windows of auxiliary slots that one sequence trains at once."""

    slots: int = Field(8, ge=1, le=256, description="L: tokens that a window predicts")
    windows_per_sequence: int = Field(16, ge=1)
    sequence_length: int = Field(256, ge=2, description="tokens of a packed sequence")


class AdapterChoice(Section):
    """What is trained: see `workers/ptp`."""

    head: Head = Field("o", description="o: one-hot, knows the token's own u; c: categorical, knows the u before it")
    embedding: EmbeddingKind = Field(
        "arithmetic", description="features of u; constant: no u, the independent baseline"
    )
    slot_zero: SlotZero = Field("context_token", description="context_token: slot 0 stands in for the last token")
    variant: Variant = Field("lora", description="lora: low-rank changes of all linear layers; full: a trained copy")
    rank: int = Field(16, ge=1, description="of lora")
    scale: float = Field(1.0, gt=0.0, description="factor of the low-rank change")
    start: str | None = Field(
        None, description="an adapter to begin with: its folder; base, head, embedding, slot_zero, variant, rank alike"
    )


class TrainConfig(Section):
    """One experiment."""

    base: BaseConfig
    data: DataConfig
    adapt: AdaptConfig | None = Field(
        None, description="how logits become the distribution that u picks from; default: as data.outputs were sampled"
    )
    window: WindowConfig = WindowConfig()
    adapter: AdapterChoice = AdapterChoice()
    training: TrainingConfig = TrainingConfig()
    cluster: ClusterConfig = ClusterConfig()
    arms: tuple[dict[str, Any], ...] = Field((), description="name, and what differs from the rest of the file")
    seeds: tuple[int, ...] = Field((), description="every arm once with each; default: training.seed alone")

    @field_validator("seeds", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _parts_fit(self) -> TrainConfig:
        if self.adapt is not None and self.adapt.temperature == 0.0:
            raise ValueError("adapt.temperature must be greater than 0, where noise picks the token, got 0")
        training, workers = self.training, self.cluster.workers
        if not isinstance(workers, int):
            raise ValueError(f"cluster.workers must be a whole number for training, got {workers}")
        if self.cluster.tensor_parallel > 1:
            raise ValueError(f"cluster.tensor_parallel must be 1 for training, got {self.cluster.tensor_parallel}")
        if training.batch_size % (training.accumulation * workers):
            raise ValueError(
                "training.batch_size must be a multiple of training.accumulation x cluster.workers "
                f"({training.accumulation} x {workers}), got {training.batch_size}"
            )
        if training.objective == "inverse" and self.adapter.head != "c":
            raise ValueError(f"adapter.head must be c for training.objective inverse, got {self.adapter.head}")
        if "kl" in training.loss and self.adapter.head != "c":
            raise ValueError(f"adapter.head must be c for training.loss {training.loss}, got {self.adapter.head}")
        pretrain = self.base.pretrain
        if pretrain is not None and pretrain.input is None and self.data.outputs and self.data.teacher == "base":
            raise ValueError("data.teacher must be any where base.pretrain learns from data.outputs, got base")
        if self.data.teacher != "base":  # what needs the teacher's own logits would get the base's
            if "kl" in training.loss:
                raise ValueError(f"data.teacher must be base for training.loss {training.loss}, got any")
            if training.proposals == "student":
                raise ValueError("data.teacher must be base for training.proposals student, got any")
        if self.window.slots >= self.window.sequence_length:
            raise ValueError(
                f"window.slots must be below window.sequence_length ({self.window.sequence_length}), "
                f"got {self.window.slots}"
            )
        return self


@dataclass(frozen=True, slots=True)
class Arm:
    """One training: its name, which is a folder too, and its configuration without arms and seeds."""

    name: str
    config: TrainConfig


def load_train(path: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The experiment of a YAML file (any fsspec path). Raises ConfigError; `overrides` are like those of job files."""
    return parse_train(read_mapping(path, "training file"), overrides)


def parse_train(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> TrainConfig:
    """The experiment of plain data. Raises ConfigError."""
    return parse_section(TrainConfig, _written_out(data), overrides)


def arms_of(config: TrainConfig) -> tuple[Arm, ...]:
    """The arms of an experiment, in the order of the file, each with every seed. Raises ConfigError.

    All of them share `base`, which is made once.
    """
    rest = config.model_dump(mode="json", exclude={"arms", "seeds"})
    arms: list[Arm] = []
    for entry in config.arms or ({"name": config.adapter.head},):
        name = entry.get("name")
        if not isinstance(name, str) or not _ARM_NAME.fullmatch(name) or name == BASE:
            raise ConfigError(f"arms.name must be letters, digits, '.', '_' and '-', and not base, got {name!r}")
        changes = {key: value for key, value in entry.items() if key != "name"}
        fixed = sorted({"arms", "base", "cluster", "seeds"} & changes.keys())
        if fixed:
            raise ConfigError(f"arms.{fixed[0]} must be left out, since all arms share it, got it in arm {name!r}")
        merged = _merged(rest, changes)
        for seed in config.seeds or (merged["training"]["seed"],):
            seeded = _merged(merged, {"training": {"seed": seed}})
            arms.append(Arm(f"{name}-{seed}" if len(config.seeds) > 1 else name, _parsed_arm(name, seeded)))
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"arms.name must differ from arm to arm, got {twice[0]!r} twice")
    return tuple(arms)


def _written_out(data: Mapping[str, Any]) -> dict[str, Any]:
    """`base: NAME`, `base: {model: NAME}` and `data: {input: PATH}` in full, so that overrides find the keys."""
    full = dict(data)
    if isinstance(full.get("base"), str):
        full["base"] = {"model": full["base"]}
    for section, key, short in (("base", "model", "id"), ("data", "input", "path")):
        value = full.get(section)
        if isinstance(value, Mapping) and isinstance(value.get(key), str | list):
            full[section] = {**value, key: {short: value[key]}}
    return full


def _parsed_arm(name: str, data: Mapping[str, Any]) -> TrainConfig:
    try:
        return parse_train(data)
    except ConfigError as error:
        raise ConfigError(f"{error} (in arm {name!r})") from error


def _merged(data: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` on top of `data`, key by key at every depth; `data` stays as it is."""
    merged = dict(data) if isinstance(data, Mapping) else {}
    for key, value in changes.items():
        merged[key] = _merged(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged
