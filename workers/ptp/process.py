"""What the processes of a training run: plain values in, objects of a store out. Ray Train starts them (jobs/train.py).

All trainings of a command run one after another in the same processes, which take longer to start than a small one
takes to train.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed

from pipeline import storage
from pipeline.train_config import BASE, Arm, TrainConfig, parse_train
from workers.ptp.arms import Place, train_arm, train_base
from workers.ptp.trainer import TrainProgress

PROGRESS_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Status:
    """How far a training is: `name`, number `number` (from 0) of the `count` of a command. `ended`: it is the last."""

    name: str
    number: int
    count: int
    progress: TrainProgress
    ended: bool


def work(config: TrainConfig, output: str, arms: Sequence[Arm], *, with_base: bool) -> dict[str, Any]:
    """The argument of `run_work`: which trainings are to be done."""
    return {
        "config": config.model_dump(mode="json"),
        "output": output,
        "arms": [(arm.name, arm.config.model_dump(mode="json")) for arm in arms],
        "with_base": with_base,
    }


def run_work(values: Mapping[str, Any]) -> None:
    """Do it; one of several processes where torch.distributed is initialised."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_flush_denormal(True)  # they take many times longer, and say nothing
    config, output = parse_train(values["config"]), values["output"]
    arms = [Arm(name, parse_train(data)) for name, data in values["arms"]]
    place = Place(output, _device(config), _rank())
    names = [*([BASE] if values["with_base"] else []), *(arm.name for arm in arms)]
    reporters = [_Reporter(output, name, number, len(names)) for number, name in enumerate(names)]
    if values["with_base"]:
        reporter = reporters.pop(0)
        train_base(config, place, reporter.show)
        reporter.end()
        _wait_for_all()
    for arm, reporter in zip(arms, reporters, strict=True):
        train_arm(arm, place, reporter.show)
        reporter.end()
        _wait_for_all()


def read_status(output: str, number: int) -> Status | None:
    """The latest status that process 0 wrote of a training."""
    try:
        fields = json.loads(storage.read_bytes(_status_path(output, number)))
    except FileNotFoundError:
        return None
    return Status(**{**fields, "progress": TrainProgress(**fields["progress"])})


def clear_status(output: str, count: int) -> None:
    """Forget what an earlier command wrote of as many trainings."""
    for number in range(count):
        storage.delete(_status_path(output, number))


class _Reporter:
    """Writes the status of a training now and then, and the last one always."""

    def __init__(self, output: str, name: str, number: int, count: int) -> None:
        self._output, self._name, self._number, self._count = output, name, number, count
        self._next_at = 0.0
        self._latest: TrainProgress | None = None

    def show(self, progress: TrainProgress) -> None:
        self._latest = progress
        if time.monotonic() >= self._next_at:
            self._write(progress, ended=False)
            self._next_at = time.monotonic() + PROGRESS_PERIOD_S

    def end(self) -> None:
        if self._latest is not None:
            self._write(self._latest, ended=True)

    def _write(self, progress: TrainProgress, *, ended: bool) -> None:
        status = Status(self._name, self._number, self._count, progress, ended)
        storage.write_bytes(_status_path(self._output, self._number), json.dumps(asdict(status)).encode())


def _status_path(output: str, number: int) -> str:
    return storage.join(output, "_status", f"{number}.json")


def _wait_for_all() -> None:
    """No process may go on before process 0 has written what the next training reads."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def _rank() -> int:
    is_parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_parallel else 0


def _device(config: TrainConfig) -> torch.device:
    """The GPU that was set for this process, where the file asks for some."""
    if config.cluster.gpus_per_worker and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
