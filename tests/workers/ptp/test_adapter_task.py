"""The loss and the figures of an adapter in training, against the definitions, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.adapter_config import AdaptConfig, AdapterConfig
from pipeline.config import ModelConfig
from pipeline.train_config import TrainingConfig, WindowConfig
from workers.model_loading import load_model
from workers.ptp.adapter import base_shape, new_adapter
from workers.ptp.adapter_task import AdapterTask, Example
from workers.ptp.edges import token_edges
from workers.ptp.evaluation import draft_tokens
from workers.ptp.sequences import Sequences
from workers.ptp.windows import PackedTokens

WINDOWS = WindowConfig(slots=4, windows_per_sequence=6, sequence_length=20)


def sequences(rows: int = 3) -> Sequences:
    """Two documents and some padding in each row; edges are not known."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(2, 320, (rows, 20), generator=generator)
    document = torch.tensor([[0] * 9 + [1] * 9 + [-1] * 2] * rows)
    sampled = (document >= 0) & (torch.arange(20) % 9 >= 2)
    tokens = PackedTokens(ids, document, sampled, sampled & (ids == 7))
    return Sequences(tokens, None, None)


@pytest.fixture
def make_task(tiny_model_dir: Callable[[str], Path]) -> Callable[..., AdapterTask]:
    def make(head: str = "o", adapt: AdaptConfig | None = None, **training: Any) -> AdapterTask:
        loaded = load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float32", device="cpu"))
        config = AdapterConfig(
            base=loaded.name,
            base_revision=loaded.revision,
            base_shape=base_shape(loaded.model),
            head=head,  # type: ignore[arg-type]
            slots=4,
            variant="full",
            adapt=adapt or AdaptConfig(temperature=2.0),
        )
        adapter = new_adapter(loaded.model, config, 0)
        return AdapterTask(adapter, WINDOWS, TrainingConfig.model_validate(training), sequences(2), frozenset({7}))

    return make


def example_of(task: AdapterTask, batch: Sequences) -> Example:
    windows, z, _ = task._windows(batch, list(range(len(batch))), 1.0)
    return task._given(batch, windows, z, with_teacher=True)


def test_the_noise_of_every_slot_picks_its_token_from_the_teacher(make_task: Callable[..., AdapterTask]) -> None:
    task = make_task()
    example = example_of(task, sequences())
    assert example.teacher_NV is not None
    assert len(example.slot_N) > 20
    tokens = example.token_BWL.flatten()[example.slot_N]
    u = example.u_BWL.flatten()[example.slot_N]
    low, high = token_edges(example.teacher_NV, tokens, AdaptConfig(temperature=2.0).sampling())
    wide = high - low > 2.0**-23
    assert wide.float().mean() > 0.5
    assert ((u >= low) & (u < high))[wide].all()
    assert torch.equal(draft_tokens(example.teacher_NV, u, "c", AdaptConfig(temperature=2.0))[wide], tokens[wide])


def test_edges_that_are_stored_give_the_same_loss_as_those_computed(make_task: Callable[..., AdapterTask]) -> None:
    task, batch = make_task(), sequences()
    low, high = torch.full((3, 20), torch.nan).double(), torch.full((3, 20), torch.nan).double()
    windows, z, _ = task._windows(batch, [0, 1, 2], 1.0)
    example = task._given(batch, windows, z, with_teacher=True)
    columns = (example.windows.start_BW[..., None] + torch.arange(4)).clamp(max=19)
    for b in range(3):
        counts = example.windows.counts_BWL[b]
        low[b, columns[b][counts]] = example.low_BWL[b][counts]
        high[b, columns[b][counts]] = example.high_BWL[b][counts]
    stored = Sequences(batch.tokens, low, high)
    one, count = task.loss(batch, [0, 1, 2])
    other, same_count = task.loss(stored, [0, 1, 2])
    assert count == same_count
    torch.testing.assert_close(one, other)


def test_a_token_that_was_cut_ends_its_window(make_task: Callable[..., AdapterTask]) -> None:
    """With top-k 3 of 320 nearly every random token is cut, yet the loss is a number and the rest is trained."""
    task = make_task(adapt=AdaptConfig(top_k=3))
    batch = sequences()
    example = example_of(task, batch)
    assert 0 <= len(example.slot_N) < 10
    kept = example.windows.counts_BWL
    assert torch.equal(kept, kept.long().cumprod(-1).bool())
    assert (example.high_BWL > example.low_BWL)[kept].all()
    assert torch.isfinite(example.u_BWL).all()
    loss, count = task.loss(batch, [0, 1, 2])
    assert count == len(example.slot_N)
    assert torch.isfinite(loss)


