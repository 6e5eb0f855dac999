"""Samples of an exact teacher (a random process with known probabilities) as documents, with exact edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.config import SamplingConfig
from workers.ptp.documents import Document, Wanted

_DOCUMENTS_PER_UNIT = 32


class ExactTeacher(Protocol):
    """Sequences whose next-token probabilities are known."""

    vocabulary: int

    def sample(
        self, rows: int, length: int, params: SamplingConfig, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`rows` sequences of tokens `[R, S]`, and the float64 edges `[R, S]` of the noise that picked each.

        The noise is on the engine's grid, and picks from the probabilities as `params` adapt them.
        """
        ...


class ExactSource:
    """An epoch is 2^16 units of 32 documents of `length` tokens. All but the first token of each are targets.

    Units are held out whole, since a unit is sampled at once.
    """

    has_edges = True
    splits_long = False
    units = 2**16

    def __init__(self, teacher: ExactTeacher, length: int, params: SamplingConfig, seed: int) -> None:
        self._teacher, self._length, self._params, self._seed = teacher, length, params, seed

    def read(self, unit: int, wanted: Wanted) -> Iterator[Document]:
        if not wanted(str(unit)):
            return
        generator = torch.Generator().manual_seed(self._seed * self.units + unit)
        sampled = self._teacher.sample(_DOCUMENTS_PER_UNIT, self._length, self._params, generator)
        ids_RS, low_RS, high_RS = (x.numpy() for x in sampled)
        is_target = np.arange(self._length) > 0
        for ids_S, low_S, high_S in zip(ids_RS, low_RS, high_RS, strict=True):
            yield Document(ids_S, is_target, low_S, high_S)
