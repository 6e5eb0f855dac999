"""Rates and displays of a running job."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from jobs.progress import JSON_LINE_PERIOD_S, Meter, progress_display
from pipeline.records import AcceptanceStats, Progress, WorkerProgress


def worker(index: int, **fields: Any) -> WorkerProgress:
    stats = AcceptanceStats(3, 8, 2, (2, 0, 1), (1, 0, 0, 0, 2), {"suffix": 2})
    values = {"rows_done": 1, "rows_failed": 0, "completion_tokens": 5, "running": 2, "waiting": 3, "stats": stats}
    return WorkerProgress(worker=f"worker-{index}", state="running", **{**values, **fields})


def progress(elapsed_s: float, rows_done: int, tokens: int, rows_total: int = 100) -> Progress:
    return Progress(
        rows_done=rows_done,
        rows_failed=1,
        rows_total=rows_total,
        shards_committed=rows_done // 10,
        shards_total=rows_total // 10,
        completion_tokens=tokens,
        workers=(worker(0), worker(1)),
        elapsed_s=elapsed_s,
    )


def test_rates_of_the_last_minute_and_overall() -> None:
    meter = Meter()
    for at, rows, tokens in [(0, 0, 0), (30, 10, 300), (60, 20, 600)]:
        meter.update(progress(at, rows, tokens))
    snapshot = meter.update(progress(120, 40, 1800))
    assert snapshot.tokens_per_s == 15
    assert snapshot.tokens_per_s_last_minute == 20
    assert snapshot.eta_s == 60 / (40 / 120)


def test_what_an_earlier_run_committed_is_not_counted_as_speed() -> None:
    meter = Meter()
    meter.update(progress(0, 50, 10_000))
    snapshot = meter.update(progress(10, 60, 10_200))
    assert (snapshot.tokens_per_s, snapshot.tokens_per_s_last_minute) == (20, 20)
    assert snapshot.eta_s == 40


def test_the_first_look_knows_no_rates() -> None:
    snapshot = Meter().update(progress(0, 0, 0))
    assert (snapshot.tokens_per_s, snapshot.tokens_per_s_last_minute, snapshot.eta_s) == (0, 0, None)


def test_acceptance_is_pooled_over_workers() -> None:
    snapshot = Meter().update(progress(0, 0, 0))
    assert snapshot.mean_acceptance_length == pytest.approx(1 + 4 / 6)
    assert snapshot.mean_window == pytest.approx(16 / 6)


def test_json_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    with progress_display(Console(file=stream)) as show:
        for seconds, rows in [
            (0.0, 0),
            (1.0, 10),
            (JSON_LINE_PERIOD_S, 20),
            (JSON_LINE_PERIOD_S + 1, 100),
            (100.0, 100),
        ]:
            clock[0] = 1000.0 + seconds
            show(progress(seconds, rows, rows * 10))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["rows_done"] for line in lines] == [0, 20, 100]  # the end is told at once, and once
    assert lines[-1]["event"] == "progress"
    assert lines[-1]["workers"][1] == {"worker": "worker-1", "state": "running", "running": 2, "waiting": 3}
    assert set(lines[-1]) >= {
        "rows_failed",
        "rows_total",
        "tokens_per_s",
        "tokens_per_s_last_minute",
        "mean_window",
        "eta_s",
    }


def test_a_live_display_on_a_terminal() -> None:
    stream = io.StringIO()
    with progress_display(Console(file=stream, force_terminal=True, width=160)) as show:
        show(progress(0, 0, 0))
        show(progress(10, 20, 200))
    shown = stream.getvalue()
    for text in ("20 of 100 rows", "1 failed", "ETA 40.0 s", "20.0 tokens/s", "1.67 tokens per step", "worker-1"):
        assert text in shown, text
