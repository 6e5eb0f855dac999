"""A training in the middle, as one object of a store: written whole or not at all, so there is always a whole one."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline import storage
from pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a loop needs to go on as if it had never stopped; a view of its tensors, so save it at once.

    Parameters are in the order of the task's.
    """

    step: int
    seconds: float
    best_loss: float
    evaluations_without_better: int
    best: list[Tensor] | None
    metrics: dict[str, float]
    parameters: list[Tensor]
    optimizer: dict[str, Any]
    stream: dict[str, Any]


def save_checkpoint(path: str, checkpoint: Checkpoint, identity: str) -> None:
    """`identity` says which training it belongs to."""
    fields = {field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}
    buffer = io.BytesIO()
    torch.save({"identity": identity, **fields}, buffer)
    storage.write_bytes(path, buffer.getvalue())


def load_checkpoint(path: str, identity: str, device: torch.device) -> Checkpoint | None:
    """The checkpoint at a path, if any. Raises ConfigError where it belongs to another training."""
    try:
        data = storage.read_bytes(path)
    except FileNotFoundError:
        return None
    fields = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    if fields.pop("identity") != identity:
        raise ConfigError(f"--output must be empty or hold the same training, got a checkpoint of another in {path!r}")
    return Checkpoint(**fields)
