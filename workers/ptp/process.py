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
from pipeline.train_config import Arm, TrainConfig, parse_train
from workers.ptp.arms import BASE, Place, train_arm, train_base
from workers.ptp.trainer import TrainProgress

PROGRESS_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Status:
    """How far a command is: training `name`, number `number` (from 0) of `count`."""

    name: str
    number: int
    count: int
    progress: TrainProgress


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
    config, output = parse_train(values["config"]), values["output"]
    arms = [Arm(name, parse_train(data)) for name, data in values["arms"]]
    place = Place(output, _device(config), _rank())
    names = [*([BASE] if values["with_base"] else []), *(arm.name for arm in arms)]
    reporters = [_Reporter(output, name, number, len(names)) for number, name in enumerate(names)]
    if values["with_base"]:
        train_base(config, place, reporters.pop(0).show)
        _wait_for_all()
    for arm, reporter in zip(arms, reporters, strict=True):
        train_arm(arm, place, reporter.show)
        _wait_for_all()


def read_status(output: str) -> Status | None:
    """The latest status that process 0 wrote."""
    try:
        fields = json.loads(storage.read_bytes(_status_path(output)))
    except FileNotFoundError:
        return None
    return Status(**{**fields, "progress": TrainProgress(**fields["progress"])})


def clear_status(output: str) -> None:
    """Forget what an earlier command wrote."""
    storage.delete(_status_path(output))


class _Reporter:
    """Writes the status now and then, the last one of a training always."""

    def __init__(self, output: str, name: str, number: int, count: int) -> None:
        self._output, self._name, self._number, self._count = output, name, number, count
        self._next_at = 0.0

    def show(self, progress: TrainProgress) -> None:
        if time.monotonic() < self._next_at and progress.step < progress.steps:
            return
        status = Status(self._name, self._number, self._count, progress)
        storage.write_bytes(_status_path(self._output), json.dumps(asdict(status)).encode())
        self._next_at = time.monotonic() + PROGRESS_PERIOD_S


def _status_path(output: str) -> str:
    return storage.join(output, "_status.json")


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
