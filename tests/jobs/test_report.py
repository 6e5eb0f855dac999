"""What a report says: figures from receipts and rows, of jobs that are done, running, or of an earlier version."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.cli import main
from jobs.reporting.clock import Clock, make_clock, spread
from jobs.reporting.comparison import compare_samples, compared_groups, differing_settings
from jobs.reporting.contents import chart_figures, report
from jobs.reporting.cost import cost_of
from jobs.reporting.page import money, safe_json
from jobs.reporting.row_figures import histogram, row_figures
from jobs.reporting.samples import packed, read_samples
from jobs.reporting.stored_job import StoredJob, read_job
from jobs.reporting.timeline import timeline
from pipeline.commits import JobStore
from tests.jobs.made_job import BEGAN, HOSTILE, failed_row, make_output, row
from tests.pipeline.makers import make_receipt

NUM_ROWS = 96
FAILED = (7, 24, 41)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "done"
    rows = [
        failed_row(i, "null_prompt" if i == 41 else "prompt_too_long") if i in FAILED else row(i) for i in range(96)
    ]
    make_output(folder, rows)
    return folder


@pytest.fixture(scope="module")
def job(output: Path) -> StoredJob:
    return read_job(str(output))


def unpacked(encoded: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(encoded)))


def test_the_clock_leaves_pauses_out() -> None:
    receipts = [make_receipt(i, began=began, seconds=10.0) for i, began in enumerate((100.0, 105.0, 130.0, 5000.0))]
    clock = make_clock(receipts)
    assert clock == Clock(((100.0, 140.0), (5000.0, 5010.0)))
    assert clock.total_s == 50.0
    assert [clock.at(moment) for moment in (90.0, 100.0, 120.0, 140.0, 3000.0, 5004.0)] == [0.0, 0.0, 20.0, 40, 40, 44]
    assert clock.pauses == [(40.0, 4860.0)]


def test_spreads_an_amount_over_its_interval() -> None:
    assert spread([(1.0, 4.0)], [6.0], 4.0, 2) == pytest.approx([1.0, 2.0])
    rates = spread([(0.0, 7.0), (3.0, 9.5)], [14.0, 26.0], 10.0, 7)
    assert sum(rates) * 10 / 7 == pytest.approx(40.0)


def test_bins_of_lengths_are_round() -> None:
    one = histogram([np.array([1, 2]), np.array([12])])
    assert (one["start"], one["width"], one["counts"][1], one["counts"][12 - one["start"]]) == (1, 1, 1, 1)
    wide = histogram([np.arange(30, 300)])
    assert (wide["start"], wide["width"]) == (20, 20)
    assert wide["counts"] == [10, *[20] * 13]
    assert histogram([])["counts"] == []


def test_times_workers_and_tail(job: StoredJob) -> None:
    times = timeline(job)
    assert times is not None
    # two workers, 12 shards each: 11 of 2 s, and one of 10 s that reaches 2 s into what others do
    assert times["total_s"] == pytest.approx(24.0)
    assert times["pauses"] == [(pytest.approx(12.0), pytest.approx(3600.0 - 0.0))]
    workers = times["workers"]
    assert workers["lanes"] == ["worker-0", "worker-1"]
    assert len(workers["bars"]) == 24
    kinds = {bar[5]: bar[4] for bar in workers["bars"]}
    assert [kinds[index] for index in (0, 1, 2, 3)] == ["first", "first", "slow", "redone"]
    assert (workers["num_slow"], workers["num_redone"], workers["num_restarts"]) == (1, 1, 1)
    assert workers["restarts"] == [[1, pytest.approx(1.0)]]  # not those that the second run began with
    overlapping = [bar[1] for bar in workers["bars"] if bar[0] == 0 and bar[2] < 12.0]
    assert set(overlapping) == {0, 1}
    rate = times["throughput"]
    assert sum(rate["tokens_per_s"]) * rate["bin_s"] == pytest.approx(10 * (NUM_ROWS - len(FAILED)), abs=1)
    assert rate["rows_done"][-1] == [pytest.approx(24.0), NUM_ROWS]
    assert times["tail"]["rows_50_s"] == pytest.approx(12.0)
    assert times["tail"]["tail_s"] == 0.0


def test_the_tail_is_what_others_wait_for(job: StoredJob) -> None:
    receipts = tuple(make_receipt(i, worker=f"worker-{i}", began=BEGAN, seconds=s) for i, s in enumerate((80, 95, 100)))
    times = timeline(StoredJob(**{**{name: getattr(job, name) for name in job.__slots__}, "receipts": receipts}))
    assert times is not None
    tail = times["tail"]
    assert (tail["tail_s"], tail["idle_s"], tail["idle_share"]) == (20.0, 25.0, pytest.approx(25 / 300))


def test_figures_of_rows(job: StoredJob) -> None:
    rows = row_figures(job)
    assert dict(rows.finish_reasons) == {"length": 93, "error": 3}
    assert set(rows.groups) == {"task"}  # all rows that did not fail ended alike
    math = rows.groups["task"]["math"]
    assert (math.rows, math.failed, math.tokens, math.tokens_per_step, math.mean_window) == (32, 1, 310, 2.5, 3.0)
    assert [error["id"] for error in rows.examples["prompt_too_long"]] == ["row-7", "row-24"]
    assert rows.latency_percentiles() == {50: 0.5, 90: 0.5, 99: 0.5, 100: 0.5}


def test_a_column_of_many_values_is_no_grouping(tmp_path: Path) -> None:
    make_output(tmp_path, [row(i, passthrough={"task": f"task {i}"}) for i in range(300)], rows_per_shard=100)
    assert row_figures(read_job(str(tmp_path))).groups == {}
    make_output(tmp_path / "few", [row(i, passthrough={"task": f"task {i % 40:02d}"}) for i in range(100)])
    rows = row_figures(read_job(str(tmp_path / "few")))
    assert (len(rows.groups["task"]), rows.num_values["task"]) == (24, 40)


def test_occupancy_is_pooled(job: StoredJob) -> None:
    one, two = chart_figures(job, row_figures(job))["occupancy"]
    assert one == {"from": 1, "to": 1, "steps": 72, "window": 8.0, "tokens_per_step": 4.0}
    assert two == {"from": 2, "to": 3, "steps": 240, "window": 2.0, "tokens_per_step": 2.0}


def test_cost(job: StoredJob, tmp_path: Path) -> None:
    # first run: worker-0 from -5 to 12, worker-1 from -5 to 2 and again from 1 to 12; second run: 12 s each
    cost = cost_of(job, 36.0)
    assert cost.unit == "worker"
    assert cost.hours * 3600 == pytest.approx(17 + 7 + 11 + 12 + 12)
    assert cost.total == pytest.approx(0.59)
    assert cost.tokens_per_unit_second == pytest.approx(930 / 59)
    assert cost.per_million_tokens == pytest.approx(0.59 / 930 * 1e6)
    make_output(tmp_path, [row(i) for i in range(8)], gpus=0.5)
    gpus = cost_of(read_job(str(tmp_path)), None)
    assert (gpus.unit, gpus.total) == ("GPU", None)


def test_samples_are_spread_evenly(job: StoredJob) -> None:
    assert [r["id"] for r in read_samples(job).rows] == [f"row-{i}" for i in range(NUM_ROWS)]
    few = read_samples(job, most=5)
    assert [r["id"] for r in few.rows] == [f"row-{i}" for i in (9, 28, 48, 67, 86)]
    assert few.total == NUM_ROWS
    assert few.rows[0]["spans"] == [[0, 6, "suffix"], [10, 5, "recycling"]]
    assert few.rows[0]["columns"] == {"task": "math"}


def test_texts_are_cut_until_the_page_is_small(job: StoredJob, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = read_samples(job)
    samples.rows[0] |= {"text": "x" * 9000}
    encoded, longest = packed(samples.rows)
    assert (longest, len(unpacked(encoded)[0]["text"])) == (8000, 8000 + len(" […]"))
    noise = np.random.default_rng(0).integers(0x4E00, 0x9FFF, (NUM_ROWS, 5000))
    for sample, text in zip(samples.rows, noise, strict=True):
        sample["text"] = "".join(map(chr, text))
    monkeypatch.setattr("jobs.reporting.samples.MOST_BYTES", 400_000)
    encoded, longest = packed(samples.rows)
    assert len(encoded) <= 400_000
    assert (longest, len(unpacked(encoded)[5]["text"])) == (1000, 1000 + len(" […]"))


def test_two_outputs(job: StoredJob, tmp_path: Path) -> None:
    rows = [row(i, generation="another") if i == 3 else row(i) for i in range(80)]
    make_output(tmp_path, rows, decoding="suffix", trace=False)
    other, samples = read_job(str(tmp_path)), read_samples(job)
    assert compare_samples(samples, other) == {"same": 76, "differs": 4, "missing": 16}  # 3 failed here and not there
    assert samples.rows[3]["other"] == "another"
    changed = {key: values for key, *values in differing_settings(job, other)}
    assert changed["decoding.strategy"] == ["auto", "suffix"]
    assert set(changed) >= {"output.trace", "output.path"}
    assert {line.name: line.change for line in compared_groups(row_figures(job), row_figures(other))["task"]} == {
        "chat": 1.0,
        "code": 1.0,
        "math": 1.0,
    }
    page = report(job.output, other.output)
    assert "Settings that differ" in page


def test_data_never_becomes_markup(tmp_path: Path) -> None:
    hostile = row(1, id=HOSTILE, prompt=HOSTILE, generation=HOSTILE, passthrough={"task": HOSTILE})
    failed = failed_row(2, HOSTILE, error=HOSTILE, passthrough={"task": HOSTILE})
    make_output(tmp_path / "hostile", [hostile, failed, row(3)])
    page = report(str(tmp_path / "hostile"), str(tmp_path / "hostile"))
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert len(re.findall(r"</script", page)) == 5  # figures, samples, and three scripts of ours
    assert json.loads(safe_json({"x": HOSTILE + "\u2028&"})) == {"x": HOSTILE + "\u2028&"}


def test_a_running_job(tmp_path: Path) -> None:
    make_output(tmp_path, [row(i) for i in range(32)], committed=5, finish=False)
    page = report(str(tmp_path))
    assert "This job is running: 5 of 8 shards are committed" in page
    JobStore(str(tmp_path)).set_state("failed", "run", "the <bucket> is gone")
    page = report(str(tmp_path))
    assert "This job is failed: 5 of 8 shards are committed" in page
    assert "The driver ended with: the &lt;bucket&gt; is gone" in page
    make_output(tmp_path / "new", [row(i) for i in range(32)], committed=0, finish=False)
    assert "0 of 8 shards" in report(str(tmp_path / "new"))


def test_receipts_of_earlier_versions_say_no_times(tmp_path: Path) -> None:
    make_output(tmp_path, [row(i) for i in range(8)], timed=False, trace=False)
    page = report(str(tmp_path), price=2.0)
    assert "2 shards were made by a version that did not store when" in page
    assert "No receipt says when it was." in page


def test_the_command(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(output), "--output", str(target), "--price", "36"])
    assert ended.value.code == 0
    assert target.stat().st_size < 1_400_000
    assert "$0.59" in target.read_text()
    assert capsys.readouterr().out == f"{target}: {target.stat().st_size / 1e6:.1f} MB\n"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "nothing")])
    assert ended.value.code == 2
    assert "output.path must be the output of a job" in capsys.readouterr().err


def test_the_library_is_the_one_that_its_maker_published() -> None:
    """Of echarts 6.1.0, dist/echarts.min.js; its licence and notice lie beside it."""
    import hashlib

    assets = Path(__file__).parents[2] / "jobs" / "reporting" / "assets"
    digest = hashlib.sha256((assets / "echarts.min.js").read_bytes()).hexdigest()
    assert digest == "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
    assert "Apache License" in (assets / "echarts.LICENSE").read_text()
    assert "Apache Software Foundation" in (assets / "echarts.NOTICE").read_text()


def test_how_money_is_written() -> None:
    assert [money(value) for value in (0.00214, 0.5, 12.345, 12345.6)] == ["$0.0021", "$0.5", "$12.35", "$12,345.60"]
