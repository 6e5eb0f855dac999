"""From a training file to trained arms: one call trains one arm, or goes on with it, or finds it done.

================================  ==============================================================
object                            meaning
================================  ==============================================================
``base/``                         the base model, where the file has one trained first
``base.json``                     its figures
``<arm>/checkpoint.pt``           where an interrupted training goes on
``<arm>/adapter/`` or ``model/``  what was trained
``<arm>/result.json``             its figures; written last, so an arm with one is not trained again
``<arm>/tensorboard/``            scalars (local outputs only)
================================  ==============================================================
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipeline import storage
from pipeline.adapter_config import AdaptConfig, AdapterConfig
from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.redaction import without_credentials
from pipeline.train_config import BASE, Arm, DataConfig, LoopConfig, TrainConfig, parse_train
from workers.model_loading import LoadedModel, load_model
from workers.ptp.adapter import base_shape, new_adapter, start_from
from workers.ptp.adapter_task import AdapterTask
from workers.ptp.checkpoints import load_checkpoint, save_checkpoint
from workers.ptp.documents import check_outputs
from workers.ptp.next_token_task import NextTokenTask
from workers.ptp.pretraining import new_llama, save_model
from workers.ptp.sequences import PackedStream
from workers.ptp.trainer import Hooks, Task, Trained, TrainProgress, train
from workers.ptp.training_data import Streams, pretraining_data, source_of

_FIGURES = ("loss", "correct", "accepted", "perplexity", "reference_perplexity")
OnProgress = Callable[[TrainProgress], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a training writes, and which processor it uses. Process `rank` 0 alone writes."""

    output: str
    device: torch.device | None = None
    rank: int = 0

    def path(self, *names: str) -> str:
        return storage.join(self.output, *names)


def base_model(config: TrainConfig, output: str) -> ModelConfig:
    """The model that arms are built on; where it is trained first, its folder."""
    return config.base.model or ModelConfig(id=storage.join(output, BASE))


def needs_base(config: TrainConfig, output: str) -> bool:
    """Whether the base must be trained before the arms."""
    return config.base.pretrain is not None and not storage.exists(storage.join(output, BASE, "config.json"))


def train_base(config: TrainConfig, place: Place, on_progress: OnProgress = lambda progress: None) -> None:
    """Train the base that the file describes and write it to `base/`."""
    wanted = config.base.pretrain
    assert wanted is not None
    shape = wanted.shape
    tokenizer, source = pretraining_data(config, wanted)
    model = new_llama(shape, len(tokenizer), tokenizer.eos_token_id, wanted.training.seed).to(_device(place))
    streams = Streams.of(source, wanted.sequence_length, config.data, wanted.training, _ends(tokenizer.eos_token_id))
    task = NextTokenTask(model, streams.held_out(wanted.training.eval_sequences), wanted.training.batch_size)
    identity = json.dumps([wanted.model_dump(mode="json"), config.data.model_dump(mode="json")], sort_keys=True)
    trained = _run(task, streams.train, wanted.training, place, BASE, identity, on_progress)
    if place.rank == 0:
        save_model(place.path(BASE), model, tokenizer)
        _write_json(_base_result(place.output), _result(BASE, trained, wanted.training.seed))
        storage.delete(place.path(BASE, "checkpoint.pt"))


def train_arm(arm: Arm, place: Place, on_progress: OnProgress = lambda progress: None) -> dict[str, Any]:
    """Train one arm, or go on with it; its figures in the form of `sevenleague train --json`. Raises ConfigError."""
    identity = arm_identity(arm)
    done = finished(arm, place.output)
    if done is not None:
        return done
    config = arm.config
    loaded = load_model(base_model(config, place.output), place.device)
    adapt = adapt_of(config)
    source = source_of(config, loaded, adapt)
    ends = loaded.eos_token_ids
    streams = Streams.of(source, config.window.sequence_length, config.data, config.training, ends)
    held_out = streams.held_out(config.training.eval_sequences)
    if config.training.objective == "autoregressive":
        model = _new_like(loaded, config.training.seed)
        task: Task = NextTokenTask(model, held_out, config.training.batch_size)
        trained = _run(task, streams.train, config.training, place, arm.name, identity, on_progress)
        if place.rank == 0:
            save_model(place.path(arm.name, "model"), model, loaded.tokenizer)
    else:
        adapter = new_adapter(loaded.model, adapter_config(config, loaded, adapt), config.training.seed)
        before = 0 if config.adapter.start is None else start_from(adapter, config.adapter.start, loaded).steps
        task = AdapterTask(adapter, config.window, config.training, held_out, ends)
        trained = _run(task, streams.train, config.training, place, arm.name, identity, on_progress)
        if place.rank == 0:
            figures = {"steps": before + trained.steps, "metrics": trained.metrics}
            adapter.save(place.path(arm.name, "adapter"), adapter.config.model_copy(update=figures))
    result = _result(arm.name, trained, config.training.seed)
    if place.rank == 0:
        _write_json(place.path(arm.name, "result.json"), {"identity": identity, **result})
        storage.delete(place.path(arm.name, "checkpoint.pt"))
    return result