@pytest.mark.parametrize(("head", "loss"), [("o", "ce"), ("c", "ce"), ("c", "kl"), ("c", "ce+kl")])
def test_gradients_reach_the_adapter_alone(make_task: Callable[..., AdapterTask], head: str, loss: str) -> None:
    task = make_task(head, loss=loss)
    total, count = task.loss(sequences(), [0, 1, 2])
    assert count > 20
    total.backward()  # type: ignore[no-untyped-call]
    own = {id(x) for x in task.parameters()}
    for name, parameter in task.adapter.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in own), name


def test_accumulated_parts_are_the_whole(make_task: Callable[..., AdapterTask]) -> None:
    task, batch = make_task(), sequences()
    whole, count = task.loss(batch, [5, 6, 7])
    parts = [task.loss(batch.rows(b, b + 1), [5 + b]) for b in range(3)]
    assert sum(part[1] for part in parts) == count
    torch.testing.assert_close(sum(part[0] for part in parts), whole, rtol=1e-4, atol=1e-4)


def test_reached_slots_are_those_behind_right_drafts(make_task: Callable[..., AdapterTask]) -> None:
    task, batch = make_task("c"), sequences()
    example = example_of(task, batch)
    logits = task._logits(example, example.u_BWL).detach()
    drafts = task._drafts(example, logits, example.u_BWL)
    tokens, counts = example.token_BWL.flatten(0, 1), example.windows.counts_BWL.flatten(0, 1)
    expected = 0
    for draft, token, count in zip(drafts.tolist(), tokens.tolist(), counts.tolist(), strict=True):
        for slot in range(4):
            expected += count[slot] and draft[:slot] == token[:slot]
    _, reached = make_task("c", slots="reached").loss(batch, [0, 1, 2])
    assert reached == expected
    assert 0 < reached < len(example.slot_N)


def test_inverse_training_codes_the_data_in_the_students_own_noise(make_task: Callable[..., AdapterTask]) -> None:
    """Slot after slot, the student picks the data's tokens with the noise it was given, whatever the base says."""
    task = make_task("c", objective="inverse")
    batch = sequences()
    windows, z, _ = task._windows(batch, [0, 1, 2], 1.0)
    example = task._own(batch, windows, z)
    logits = task._logits(example, example.u_BWL).detach()
    tokens = example.token_BWL.flatten()[example.slot_N]
    low, high = token_edges(logits, tokens, AdaptConfig(temperature=2.0).sampling())
    u = example.u_BWL.flatten()[example.slot_N].double()
    wide = high - low > 1e-5  # the passes of different lengths round differently
    assert wide.float().mean() > 0.5
    assert ((u >= low - 1e-6) & (u < high + 1e-6))[wide].all()
    assert {"perplexity", "correct"} <= task.evaluate().keys()


def test_proposals_of_the_student_are_its_drafts_with_the_teachers_noise(make_task: Callable[..., AdapterTask]) -> None:
    task, batch = make_task(proposals="student"), sequences()
    windows, z, free = task._windows(batch, [0, 1, 2], 1.0)
    example = task._proposed(batch, windows, z, free)
    assert example.teacher_NV is not None
    tokens = example.token_BWL.flatten()[example.slot_N]
    data = windows.of(batch.tokens.ids_BS).flatten()[example.slot_N]
    assert not torch.equal(tokens, data)
    u = example.u_BWL.flatten()[example.slot_N]
    low, high = token_edges(example.teacher_NV, tokens, AdaptConfig(temperature=2.0).sampling())
    wide = high - low > 2.0**-23
    assert ((u >= low) & (u < high))[wide].all()
    # The first proposed token of a window is judged after its own context, as the data's first token is.
    given = task._given(batch, windows, z, with_teacher=True)
    assert given.teacher_NV is not None
    firsts = {int(s): row for s, row in zip(given.slot_N, given.teacher_NV, strict=True) if s % 4 == 0}
    for s, row in zip(example.slot_N.tolist(), example.teacher_NV, strict=True):
        if s in firsts:
            torch.testing.assert_close(row, firsts[s], rtol=1e-3, atol=1e-3)


def test_evaluation_is_the_same_each_time_and_counts_by_the_definitions(make_task: Callable[..., AdapterTask]) -> None:
    task = make_task("c", beta=4.0, proposals="student")
    figures = task.evaluate()
    assert figures == task.evaluate()
    assert figures["accepted"] <= figures["correct"] + 1
    assert figures["perplexity"] > 1.0
    # The base is the teacher here: what made the noise is the base at the data's temperature.
    assert figures["reference_perplexity"] == pytest.approx(figures["teacher_perplexity"], rel=1e-3)
