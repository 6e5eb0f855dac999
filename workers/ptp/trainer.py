"""The training loop: AdamW on batches of packed sequences, alone or data parallel, with exact resume.

What is trained, and on what loss, is a `Task`; the loop knows neither models nor windows. Nothing random depends on
how work is divided: batches come from a stream that all processes read alike, and sequence j of step n has a seed of
its own. So processes and accumulation change a gradient by rounding only, and a checkpoint needs no state of
generators.

A task gives a sum of losses and the number of terms. Gradients of all parts of a batch are added up, over processes
too, and divided by the number of all terms, so a sequence with few windows weighs what its windows weigh.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn

from pipeline.train_config import LoopConfig
from workers.ptp.checkpoints import Checkpoint
from workers.ptp.schedule import learning_rate
from workers.ptp.sequences import PackedStream, Sequences

Metrics = Mapping[str, float]


class Task(Protocol):
    """What is trained."""

    device: torch.device

    def parameters(self) -> Sequence[nn.Parameter]: ...

    def loss(self, batch: Sequences, seeds: Sequence[int]) -> tuple[Tensor, int]:
        """The sum of losses over the terms of some sequences, with a graph, and how many terms there are.

        `seeds` has one number for each sequence: the only source of randomness.
        """
        ...

    def evaluate(self) -> Metrics:
        """Figures on held-out data, the same each time for the same parameters; `loss` decides about early stop."""
        ...


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """How far a training is. `metrics` are those of the latest evaluation."""

    step: int
    steps: int
    seconds: float
    loss: float
    lr: float
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a loop calls out for, in process 0 alone."""

    on_progress: Callable[[TrainProgress], None] = lambda progress: None
    on_scalars: Callable[[int, Metrics], None] = lambda step, scalars: None
    on_checkpoint: Callable[[Checkpoint], None] = lambda checkpoint: None


@dataclass(frozen=True, slots=True)
class Trained:
    """The end of a training: steps made, seconds of training and evaluation, figures of the parameters as they are."""

    steps: int
    seconds: float
    metrics: Metrics


