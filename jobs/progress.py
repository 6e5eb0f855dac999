"""Progress of a running job: a live display on a terminal, one JSON line every few seconds without one."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobs.durations import duration
from pipeline.records import AcceptanceStats, Progress, ProgressCallback, WorkerProgress

JSON_LINE_PERIOD_S = 5.0
RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What both displays show. Rates are of this run alone: what an earlier run committed took none of its time."""

    elapsed_s: float
    rows_done: int
    rows_failed: int
    rows_total: int
    shards_committed: int
    shards_total: int
    completion_tokens: int
    tokens_per_s_last_minute: float
    tokens_per_s: float
    mean_acceptance_length: float
    mean_window: float
    eta_s: float | None
    workers: tuple[WorkerProgress, ...]

    def to_json(self) -> str:
        fields = asdict(self)
        fields["workers"] = [
            {"worker": worker.worker, "state": worker.state, "running": worker.running, "waiting": worker.waiting}
            for worker in self.workers
        ]
        rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in fields.items()}
        return json.dumps({"event": "progress", **rounded})


@dataclass(slots=True)
class Meter:
    """Turns counters into rates.

    Worked example: 0, 600 and 1800 tokens after 0, 60 and 120 s are 15 tokens/s overall and 20 in the last minute.
    """

    history: deque[tuple[float, int]] = field(default_factory=deque)
    """(seconds, tokens) of the last minute, and one older point so that the minute is whole."""
    first: tuple[float, int, int] | None = None
    """(seconds, tokens, rows) when this run began."""

    def update(self, progress: Progress) -> Snapshot:
        now, tokens = progress.elapsed_s, progress.completion_tokens
        if self.first is None:
            self.first = (now, tokens, progress.rows_done)
        self.history.append((now, tokens))
        while len(self.history) > 2 and self.history[1][0] <= now - RECENT_S:
            self.history.popleft()
        then, tokens_then = self.history[0]
        began, tokens_at_start, rows_at_start = self.first
        rows_per_s = _rate(progress.rows_done - rows_at_start, now - began)
        stats = sum((worker.stats for worker in progress.workers), AcceptanceStats())
        return Snapshot(
            elapsed_s=now,
            rows_done=progress.rows_done,
            rows_failed=progress.rows_failed,
            rows_total=progress.rows_total,
            shards_committed=progress.shards_committed,
            shards_total=progress.shards_total,
            completion_tokens=tokens,
            tokens_per_s_last_minute=_rate(tokens - tokens_then, now - then),
            tokens_per_s=_rate(tokens - tokens_at_start, now - began),
            mean_acceptance_length=stats.mean_acceptance_length,
            mean_window=stats.mean_window,
            eta_s=(progress.rows_total - progress.rows_done) / rows_per_s if rows_per_s else None,
            workers=progress.workers,
        )


@contextmanager
def progress_display(console: Console, *, as_json: bool = False) -> Iterator[ProgressCallback]:
    """A callback that shows progress while the context is open."""
    meter = Meter()
    if as_json or not console.is_terminal:
        lines = _JsonLines(console.file)
        yield lambda progress: lines.show(meter.update(progress))
        return
    with Live(Text("starting the workers"), console=console, refresh_per_second=4, transient=True) as live:
        yield lambda progress: live.update(_panel(meter.update(progress)))


@dataclass(slots=True)
class _JsonLines:
    stream: IO[str]
    next_line_at: float = 0.0
    has_ended: bool = False

    def show(self, snapshot: Snapshot) -> None:
        """Prints a line now and then, and always one, but only one, when all is committed."""
        is_end = snapshot.shards_committed == snapshot.shards_total
        if self.has_ended or not (is_end or time.monotonic() >= self.next_line_at):
            return
        print(snapshot.to_json(), file=self.stream, flush=True)
        self.next_line_at = time.monotonic() + JSON_LINE_PERIOD_S
        self.has_ended = is_end


def _panel(snapshot: Snapshot) -> Group:
    failed = f", [red]{snapshot.rows_failed} failed[/red]" if snapshot.rows_failed else ""
    head = Table.grid(padding=(0, 2))
    head.add_row(
        ProgressBar(total=snapshot.rows_total, completed=snapshot.rows_done, width=40),
        Text.from_markup(f"{snapshot.rows_done} of {snapshot.rows_total} rows{failed}"),
        Text(f"{snapshot.shards_committed} of {snapshot.shards_total} shards"),
        Text(eta(snapshot.eta_s)),
    )
    speed = Text(
        f"{snapshot.tokens_per_s_last_minute:.1f} tokens/s in the last minute, {snapshot.tokens_per_s:.1f} overall, "
        f"{snapshot.mean_acceptance_length:.2f} tokens per step, mean window {snapshot.mean_window:.1f}"
    )
    workers = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("worker", "state", "rows", "running", "waiting", "tokens"):
        workers.add_column(title, justify="left" if title in ("worker", "state") else "right")
    for worker in snapshot.workers:
        counts = (worker.rows_done, worker.running, worker.waiting, worker.completion_tokens)
        workers.add_row(worker.worker, worker.state, *(str(count) for count in counts))
    return Group(head, speed, workers)


def _rate(amount: float, seconds: float) -> float:
    return max(amount, 0) / seconds if seconds > 0 else 0.0


def eta(seconds: float | None) -> str:
    """The time that is left, or a dash while it is not known."""
    return f"ETA {'-' if seconds is None else duration(seconds)}"


def stderr_console() -> Console:
    """Progress goes to stderr: stdout holds results only."""
    return Console(file=sys.stderr, stderr=True)
