"""The cost model: its form, its correction by measured steps, and a calibration of a real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import ModelConfig
from workers.cost_model import ROWS, Calibration, CostModel, calibrate
from workers.model_loading import load_model
from workers.model_runner import ModelRunner

EXAMPLE = Calibration((1, 8, 16), (0.010, 0.012, 0.020), per_column=1e-6, per_unsampled=1e-4)


def test_worked_example_lies_on_the_line_between_two_entries() -> None:
    assert CostModel(EXAMPLE).seconds(12, 12, 0) == pytest.approx(0.016)


def test_rows_up_to_the_next_captured_shape_are_free() -> None:
    cost = CostModel(EXAMPLE, stepwise=True)
    assert cost.seconds(2, 2, 0) == cost.seconds(8, 8, 0) == pytest.approx(0.012)
    assert cost.seconds(9, 9, 0) == pytest.approx(0.020)


def test_beyond_the_last_entry_the_last_slope_goes_on() -> None:
    assert CostModel(EXAMPLE).seconds(24, 24, 0) == pytest.approx(0.028)


def test_columns_cost_and_rows_without_logits_save() -> None:
    cost = CostModel(EXAMPLE)
    assert cost.seconds(8, 8, 1000) == pytest.approx(0.013)
    assert cost.seconds(8, 3, 0) == pytest.approx(0.0115)
    assert cost.curve(8, range(3), 8, 100, 50) == pytest.approx([0.0121, 0.01315, 0.0142])


def test_the_price_of_a_row_changes_at_the_bends_only() -> None:
    cost = CostModel(EXAMPLE)
    assert cost.bends(4, 20) == [4, 12]
    assert cost.bends(8, 8) == []
    price = np.diff(cost.curve(4, range(21), 4, 0, 0.0))
    assert (np.flatnonzero(np.abs(np.diff(price)) > 1e-9) + 1).tolist() == [4]  # beyond 16 the last slope goes on


seconds = st.floats(1e-4, 1.0)


@given(
    st.lists(seconds, min_size=2, max_size=len(ROWS)), st.lists(st.tuples(st.integers(1, 600), seconds), max_size=30)
)
def test_more_rows_never_cost_less_whatever_was_measured(table: list[float], steps: list[tuple[int, float]]) -> None:
    cost = CostModel(Calibration(ROWS[: len(table)], tuple(table), 0.0, 0.0))
    for rows, took in steps:
        cost.observe(rows, rows, 0, took)
    assert (np.diff(cost.curve(1, range(601), 1, 0, 0.0)) >= -1e-12).all()


@pytest.mark.parametrize("rows", [1, 8, 12])
def test_steps_pull_the_prediction_to_what_they_took(rows: int) -> None:
    cost = CostModel(EXAMPLE)
    for _ in range(200):
        cost.observe(rows, rows, 0, 0.030)
    assert cost.seconds(rows, rows, 0) == pytest.approx(0.030, rel=0.02)


def test_one_pause_moves_it_little() -> None:
    cost = CostModel(EXAMPLE)
    cost.observe(8, 8, 0, 5.0)
    assert cost.seconds(8, 8, 0) < 0.012 * 1.1


def test_calibration_of_a_model_covers_the_rows_and_is_done_once(tiny_model_dir: Callable[[str], Path]) -> None:
    runner = ModelRunner(load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float32")).model)
    calibration = calibrate(runner, 40)
    assert calibration.rows[0] == 1
    assert calibration.rows[-1] == 32
    assert all(0 < s < 1 for s in calibration.seconds)
    assert calibration.per_column >= 0 <= calibration.per_unsampled
    assert calibrate(runner, 40) is calibration
