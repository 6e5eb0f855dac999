"""What the figures of `make scale` rest on: the simulated engine's clock, its worker, and how notes become figures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from infra.scale import actors, planning
from infra.scale.actors import LONGEST
from infra.scale.simulated_engine import SimulatedEngine, StepTime
from infra.scale.simulated_worker import REVISION, Mark, SimulatedWorker, output_length, read_marks
from pipeline import storage
from pipeline.parts import read_part_rows
from pipeline.preparation import prepare
from pipeline.records import ShardTask

POINTS = ((1, 0.010), (3, 0.020))
TICK_S = 0.05
"""Seconds of a step, whatever its rows: long beside what a busy machine is late."""


def flat() -> StepTime:
    return StepTime(((1, TICK_S), (2, TICK_S)))


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.010), (2, 0.015), (3, 0.020), (5, 0.030)])
def test_step_time_is_linear_between_and_beyond_what_was_measured(rows: int, seconds: float) -> None:
    assert StepTime(POINTS).seconds(rows) == pytest.approx(seconds)
    assert StepTime(POINTS, scale=0.5).seconds(rows) == pytest.approx(seconds / 2)


def test_a_prompt_costs_its_rows() -> None:
    assert StepTime(POINTS).prefill(4) == pytest.approx(4 * 0.005)
    assert flat().prefill(4) == 0.0


def test_sequences_take_slots_in_turn_and_as_long_as_their_steps() -> None:
    engine = SimulatedEngine(flat(), slots=2)
    began = time.monotonic()
    first, second, third = (engine.submit(prompt_tokens=1, completion_tokens=length) for length in (2, 4, 3))
    third.result(timeout=10)
    took = time.monotonic() - began
    assert first.done()
    assert second.done()
    # The third waits for the first one's slot; the second may begin one step late, as the engine was under way.
    assert took >= 5 * TICK_S
    assert round(engine.busy_s / TICK_S) in (5, 6)  # whole steps, but for rounding of sums
    assert engine.tokens == 2 + 4 + 3
    assert engine.work_s == pytest.approx(engine.tokens * TICK_S / 2)


def test_the_engine_stands_still_without_work() -> None:
    engine = SimulatedEngine(flat(), slots=2)
    for _ in range(2):
        engine.submit(1, 1).result(timeout=10)
        time.sleep(TICK_S)
    assert engine.busy_s == pytest.approx(2 * TICK_S)


def test_a_cancelled_sequence_makes_room() -> None:
    engine = SimulatedEngine(flat(), slots=1)
    engine.submit(1, 2)
    endless = engine.submit(1, 10**9)
    last = engine.submit(1, 1)
    assert endless.cancel()
    last.result(timeout=10)
    assert engine.tokens == 2 + 1


def test_the_worker_reads_prompts_and_writes_parts_as_a_real_one_does(tmp_path: Path) -> None:
    prepared = prepare(actors.job_of(tmp_path, shards=2, workers=1))
    worker = SimulatedWorker(prepared.config, "worker-0", StepTime(scale=1e-4), str(tmp_path))
    assert worker.progress().state == "loading"
    assert worker.ready() == REVISION
    output = prepared.config.output.path
    for shard in prepared.plan.shards:
        task = ShardTask(shard, 1, "run", output, prepared.plan.passthrough)
        receipt = worker.generate(task)
        rows = list(read_part_rows(storage.join(output, receipt.path), ()))
        assert [row["completion_tokens"] for row in rows] == [output_length(row["id"], LONGEST) for row in rows]
        assert {row["prompt_tokens"] for row in rows} == {actors.PROMPT_WORDS}
        assert len(rows) == receipt.num_rows == actors.ROWS_PER_SHARD
    (marks,) = read_marks(tmp_path)
    assert [mark.begins for mark in marks] == [True, False, True, False]
    assert 0 < marks[1].work_s < marks[3].work_s <= marks[3].busy_s


def test_efficiency_of_notes() -> None:
    """Worked example: one worker is busy for all of 10 s, the other stands still for the last 2."""
    steady = [Mark(0, True, 0, 0, 0), Mark(10, False, 10, 10, 7)]
    short = [Mark(0, True, 0, 0, 0), Mark(5, True, 5, 5, 3), Mark(8, False, 8, 8, 5)]
    figures = actors.efficiency([steady, short], began=0.0, ended=10.0)
    assert figures["efficiency"] == pytest.approx(0.9)
    assert figures["steady"] == pytest.approx(1.0)
    assert (figures["last_wave_s"], figures["progress_calls"]) == (5.0, 12)


def test_figures_of_planning(tmp_path: Path) -> None:
    figures = planning.run(tmp_path, files=planning.FEW_FILES + 2, rows=300)
    assert (figures["plan_files"], figures["plan_rows"], figures["plan_shards"]) == (12, 3600, 24)
    assert -20 < figures["driver_rss_growth_mb"] < 20