@dataclass(slots=True)
class _State:
    """Where the loop is, besides parameters, optimizer and stream."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float = float("inf")
    evaluations_without_better: int = 0
    best: list[Tensor] | None = None
    metrics: Metrics = field(default_factory=dict)


def train(
    task: Task, stream: PackedStream, config: LoopConfig, hooks: Hooks | None = None, resume: Checkpoint | None = None
) -> Trained:
    """Train to the end, from the beginning or from a checkpoint of the same task and configuration.

    Data parallel where `torch.distributed` is initialised: every process calls this with the same arguments.
    """
    loop = _Loop(task, stream, config, Hooks() if hooks is None else hooks)
    if resume is not None:
        loop.load(resume)
    return loop.run()


class _Loop:
    def __init__(self, task: Task, stream: PackedStream, config: LoopConfig, hooks: Hooks) -> None:
        self._task, self._stream, self._config, self._hooks = task, stream, config, hooks
        self._parameters = list(task.parameters())
        groups = [
            {"params": [x for x in self._parameters if x.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [x for x in self._parameters if x.dim() <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=(0.9, config.adam_beta2), fused=True
        )
        self._state = _State()
        is_parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._processes = torch.distributed.get_world_size() if is_parallel else 1
        self._rank = torch.distributed.get_rank() if is_parallel else 0
        assert config.batch_size % (self._processes * config.accumulation) == 0, "refused by TrainConfig"

    def run(self) -> Trained:
        state, config = self._state, self._config
        started = time.monotonic() - state.seconds
        ended = False
        while state.step < config.steps and not ended:
            lr = learning_rate(state.step, state.seconds, config)
            loss, out_of_time = self._step(lr)
            state.step += 1
            state.seconds = time.monotonic() - started
            is_last = state.step == config.steps or out_of_time
            if state.step % config.eval_every == 0 or is_last:
                ended = self._evaluate() or is_last
                state.seconds = time.monotonic() - started
            self._report(loss, lr)
            if state.step % config.checkpoint_every == 0 and not (ended or is_last) and self._rank == 0:
                self._hooks.on_checkpoint(self.checkpoint())
        self._take_best()
        return Trained(state.step, state.seconds, state.metrics)

    def _step(self, lr: float) -> tuple[float, bool]:
        """One optimizer step: the mean loss of the batch, and whether the time of process 0 is up."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        out_of_time = self._config.max_seconds is not None and self._state.seconds >= self._config.max_seconds
        totals = torch.tensor([0.0, 0.0, float(out_of_time and self._rank == 0)], dtype=torch.float64)
        for part, seeds in self._parts():
            with _autocast(self._task.device, self._config.dtype):
                loss, count = self._task.loss(part, seeds)
            if count:
                loss.backward()  # type: ignore[no-untyped-call]
                totals[0] += loss.item()
                totals[1] += count
        self._reduce(totals)
        loss_sum, count_sum, time_is_up = totals.tolist()
        gradients = [x.grad for x in self._parameters if x.grad is not None]
        if count_sum:
            torch._foreach_div_(gradients, count_sum)
            torch.nn.utils.clip_grad_norm_(self._parameters, self._config.clip, foreach=True)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss_sum / max(count_sum, 1.0), bool(time_is_up)

    def _parts(self) -> Iterator[tuple[Sequences, Sequence[int]]]:
        """This process's share of the next batch, in as many parts as there are forward passes."""
        config = self._config
        batch = self._stream.take(config.batch_size)
        share = config.batch_size // self._processes
        size = share // config.accumulation
        for start in range(self._rank * share, (self._rank + 1) * share, size):
            first = self._state.step * config.batch_size + start
            seeds = [sequence_seed(config.seed, first + j) for j in range(size)]
            yield batch.rows(start, start + size).to(self._task.device), seeds

    def _reduce(self, totals: Tensor) -> None:
        """Add up gradients (in one message) and totals over all processes."""
        if self._processes == 1:
            return
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in self._parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        at = 0
        for x in self._parameters:
            x.grad = flat[at : at + x.numel()].view_as(x)
            at += x.numel()
        on_device = totals.to(self._task.device)
        torch.distributed.all_reduce(on_device)
        totals.copy_(on_device)

    def _evaluate(self) -> bool:
        """Evaluate in process 0; whether it is time to stop early."""
        state = self._state
        stop = torch.zeros(1, device=self._task.device)
        if self._rank == 0:
            with torch.no_grad(), _autocast(self._task.device, self._config.dtype):
                state.metrics = dict(self._task.evaluate())
            self._hooks.on_scalars(state.step, {f"held_out/{name}": x for name, x in state.metrics.items()})
            if state.metrics["loss"] < state.best_loss:
                state.best_loss, state.evaluations_without_better = state.metrics["loss"], 0
                if self._config.patience:
                    state.best = [x.detach().clone() for x in self._parameters]
            else:
                state.evaluations_without_better += 1
            stop.fill_(0 < self._config.patience <= state.evaluations_without_better)
        if self._processes > 1:
            torch.distributed.broadcast(stop, 0)
        return bool(stop.item())

    def _take_best(self) -> None:
        """With early stop, the parameters of the best evaluation are the result, with their own figures."""
        state = self._state
        if self._rank == 0 and state.best is not None and state.metrics["loss"] > state.best_loss:
            with torch.no_grad():
                for parameter, best in zip(self._parameters, state.best, strict=True):
                    parameter.copy_(best)
                with _autocast(self._task.device, self._config.dtype):
                    state.metrics = dict(self._task.evaluate())

    def _report(self, loss: float, lr: float) -> None:
        state = self._state
        if self._rank == 0:
            self._hooks.on_scalars(state.step, {"train/loss": loss, "train/lr": lr})
            progress = TrainProgress(state.step, self._config.steps, state.seconds, loss, lr, state.metrics)
            self._hooks.on_progress(progress)

    def checkpoint(self) -> Checkpoint:
        state = self._state
        return Checkpoint(
            step=state.step,
            seconds=state.seconds,
            best_loss=state.best_loss,
            evaluations_without_better=state.evaluations_without_better,
            best=state.best,
            metrics=dict(state.metrics),
            parameters=[x.detach() for x in self._parameters],
            optimizer=self._optimizer.state_dict(),
            stream=self._stream.state(),
        )

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        self._state = _State(
            step=checkpoint.step,
            seconds=checkpoint.seconds,
            best_loss=checkpoint.best_loss,
            evaluations_without_better=checkpoint.evaluations_without_better,
            best=checkpoint.best,
            metrics=checkpoint.metrics,
        )
        for parameter, saved in zip(self._parameters, checkpoint.parameters, strict=True):
            parameter.copy_(saved)
        self._optimizer.load_state_dict(checkpoint.optimizer)
        self._stream.load_state(checkpoint.stream)


def sequence_seed(seed: int, number: int) -> int:
    """The seed of everything random about sequence `number` of a training."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 0x94D049BB) % 2**63


def _autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[Any]:
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
