"""Rank 0 of a tensor-parallel replica does what an engine asks for; the other ranks do the same with their shards.

Engine, scheduler, drafters and sampling are on rank 0 alone. Before each forward it announces what happened to the
cache since the last one, as numbers, and the blocks. The others repeat that on keys and values of their own heads, run
the forward with it, since its reductions need all ranks, and drop the logits.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import ConfigError
from workers.blocks import Block
from workers.kv_cache import KVCache, Slab, Slot
from workers.kv_storage import Journal, KVStorage, Operation, Place
from workers.model_loading import LoadedModel
from workers.model_runner import ModelRunner
from workers.ptp.adapter import Adapter
from workers.replica_group import Leader

_END = "end"
"""In place of a method's name: the storage is not needed any more."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Rank 0 makes a runner, whose first forward learns the model's attention."""


@dataclass(frozen=True, slots=True)
class StepBlock:
    """A block by numbers alone (see `Block`)."""

    place: Place
    start: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    mask_RR: npt.NDArray[np.bool_] | None
    sampled: tuple[int, ...]

    @classmethod
    def of(cls, block: Block) -> StepBlock:
        assert block.inputs_RE is None, "adapters do not run in tensor-parallel replicas"
        return cls(block.slot.place, block.start, block.tokens, block.positions, block.mask_RR, block.sampled)

    def block(self, storage: KVStorage) -> Block:
        capacity, index = self.place
        slot = Slot(Slab(capacity, storage), index)
        return Block(slot, self.start, self.tokens, self.positions, self.mask_RR, self.sampled)


@dataclass(frozen=True, slots=True)
class Step:
    """Operations since the last step, then a forward of blocks whose slots are in the storage of this number."""

    operations: tuple[Operation, ...]
    storage: int
    blocks: tuple[StepBlock, ...]


class LeadingRunner(ModelRunner):
    """The runner of rank 0. Any failure within a forward ends the process, as the other ranks wait in its midst."""

    def __init__(self, model: PreTrainedModel, leader: Leader) -> None:
        self._leader = leader
        leader.announce(Probe())
        with self._together():
            super().__init__(model, plain=True)

    def new_cache(self, budget_bytes: int, max_slots: int, limit_bytes: int = 0) -> KVCache:
        number = next(_storage_numbers)
        note = self._leader.operations.append
        journal = Journal(number, note)
        cache = KVCache(self.kv_shape, budget_bytes, max_slots, limit_bytes, journal)
        weakref.finalize(cache.storage, note, (number, _END, ()))
        return cache

    @torch.inference_mode()
    def forward(self, blocks: list[Block]) -> Tensor:
        journal = blocks[0].slot.slab.storage.journal
        assert journal is not None
        operations = tuple(self._leader.operations)
        step = Step(operations, journal.number, tuple(map(StepBlock.of, blocks)))
        del self._leader.operations[: len(operations)]  # a storage may have ended meanwhile, in any thread
        self._leader.announce(step)
        with self._together():
            return super().forward(blocks)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise  # all ranks find the same
        except Exception as error:
            self._leader.end("a forward failed", error)


_storage_numbers = itertools.count()


def new_runner(
    loaded: LoadedModel, compile: Literal["auto", "off", "on"] = "auto", adapter: Adapter | None = None
) -> ModelRunner:
    """What runs the forwards of an engine."""
    if loaded.leader is None:
        return ModelRunner(loaded.model, compile, adapter)
    return LeadingRunner(loaded.model, loaded.leader)


def repeat(model: PreTrainedModel, announced: Iterable[Probe | Step]) -> None:
    """What the other ranks do, for as long as rank 0 announces something."""
    runner: ModelRunner | None = None
    storages: dict[int, KVStorage] = {}
    for message in announced:
        if isinstance(message, Probe):
            with contextlib.suppress(ConfigError):  # rank 0 tells
                runner = ModelRunner(model, plain=True)
            continue
        assert runner is not None
        for number, name, arguments in message.operations:
            if name == _END:
                storages.pop(number, None)
                continue
            if number not in storages:
                storages[number] = KVStorage(runner.kv_shape)
            getattr(storages[number], name)(*arguments)
        storage = storages[message.storage]
        runner.forward([block.block(storage) for block in message.blocks])
