"""The goodput controller: its choice against brute force, its limits, and what it learns from measured steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import ModelConfig
from pipeline.decoding_config import AutoConfig, SuffixConfig
from tests.workers.drafting import chain, drafts, load, proposals
from workers.adaptive_window import AdaptiveWindow
from workers.cost_model import Calibration, CostModel
from workers.drafters.base import Branch, Draft, ExtraRows, Proposal
from workers.latch import Latch
from workers.model_loading import load_model
from workers.model_runner import ModelRunner
from workers.window_policy import StepMeasure
from workers.windows import GoodputController, build_policy

FLAT_TO_8 = Calibration((1, 8, 16, 32), (0.010, 0.010, 0.020, 0.040), 0.0, 0.0)


def controller(calibration: Calibration = FLAT_TO_8, **config: int) -> GoodputController:
    return GoodputController(AutoConfig(**config), CostModel(calibration))


def goodput(bought: list[Draft], values: list[float], cost: CostModel) -> float:
    """Expected worth of the tokens of a step, over its seconds."""
    worth = sum(values) + sum(v * score for v, d in zip(values, bought, strict=True) for score in d.scores)
    rows = len(values) + sum(map(len, bought))
    return worth / cost.seconds(rows, rows, 0)


@given(
    st.lists(drafts(), min_size=1, max_size=4),
    st.lists(st.floats(1e-3, 1e-1), min_size=4, max_size=4),
    st.integers(0, 12),
)
def test_no_other_number_of_rows_has_more_expected_tokens_per_second(
    some: list[Draft], seconds: list[float], free: int
) -> None:
    cost = CostModel(Calibration((1, 4, 8, 32), tuple(sorted(seconds)), 0.0, 0.0))
    policy = GoodputController(AutoConfig(max_draft_rows=10), cost)
    values = [1.0 + i / 4 for i in range(len(some))]
    step = load(len(some), free, values=values)
    bought = [p.draft for p in policy.select(proposals(*some), step)]
    assert sum(map(len, bought)) <= min(free, 10)
    scores = sorted((v * s for v, d in zip(values, some, strict=True) for s in d.scores), reverse=True)
    for rows in range(min(len(scores), free, 10) + 1):
        total = len(some) + rows
        best = (sum(values) + sum(scores[:rows])) / cost.seconds(total, total, 0)
        assert goodput(bought, values, cost) >= best * (1 - 1e-9)


def test_rows_that_cost_nothing_are_filled_and_dear_ones_bought_only_for_likely_tokens() -> None:
    policy = controller()
    unlikely = proposals(chain((0.3,) * 12))
    assert len(policy.select(unlikely, load(1, 100))[0].draft) == 7  # up to 8 rows a step costs the same
    certain = proposals(chain((1.0,) * 12))
    assert len(policy.select(certain, load(1, 100))[0].draft) == 12


def test_a_full_batch_drafts_nothing_that_is_not_nearly_certain() -> None:
    policy = controller(Calibration((1, 64), (0.001, 0.080), 0.0, 0.0))  # a row costs more than the first did
    some = proposals(*[chain((0.9,))] * 8)
    assert all(not len(p.draft) for p in policy.select(some, load(8, 100)))
    assert policy.windows(load(8, 100)).rows == [0] * 8


def test_windows_ask_for_what_may_pay_and_name_the_score_below_which_nothing_does() -> None:
    policy = controller(max_window=8)
    assert policy.windows(load(8, 100)).rows == [0] * 8  # twice the rows take twice the time: it begins without drafts
    policy._latch = Latch(lambda sequences: True)
    idle, full = policy.windows(load(1, 100)), policy.windows(load(8, 100))
    assert idle.rows == [8]
    assert idle.min_score == 0.0
    assert full.min_score == pytest.approx(1.0, abs=0.01)  # 8 tokens in 10 ms; a row costs 1.25 ms
    assert controller().windows(load(1, 0)).rows == [0]
    assert controller(max_draft_rows=3).windows(load(1, 100)).rows == [3]
    assert controller().windows(load(0, 100)).rows == []


def test_scores_that_promise_too_much_are_worth_less() -> None:
    """At 8 rows a row must be accepted with a probability of 0.5; half of what 0.8 promises comes true."""
    policy = controller(Calibration((1, 8, 32), (0.008, 0.008, 0.020), 0.0, 0.0))
    step = load(8, 100)
    some = [chain((0.8,))] * 8
    assert [len(p.draft) for p in policy.select(proposals(*some), step)] == [1] * 8
    policy._latch = Latch(lambda sequences: True)
    before = policy.windows(step).min_score
    for i in range(1000):
        policy.observe(0, some[0], i % 5 < 2)
    assert policy.windows(step).min_score > 1.5 * before
    assert [len(p.draft) for p in policy.select(proposals(*some), step)] == [0] * 8
    for _ in range(1000):  # steps that buy nothing tell nothing: in the end they try again
        policy.measured(measured(step, 0.009, 8))
    policy._overhead_s[True] = 0.0
    assert [len(p.draft) for p in policy.select(proposals(*some), step)] == [1] * 8


def test_prompt_rows_do_not_make_rows_look_cheap() -> None:
    """8 tokens take 10 ms without the prompt and a row costs 1 ms, so 0.7 tokens do not pay for it. The quotient alone
    would buy it: 0.7 tokens in 1 ms are more than 8 tokens in 110 ms."""
    policy = controller(Calibration((1, 8, 208), (0.010, 0.010, 0.210), 0.0, 0.0))
    some = [chain((0.7,))] * 8
    assert [len(p.draft) for p in policy.select(proposals(*some), load(8, 100, base_rows=108))] == [0] * 8
    likely = [chain((0.9,))] * 8
    assert [len(p.draft) for p in policy.select(proposals(*likely), load(8, 100, base_rows=108))] == [1] * 8


def test_in_the_tail_the_longest_sequences_get_the_rows() -> None:
    policy = controller(max_draft_rows=3)
    some = proposals(chain((0.5, 0.4, 0.3)), chain((0.6, 0.5, 0.4)))
    even = policy.select(some, load(2, 100))
    tail = policy.select(some, load(2, 100, values=[1.8, 0.2]))
    assert [len(p.draft) for p in even] == [1, 2]
    assert [len(p.draft) for p in tail] == [3, 0]


def test_a_two_dimensional_window_is_bought_by_what_it_yields() -> None:
    extra = ExtraRows((1,) * 4, (1,) * 4, np.eye(4, dtype=np.bool_), (0, 1, 2, 3))
    for extra_yield, sequences, bought in ((0.1, 1, True), (0.1, 8, False), (6.0, 8, True)):
        some = [Proposal(extra=extra, extra_yield=extra_yield), *proposals(*([Draft()] * (sequences - 1)))]
        kept = controller().select(some, load(sequences, 100))
        assert (kept[0].extra is not None) == bought, (extra_yield, sequences)


def test_branches_are_bought_one_by_one_by_what_they_bring() -> None:
    """With 8 sequences a branch costs 2 ms, in which 1.6 tokens are made otherwise; with one its rows are free."""
    policy = controller(Calibration((1, 8, 208), (0.010, 0.010, 0.210), 0.0, 0.0))

    def branches(*gains: float) -> Proposal:
        chain_of_two = chain((0.9, 0.9))
        some = [Branch(depth, torch.zeros(2, 4), 1, gain) for depth, gain in enumerate(gains)]
        return Proposal(chain_of_two, branches=tuple(some))

    def bought(sequences: int, *gains: float) -> list[int]:
        some = [branches(*gains), *proposals(*([Draft()] * (sequences - 1)))]
        return [branch.depth for branch in policy.select(some, load(sequences, 100))[0].branches]

    assert bought(1, 0.01, 0.02) == [1, 0]
    assert bought(8, 0.5, 1.5) == []
    assert bought(8, 0.5, 2.1) == [1]
    assert bought(8, 2.2, 2.1) == [0, 1]


def test_a_branch_beyond_the_bought_chain_is_not_bought() -> None:
    policy = controller(max_draft_rows=3)
    two_rows = [Branch(depth, torch.zeros(2, 4), 1, 9.0) for depth in (0, 2)]
    (kept,) = policy.select([Proposal(chain((0.9, 0.0)), branches=tuple(two_rows))], load(1, 100))
    assert [branch.depth for branch in kept.branches] == [0]


def measured(step_load: object, total_s: float, emitted: int, draft_s: float = 0.0) -> StepMeasure:
    return StepMeasure(step_load, 0, 8, emitted, 0.010, draft_s, total_s)  # type: ignore[arg-type]


def test_drafts_that_lose_are_switched_off_while_the_drafter_goes_on_learning_now_and_then() -> None:
    """The cost model says that drafts are free; the clock says that steps with drafts take more than twice as long.
    Learning takes 0.44 ms, twenty times its share of a plain step of 11 ms."""
    policy = controller()
    step = load(4, 100)
    drafting, learning = [], []
    for _ in range(600):
        windows = policy.windows(step)
        drafting.append(any(windows.rows))
        learning.append(windows.learning)
        total_s, emitted = (0.026, 8) if drafting[-1] else (0.011, 4)
        policy.measured(measured(step, total_s, emitted, draft_s=0.00044 if learning[-1] else 0.0))
    assert all(drafting[:32])
    assert sum(drafting[200:]) <= 40
    resting = [learns for drafts, learns in zip(drafting[200:], learning[200:], strict=True) if not drafts]
    assert sum(resting) / len(resting) == pytest.approx(1 / 20, abs=0.01)


def test_steps_with_prompt_rows_say_nothing_about_drafts() -> None:
    policy = controller()
    step = load(4, 100, base_rows=200)
    for _ in range(300):
        assert policy.windows(load(4, 100)).rows != [0] * 4
        policy.measured(measured(step, 0.5, 4))


def test_auto_gets_the_controller_all_others_their_own_windows(tiny_model_dir: Callable[[str], Path]) -> None:
    runner = ModelRunner(load_model(ModelConfig(id=str(tiny_model_dir("llama")))).model)
    assert isinstance(build_policy(AutoConfig(), runner, 16), GoodputController)
    assert isinstance(build_policy(SuffixConfig(), runner, 16), AdaptiveWindow)
