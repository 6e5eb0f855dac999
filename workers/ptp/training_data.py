"""From the `data` section of a training file to a source of documents, and the streams of packed sequences over it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from pipeline.adapter_config import AdaptConfig
from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.train_config import DataConfig, LoopConfig, PretrainConfig, TrainConfig
from workers.model_files import locate, revision_of
from workers.model_loading import LoadedModel, load_tokenizer
from workers.ptp.documents import InputSource, OutputJob, OutputSource, Source, check_outputs, is_held_out
from workers.ptp.exact_source import ExactSource
from workers.ptp.exact_teachers import make_teacher
from workers.ptp.pretraining import number_tokenizer, train_tokenizer
from workers.ptp.sequences import PackedStream, Sequences

_HELD_OUT_SEED = 2**32


@dataclass(frozen=True, slots=True)
class Streams:
    """The sequences to train on, and how to get the held-out ones, which are the same for every arm and seed."""

    train: PackedStream
    evaluation: PackedStream

    @staticmethod
    def of(source: Source, length: int, data: DataConfig, loop: LoopConfig, ends: frozenset[int]) -> Streams:
        share = data.held_out
        return Streams(
            PackedStream(source, length, loop.seed, lambda row_id: not is_held_out(row_id, share), ends),
            PackedStream(source, length, _HELD_OUT_SEED, lambda row_id: is_held_out(row_id, share), ends),
        )

    def held_out(self, count: int) -> Sequences:
        return self.evaluation.take(count)


def source_of(config: TrainConfig, loaded: LoadedModel, adapt: AdaptConfig) -> Source:
    """What arms over the base `loaded` learn from. Raises ConfigError where it does not belong to this base."""
    data = config.data
    if data.exact is not None:
        teacher = make_teacher(data.exact)
        if teacher.vocabulary != loaded.model.config.vocab_size:
            raise ConfigError(
                f"data.exact.vocabulary must be the base's ({loaded.model.config.vocab_size}), got {teacher.vocabulary}"
            )
        return ExactSource(teacher, config.window.sequence_length, adapt.sampling(), data.exact.seed)
    if data.input is not None:
        end = min(loaded.eos_token_ids, default=None)
        size = loaded.model.config.vocab_size
        return InputSource(data.input, data.ids_column, loaded.tokenizer, end, size)
    jobs = check_outputs(data.outputs)
    if jobs[0].revision == loaded.revision:
        return OutputSource(jobs, loaded.tokenizer, loaded.max_context)
    if data.teacher == "base":
        raise ConfigError(
            f"base.model must be the model that made data.outputs (revision {jobs[0].revision}) unless data.teacher is "
            f"any, got {loaded.name!r} of revision {loaded.revision}"
        )
    return OutputSource(jobs, _tokenizer_of_teacher(jobs[0], loaded), loaded.max_context)


def pretraining_data(config: TrainConfig, wanted: PretrainConfig) -> tuple[PreTrainedTokenizerBase, Source]:
    """The tokenizer of a new base, and what it learns from."""
    if wanted.input is not None:
        tokenizer = train_tokenizer(wanted.input, wanted.vocabulary)
        return tokenizer, InputSource(wanted.input, None, tokenizer, tokenizer.eos_token_id, len(tokenizer))
    if config.data.outputs:  # a draft model: it learns what it is to guess, in the ids of the model that wrote it
        jobs = check_outputs(config.data.outputs)
        tokenizer = _tokenizer_of_outputs(jobs[0])
        return tokenizer, OutputSource(jobs, tokenizer, wanted.shape.context)
    exact = config.data.exact
    if exact is None:
        raise ConfigError("base.pretrain.input must be given where data is another model's input")
    teacher = make_teacher(exact)
    params = (config.adapt or AdaptConfig()).sampling()
    return number_tokenizer(teacher.vocabulary), ExactSource(teacher, wanted.sequence_length, params, exact.seed)


def _tokenizer_of_teacher(job: OutputJob, loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of outputs, whose ids must mean to `loaded` what they mean to the teacher."""
    tokenizer = _tokenizer_of_outputs(job)
    if tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise ConfigError(
            f"base.model must have the vocabulary of the model that made data.outputs ({job.config.model.id!r}), got "
            f"{loaded.name!r} with another"
        )
    return tokenizer


def _tokenizer_of_outputs(job: OutputJob) -> PreTrainedTokenizerBase:
    """Prompts are tokenized as the model that wrote the outputs read them: stored edges hold after those very ids."""
    teacher: ModelConfig = job.config.model
    if revision_of(locate(teacher, weights=True)) != job.revision:
        raise ConfigError(
            f"data.outputs must be made by a model that is still what it was (revision {job.revision}), got a changed "
            f"{teacher.id!r}"
        )
    return load_tokenizer(teacher)
