"""Training an adapter: the loss of windows of slots over packed sequences, and what drafts are worth on held-out ones.

Where the noise of a window comes from is the objective: the teacher's intervals of the tokens (distillation), or the
student's own (`inverse`). A window ends before the first token that the teacher's distribution does not hold: no noise
picks it, so nothing after it is determined.

Shape legend: B sequences, S columns, W windows of a sequence, L slots, N slots that count, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pipeline.adapter_config import AdaptConfig
from pipeline.train_config import TrainingConfig, WindowConfig
from workers.ptp import losses
from workers.ptp.adapter import Adapter
from workers.ptp.edges import noise_between, places, token_edges
from workers.ptp.evaluation import draft_tokens, shuffled
from workers.ptp.held_out import HeldOut, summary, surprise_of
from workers.ptp.inverse import own_noise
from workers.ptp.proposals import ended, student_tokens
from workers.ptp.sequences import Sequences
from workers.ptp.student import Captured, capture, continuation_logits, slot_logits
from workers.ptp.trainer import sequence_seed
from workers.ptp.windows import Windows, choose_starts, make_windows

_EVALUATION = 2**40
"""The seed of windows and noise of every evaluation."""


@dataclass(frozen=True, slots=True)
class Example:
    """Windows over captured sequences, with the token and the noise of every slot.

    `slot_N` are flat indices of [B, W, L] of the slots that count, `teacher_NV` the base's logits there (None: nobody
    needs them). Edges and noise of slots that do not count mean nothing.
    """

    captured: Captured
    windows: Windows
    token_BWL: Tensor
    low_BWL: Tensor
    high_BWL: Tensor
    u_BWL: Tensor
    slot_N: Tensor
    teacher_NV: Tensor | None


class AdapterTask:
    """One adapter and how it is trained (see `trainer.Task`)."""

    def __init__(
        self,
        adapter: Adapter,
        windows: WindowConfig,
        training: TrainingConfig,
        held_out: Sequences,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`held_out` is evaluated on. `end_token_ids` end windows of the student's own tokens."""
        self.adapter = adapter
        self.device = adapter.gated.tree.device
        self._window, self._training = windows, training
        self._adapt: AdaptConfig = adapter.config.adapt
        self._held_out = held_out
        self._ends = torch.tensor(sorted(end_token_ids), dtype=torch.int64, device=self.device)

    def parameters(self) -> Sequence[nn.Parameter]:
        return self.adapter.trainable_parameters()

    def loss(self, batch: Sequences, seeds: Sequence[int]) -> tuple[Tensor, int]:
        training = self._training
        windows, z_BWL, free_BWL = self._windows(batch, seeds, training.beta)
        with_teacher = "kl" in training.loss
        if training.objective == "inverse":
            example = self._own(batch, windows, z_BWL)
        elif training.proposals == "student":
            example = self._proposed(batch, windows, z_BWL, free_BWL)
        else:
            example = self._given(batch, windows, z_BWL, with_teacher=with_teacher)
        if not len(example.slot_N):
            return torch.zeros((), device=self.device), 0
        logits_NV = self._logits(example, example.u_BWL)
        if training.slots == "reached":
            reached_N = self._reached(example, logits_NV.detach())
            example, logits_NV = _narrowed(example, reached_N), logits_NV[reached_N]
        return self._loss_of(example, logits_NV), len(example.slot_N)

    def evaluate(self) -> Mapping[str, float]:
        """`loss`, `correct`, `accepted`, `correct_shuffled`, `slot_<l>`, `teacher_perplexity`, `reference_perplexity`
        (of the base) and, for head "c", `perplexity`.
        """
        size = max(1, self._training.batch_size // self._training.accumulation)
        parts = [
            self._evaluated(self._held_out.rows(start, start + size).to(self.device), start)
            for start in range(0, len(self._held_out), size)
        ]
        return summary(parts, self.adapter.config.head)

    def _windows(self, batch: Sequences, seeds: Sequence[int], beta: float) -> tuple[Windows, Tensor, Tensor]:
        """Windows of a batch; for every slot the place of its noise in its interval, and a free uniform number."""
        shape = (self._window.windows_per_sequence, self._window.slots)
        starts, z, free = [], [], []
        for b, seed in enumerate(seeds):
            generator = torch.Generator().manual_seed(seed)
            starts.append(choose_starts(batch.rows(b, b + 1).tokens, shape[0], generator))
            z.append(places(shape, beta, generator))
            free.append(places(shape, 1.0, generator))
        start_BW = torch.cat(starts)
        z_BWL, free_BWL = (torch.stack(x)[:, : start_BW.shape[1]].to(self.device) for x in (z, free))
        return make_windows(batch.tokens, start_BW, shape[1]), z_BWL, free_BWL

    def _given(self, batch: Sequences, windows: Windows, z_BWL: Tensor, *, with_teacher: bool) -> Example:
        """The windows hold the tokens of the data, the noise is the teacher's."""
        slot_N = windows.counts_BWL.flatten().nonzero()[:, 0]
        needs_teacher = with_teacher or batch.low_BS is None
        row_N = _context_rows(windows, slot_N, batch) if needs_teacher else None
        captured = capture(self.adapter.gated, batch.tokens, row_N)
        token_BWL = windows.of(batch.tokens.ids_BS)
        if batch.low_BS is not None and batch.high_BS is not None:
            edges = (windows.of(batch.low_BS), windows.of(batch.high_BS))
        else:
            edges = self._edges(captured.logits_NV, token_BWL, slot_N)
        teacher_NV = captured.logits_NV if needs_teacher else None
        return self._example(captured, windows, token_BWL, edges, z_BWL, slot_N, teacher_NV)

    def _proposed(self, batch: Sequences, windows: Windows, z_BWL: Tensor, free_BWL: Tensor) -> Example:
        """The windows hold drafts of the student for free noise; then the teacher tells the intervals of these tokens,
        and noise is drawn from them.
        """
        captured = capture(self.adapter.gated, batch.tokens)
        token_BWL = student_tokens(self.adapter, windows, captured, free_BWL)
        windows = ended(windows, token_BWL, self._ends)
        slot_N = windows.counts_BWL.flatten().nonzero()[:, 0]
        teacher_NV = continuation_logits(self.adapter.gated, token_BWL, windows, captured)[slot_N]
        edges = self._edges(teacher_NV, token_BWL, slot_N)
        return self._example(captured, windows, token_BWL, edges, z_BWL, slot_N, teacher_NV)

    def _own(self, batch: Sequences, windows: Windows, z_BWL: Tensor) -> Example:
        """The windows hold the tokens of the data, the noise is the student's own (`inverse`)."""
        captured = capture(self.adapter.gated, batch.tokens)
        token_BWL = windows.of(batch.tokens.ids_BS)
        u_BWL = own_noise(self.adapter, captured, windows, token_BWL, z_BWL)
        slot_N = windows.counts_BWL.flatten().nonzero()[:, 0]
        return Example(captured, windows, token_BWL, u_BWL, u_BWL, u_BWL, slot_N, None)

    def _example(
        self,
        captured: Captured,
        windows: Windows,
        token_BWL: Tensor,
        edges: tuple[Tensor, Tensor],
        z_BWL: Tensor,
        slot_N: Tensor,
        teacher_NV: Tensor | None,
    ) -> Example:
        """Ends windows before tokens without an interval, and draws the noise."""
        low_BWL, high_BWL = edges
        has_interval_BWL = (high_BWL > low_BWL).long().cumprod(-1).bool()
        windows = replace(windows, counts_BWL=windows.counts_BWL & has_interval_BWL)
        u_BWL = noise_between(low_BWL.nan_to_num(), high_BWL.nan_to_num(), z_BWL)
        example = Example(captured, windows, token_BWL, low_BWL, high_BWL, u_BWL, slot_N, teacher_NV)
        return _narrowed(example, windows.counts_BWL.flatten()[slot_N])

    def _edges(self, logits_NV: Tensor, token_BWL: Tensor, slot_N: Tensor) -> tuple[Tensor, Tensor]:
        low_N, high_N = token_edges(logits_NV, token_BWL.flatten()[slot_N], self._adapt.sampling())
        low_T = torch.zeros(token_BWL.numel(), dtype=torch.float64, device=self.device)
        high_T = torch.zeros_like(low_T)
        low_T[slot_N], high_T[slot_N] = low_N, high_N
        return low_T.view_as(token_BWL), high_T.view_as(token_BWL)

    def _logits(self, example: Example, u_BWL: Tensor) -> Tensor:
        """The student's logits `[N, V]` of the slots that count."""
        context_BW = example.windows.before(example.captured.tokens.ids_BS)
        inputs_BWLE = self.adapter.slot_inputs(u_BWL, context_BW)
        return slot_logits(self.adapter, inputs_BWLE, example.windows, example.captured, example.slot_N)

    def _loss_of(self, example: Example, logits_NV: Tensor) -> Tensor:
        """The sum over slots."""
        total = logits_NV.new_zeros((), dtype=torch.float32)
        count = len(logits_NV)
        if not count:
            return total
        if "ce" in self._training.loss:
            token_N = example.token_BWL.flatten()[example.slot_N]
            total = total + count * losses.cross_entropy(logits_NV, token_N, self._temperature())
        if "kl" in self._training.loss:
            assert example.teacher_NV is not None
            total = total + count * losses.distillation(logits_NV, example.teacher_NV)
        return total

    def _temperature(self) -> float:
        return self._adapt.temperature if self.adapter.config.head == "c" else 1.0

    def _evaluated(self, batch: Sequences, first: int) -> HeldOut:
        """Drafts are always scored on the data with the teacher's noise; the loss and the perplexity of an inverse
        training on its own noise, in which its tokens are coded.
        """
        seeds = [sequence_seed(_EVALUATION, first + j) for j in range(len(batch))]
        windows, z_BWL, _ = self._windows(batch, seeds, beta=1.0)
        example = self._given(batch, windows, z_BWL, with_teacher=True)
        assert example.teacher_NV is not None
        logits_NV = self._logits(example, example.u_BWL)
        own_NV = logits_NV
        if self._training.objective == "inverse":
            own = own_noise(self.adapter, example.captured, example.windows, example.token_BWL, z_BWL)
            own_NV = self._logits(example, own)
        shuffled_BWL = _shuffled(example, torch.Generator().manual_seed(first))
        token_N, temperature = example.token_BWL.flatten()[example.slot_N], self._adapt.temperature
        width_N = (example.high_BWL - example.low_BWL).flatten()[example.slot_N]
        return HeldOut(
            token_N=token_N,
            loss=self._loss_of(example, own_NV).item(),
            draft_NL=self._drafts(example, logits_NV, example.u_BWL),
            shuffled_NL=self._drafts(example, self._logits(example, shuffled_BWL), shuffled_BWL),
            token_NL=example.token_BWL.flatten(0, 1),
            counts_NL=example.windows.counts_BWL.flatten(0, 1),
            surprise=surprise_of(own_NV, token_N, temperature),
            base_surprise=surprise_of(example.teacher_NV, token_N, temperature),
            teacher_surprise=-width_N.log().sum().item(),
        )

    def _reached(self, example: Example, logits_NV: Tensor) -> Tensor:
        """`[N]`: whether the drafts of all slots before are the window's tokens.

        Worked example, drafts right, wrong, right, right: slots 0 and 1 are reached.
        """
        is_right_WL = self._drafts(example, logits_NV, example.u_BWL) == example.token_BWL.flatten(0, 1)
        reached_WL = torch.ones_like(is_right_WL)
        reached_WL[:, 1:] = is_right_WL[:, :-1].long().cumprod(-1).bool()
        return reached_WL.flatten()[example.slot_N]

    def _drafts(self, example: Example, logits_NV: Tensor, u_BWL: Tensor) -> Tensor:
        """Drafts `[B * W, L]`, -1 at slots that do not count."""
        draft_T = torch.full((u_BWL.numel(),), -1, dtype=torch.int64, device=self.device)
        u_N = u_BWL.flatten()[example.slot_N]
        draft_T[example.slot_N] = draft_tokens(logits_NV, u_N, self.adapter.config.head, self._adapt)
        return draft_T.view(-1, u_BWL.shape[-1])


def _narrowed(example: Example, keep_N: Tensor) -> Example:
    """The example with some of its slots."""
    teacher_NV = None if example.teacher_NV is None else example.teacher_NV[keep_N]
    return replace(example, slot_N=example.slot_N[keep_N], teacher_NV=teacher_NV)


def _shuffled(example: Example, generator: torch.Generator) -> Tensor:
    """The noise of each window given to another, among those that count."""
    u_NL = example.u_BWL.flatten(0, 1).clone()
    exists_N = example.windows.counts_BWL[..., 0].flatten()
    if exists_N.sum() > 1:
        u_NL[exists_N] = shuffled(u_NL[exists_N], generator)
    return u_NL.view_as(example.u_BWL)


def _context_rows(windows: Windows, slot_N: Tensor, batch: Sequences) -> Tensor:
    """Flat rows (sequence * S + column) whose logits are those of the slots' targets: one column before each."""
    B, S = batch.tokens.ids_BS.shape
    column_BWL = windows.start_BW[..., None] + torch.arange(windows.slots, device=slot_N.device) - 1
    row_BWL = column_BWL + S * torch.arange(B, device=slot_N.device)[:, None, None]
    return row_BWL.flatten()[slot_N]
