"""Random processes whose next-token probabilities are known exactly: teachers without a model.

Rows of transition and emission tables are drawn from a symmetric Dirichlet; small concentrations give sharp rows.

Shape legend: R sequences, S tokens of each, V vocabulary, C contexts, Z hidden states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from pipeline.config import SamplingConfig
from pipeline.train_config import ExactTeacherConfig
from workers.ptp.edges import GRID
from workers.sampling import adapt, pick_at


class _Process(ABC):
    """Tokens one after another; a state `[R, ..]` says all that the next ones depend on."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def start(self, rows: int) -> Tensor:
        """The state before the first token."""

    @abstractmethod
    def logp(self, state: Tensor) -> Tensor:
        """log P(next token) `[R, V]`, float64."""

    @abstractmethod
    def after(self, state: Tensor, token_R: Tensor) -> Tensor:
        """The state once these tokens were seen."""

    def sample(
        self, rows: int, length: int, params: SamplingConfig, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `exact_source.ExactTeacher.sample`."""
        u_RS = (torch.rand(rows, length, dtype=torch.float64, generator=generator) * GRID).floor() / GRID
        ids_RS = torch.empty(rows, length, dtype=torch.int64)
        low_RS, high_RS = torch.empty_like(u_RS), torch.empty_like(u_RS)
        state = self.start(rows)
        for s in range(length):
            for rows_R, adapted in adapt(self.logp(state), params):
                picks = pick_at(adapted, u_RS[rows_R, s])
                assert picks.low_R is not None
                assert picks.high_R is not None
                ids_RS[rows_R, s], low_RS[rows_R, s], high_RS[rows_R, s] = picks.token_R, picks.low_R, picks.high_R
            state = self.after(state, ids_RS[:, s])
        return ids_RS, low_RS, high_RS


class MarkovTeacher(_Process):
    """The next token depends on the last `order` tokens. The first ones follow a context of zeros."""

    def __init__(self, config: ExactTeacherConfig) -> None:
        super().__init__(config.vocabulary)
        self._contexts = config.vocabulary**config.order
        self._logp_CV = _dirichlet(config, self._contexts, config.vocabulary, 0).log()

    def start(self, rows: int) -> Tensor:
        return torch.zeros(rows, dtype=torch.int64)

    def logp(self, state: Tensor) -> Tensor:
        return self._logp_CV[state]

    def after(self, state: Tensor, token_R: Tensor) -> Tensor:
        following_R: Tensor = (state * self.vocabulary + token_R) % self._contexts
        return following_R


class HiddenMarkovTeacher(_Process):
    """A hidden chain emits the tokens; the state is P(hidden state | tokens so far) `[R, Z]`, before the next one."""

    def __init__(self, config: ExactTeacherConfig) -> None:
        super().__init__(config.vocabulary)
        self._moves_ZZ = _dirichlet(config, config.states, config.states, 1)
        self._emits_ZV = _dirichlet(config, config.states, config.vocabulary, 2)

    def start(self, rows: int) -> Tensor:
        states = len(self._moves_ZZ)
        return torch.full((rows, states), 1.0 / states, dtype=torch.float64)

    def logp(self, state: Tensor) -> Tensor:
        return (state @ self._emits_ZV).log()

    def after(self, state: Tensor, token_R: Tensor) -> Tensor:
        seen_RZ = state * self._emits_ZV.T[token_R]
        return (seen_RZ / seen_RZ.sum(-1, keepdim=True)) @ self._moves_ZZ


def make_teacher(config: ExactTeacherConfig) -> _Process:
    return MarkovTeacher(config) if config.kind == "markov" else HiddenMarkovTeacher(config)


def _dirichlet(config: ExactTeacherConfig, rows: int, columns: int, stream: int) -> Tensor:
    """Rows of probabilities, none of them 0."""
    random = np.random.Generator(np.random.Philox(key=[config.seed, stream]))
    probs = random.dirichlet(np.full(columns, config.concentration), rows).clip(min=1e-9)
    return torch.from_numpy(probs / probs.sum(-1, keepdims=True))
