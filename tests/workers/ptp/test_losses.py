"""Losses against sums written out, and what they teach about temperature."""

from __future__ import annotations

import math

import pytest
import torch

from workers.ptp.losses import cross_entropy, distillation


def test_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    assert cross_entropy(logits, torch.tensor([1, 0])).item() == pytest.approx((-math.log(0.75) + math.log(2)) / 2)
    halved = cross_entropy(logits[:1], torch.tensor([1]), temperature=0.5).item()
    assert halved == pytest.approx(-math.log(9 / 10))
    assert cross_entropy(logits, torch.tensor([1, 0]), 0.0) == cross_entropy(logits, torch.tensor([1, 0]))


def test_distillation_by_hand() -> None:
    student, teacher = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.0, 0.0]])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert distillation(student, teacher).item() == pytest.approx(expected)
    assert distillation(teacher, teacher).item() == 0.0


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    distillation(student, teacher).backward()
    assert teacher.grad is None
    assert student.grad is not None
    assert student.grad.abs().sum() > 0


def test_low_precision_logits_are_widened() -> None:
    logits = (8 * torch.randn(4, 50)).bfloat16()
    assert cross_entropy(logits, torch.zeros(4, dtype=torch.int64)).dtype == torch.float32
    assert distillation(logits, logits).item() == 0.0


def test_data_of_another_temperature_teaches_the_logits_of_temperature_one() -> None:
    """The minimum over data drawn at T = .5 is at the teacher's own logits, not at twice them."""
    teacher = torch.tensor([1.0, 0.0, -1.0, 2.0])
    share = (teacher / 0.5).softmax(-1)
    student = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.LBFGS([student], line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses = [cross_entropy(student[None], torch.tensor([v]), temperature=0.5) for v in range(4)]
        loss = (share * torch.stack(losses)).sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    torch.testing.assert_close(student.detach().softmax(-1), teacher.softmax(-1), atol=1e-3, rtol=0.0)