def base_figures(output: str) -> list[dict[str, Any]]:
    """The figures of the base in `output`; none where they were not written, as of a base that was put there."""
    try:
        return [json.loads(storage.read_bytes(_base_result(output)))]
    except FileNotFoundError:
        return []


def finished(arm: Arm, output: str) -> dict[str, Any] | None:
    """The figures of an arm that was trained before. Raises ConfigError where it was another training."""
    path = storage.join(output, arm.name, "result.json")
    try:
        stored: dict[str, Any] = json.loads(storage.read_bytes(path))
    except FileNotFoundError:
        return None
    if not _is_same(stored.pop("identity"), arm):
        raise ConfigError(f"--output must be empty or hold the same training, got another arm {arm.name!r} in {path!r}")
    return stored


def arm_identity(arm: Arm) -> str:
    """What decides the outcome of an arm but for rounding."""
    return json.dumps(arm.config.model_dump(mode="json", exclude={"cluster", "arms", "seeds"}), sort_keys=True)


def _is_same(identity: str, arm: Arm) -> bool:
    """Whether an identity is that of the arm; keys that came into the form after it was written mean their defaults."""
    try:
        written = Arm(arm.name, parse_train(json.loads(identity)))
    except ConfigError:
        return False
    return arm_identity(written) == arm_identity(arm)


def adapt_of(config: TrainConfig) -> AdaptConfig:
    """How the noise of the data picked its tokens. Raises ConfigError where the file says otherwise than the data."""
    if not config.data.outputs:
        return config.adapt or AdaptConfig()
    sampled = AdaptConfig.of(check_outputs(config.data.outputs)[0].config.sampling)
    if config.adapt is not None and config.adapt != sampled:
        raise ConfigError(
            f"adapt must be left out or as data.outputs were sampled ({_shown(sampled)}), got {_shown(config.adapt)}"
        )
    return sampled


def adapter_config(config: TrainConfig, loaded: LoadedModel, adapt: AdaptConfig) -> AdapterConfig:
    choice = config.adapter
    is_lora = choice.variant == "lora"
    return AdapterConfig(
        base=loaded.name,
        base_revision=loaded.revision,
        base_shape=base_shape(loaded.model),
        head=choice.head,
        embedding=choice.embedding,
        slots=config.window.slots,
        slot_zero=choice.slot_zero,
        variant=choice.variant,
        rank=choice.rank if is_lora else 0,
        scale=choice.scale if is_lora else 1.0,
        adapt=adapt,
        data=described(config.data),
        seed=config.training.seed,
    )


def described(data: DataConfig) -> str:
    """What an adapter says that it was trained on."""
    if data.exact is not None:
        return f"exact teacher: {data.exact.model_dump_json()}"
    paths = data.outputs if data.input is None else data.input.path
    return ", ".join(without_credentials(path) for path in paths)


def _run(
    task: Task,
    stream: PackedStream,
    config: LoopConfig,
    place: Place,
    name: str,
    identity: str,
    on_progress: OnProgress,
) -> Trained:
    """The loop with its checkpoints and scalars."""
    checkpoint_path = place.path(name, "checkpoint.pt")
    resume = load_checkpoint(checkpoint_path, identity, task.device)
    if place.rank != 0:
        return train(task, stream, config, resume=resume)
    hooks = Hooks(on_progress, on_checkpoint=lambda checkpoint: save_checkpoint(checkpoint_path, checkpoint, identity))
    if "://" in place.output:
        return train(task, stream, config, hooks, resume)
    from torch.utils.tensorboard import SummaryWriter

    step = 0 if resume is None else resume.step
    with SummaryWriter(place.path(name, "tensorboard"), purge_step=step) as writer:

        def on_scalars(step: int, scalars: Any) -> None:
            for key, value in scalars.items():
                writer.add_scalar(key, value, step)

        return train(task, stream, config, replace(hooks, on_scalars=on_scalars), resume)


def _result(name: str, trained: Trained, seed: int) -> dict[str, Any]:
    metrics = dict(trained.metrics)
    return {
        "name": name,
        **{figure: metrics.pop(figure, None) for figure in _FIGURES},
        "steps": trained.steps,
        "seconds": round(trained.seconds, 1),
        "seed": seed,
        **metrics,
    }


def _base_result(output: str) -> str:
    """Beside the folder, whose JSON files decide the base's revision."""
    return storage.join(output, "base.json")


def _new_like(loaded: LoadedModel, seed: int) -> Any:
    """A model of the base's architecture with new weights."""
    config = copy.deepcopy(loaded.model.config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model.to(loaded.model.device)


def _device(place: Place) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu") if place.device is None else place.device


def _ends(end_token_id: int | None) -> frozenset[int]:
    return frozenset() if end_token_id is None else frozenset({end_token_id})


def _shown(adapt: AdaptConfig) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in adapt.model_dump().items())


def _write_json(path: str, value: Any) -> None:
    storage.write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())
