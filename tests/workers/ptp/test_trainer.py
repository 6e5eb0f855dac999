"""The loop on a task that is small enough to do by hand: a linear map trained on numbers of its sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.adapter_config import AdaptConfig
from pipeline.errors import ConfigError
from pipeline.train_config import ExactTeacherConfig, LoopConfig
from workers.ptp.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from workers.ptp.exact_source import ExactSource
from workers.ptp.exact_teachers import make_teacher
from workers.ptp.schedule import learning_rate
from workers.ptp.sequences import PackedStream, Sequences
from workers.ptp.trainer import Hooks, TrainProgress, sequence_seed, train

CPU = torch.device("cpu")


class Regression:
    """Predicts a random number of each sequence from its tokens; sequences count as often as token 0 is in them."""

    device = CPU

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8)[None].clone())
        self.bias = nn.Parameter(torch.zeros(1))
        self.losses = list(losses)

    def parameters(self) -> Sequence[nn.Parameter]:
        return [self.weight, self.bias]

    def loss(self, batch: Sequences, seeds: Sequence[int]) -> tuple[Tensor, int]:
        target = torch.stack([torch.rand((), generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        found = (batch.tokens.ids_BS.float() @ self.weight.T)[:, 0] + self.bias
        terms = (batch.tokens.ids_BS == 0).sum(-1)
        return (terms * (found - target).square()).sum(), int(terms.sum())

    def evaluate(self) -> Mapping[str, float]:
        return {"loss": self.losses.pop(0) if self.losses else float(self.weight.detach().square().sum())}


def stream() -> PackedStream:
    teacher = make_teacher(ExactTeacherConfig(vocabulary=4, concentration=10.0))
    return PackedStream(ExactSource(teacher, 8, AdaptConfig().sampling(), 0), 8, 0, lambda row: True)


def config_of(**changes: object) -> LoopConfig:
    plain = {"steps": 12, "batch_size": 4, "lr": 0.05, "warmup_steps": 3, "eval_every": 5, "checkpoint_every": 4}
    return LoopConfig.model_validate({**plain, **changes})


def trained(config: LoopConfig, hooks: Hooks | None = None, resume: Checkpoint | None = None) -> list[Tensor]:
    task = Regression()
    train(task, stream(), config, hooks, resume)
    return [x.detach().clone() for x in task.parameters()]


def test_one_step_is_adamw_on_the_mean_over_all_terms() -> None:
    """From the formula: in its first step AdamW moves every parameter by lr against its gradient's sign."""
    config = config_of(steps=1, warmup_steps=0, weight_decay=0.1, clip=1e9)
    task = Regression()
    before = [x.detach().clone() for x in task.parameters()]
    batch = stream().take(4)
    loss, count = task.loss(batch, [sequence_seed(0, j) for j in range(4)])
    (loss / count).backward()
    gradients = [x.grad for x in task.parameters()]
    after = trained(config)
    for name, old, gradient, new in zip(("weight", "bias"), before, gradients, after, strict=True):
        assert gradient is not None
        decayed = old * (1 - 0.05 * 0.1) if name == "weight" else old
        torch.testing.assert_close(new, decayed - 0.05 * gradient / (gradient.abs() + 1e-8))


def test_accumulation_changes_rounding_only() -> None:
    for one, other in zip(trained(config_of()), trained(config_of(accumulation=4)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stopped_at", [4, 8])
def test_resume_is_exact(tmp_path: Path, stopped_at: int) -> None:
    saved: dict[int, str] = {}

    def save(checkpoint: Checkpoint) -> None:
        saved[checkpoint.step] = str(tmp_path / f"{checkpoint.step}.pt")
        save_checkpoint(saved[checkpoint.step], checkpoint, "this training")

    undisturbed = trained(config_of(patience=100), Hooks(on_checkpoint=save))
    assert sorted(saved) == [4, 8]
    resume = load_checkpoint(saved[stopped_at], "this training", CPU)
    assert resume is not None
    assert resume.step == stopped_at
    resumed = trained(config_of(patience=100), resume=resume)
    assert all(torch.equal(one, other) for one, other in zip(undisturbed, resumed, strict=True))
    with pytest.raises(ConfigError, match="--output must be empty or hold the same training"):
        load_checkpoint(saved[stopped_at], "another one", CPU)
    assert load_checkpoint(str(tmp_path / "none.pt"), "this training", CPU) is None


def test_early_stop_gives_the_best_parameters() -> None:
    at_four: list[Tensor] = []

    def keep(checkpoint: Checkpoint) -> None:
        if checkpoint.step == 4:
            at_four.extend(x.clone() for x in checkpoint.parameters)

    task = Regression(losses=[5.0, 3.0, 4.0, 3.5, 2.0])
    result = train(task, stream(), config_of(steps=100, eval_every=2, patience=2), Hooks(on_checkpoint=keep))
    assert result.steps == 8  # the evaluations at 6 and 8 were no better than that at 4
    assert result.metrics["loss"] == 2.0  # evaluated once more, after the best came back
    assert all(torch.equal(one, other) for one, other in zip(task.parameters(), at_four, strict=True))


def test_time_ends_a_training() -> None:
    progress: list[TrainProgress] = []
    result = train(Regression(), stream(), config_of(steps=1000, max_seconds=1e-9), Hooks(on_progress=progress.append))
    assert result.steps == 2  # the step in which the time was found to be up is the last
    assert "loss" in result.metrics


def test_learning_rate() -> None:
    config = config_of(steps=12, lr=1.0, warmup_steps=4)
    assert [learning_rate(step, 0.0, config) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(8, 0.0, config) == pytest.approx(0.55)
    assert learning_rate(12, 0.0, config) == pytest.approx(0.1)
    assert learning_rate(8, 0.0, config_of(lr=1.0, schedule="constant")) == 1.0
    assert learning_rate(4, 5.0, config_of(lr=1.0, warmup_steps=0, max_seconds=10.0)) == pytest.approx(0.55)
