"""Progress of a training: a live line on a terminal, one JSON line every few seconds without one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobs.progress import JSON_LINE_PERIOD_S, eta

if TYPE_CHECKING:
    from workers.ptp.process import Status

_SHOWN = ("loss", "correct", "accepted", "perplexity")


@dataclass(slots=True)
class TrainDisplay:
    """Shows one training after another."""

    console: Console
    live: Live | None
    _name: str = field(default="", init=False)
    _first: tuple[int, float] = field(default=(0, 0.0), init=False)
    """(step, seconds) of the current training when this command began or resumed it."""
    _next_line_at: float = field(default=0.0, init=False)
    _last_step: int = field(default=-1, init=False)
    _ended: bool = field(default=False, init=False)

    def show(self, status: Status) -> None:
        progress = status.progress
        if (status.name, progress.step, status.ended) == (self._name, self._last_step, self._ended):
            return
        if status.name != self._name:
            self._name, self._first, self._next_line_at = status.name, (progress.step, progress.seconds), 0.0
        self._last_step, self._ended = progress.step, status.ended
        if self.live is not None:
            self.live.update(self._panel(status))
        elif status.ended or time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + JSON_LINE_PERIOD_S
            line = {"event": "progress", "arm": status.name, **_rounded(asdict(progress))}
            print(json.dumps(line), file=self.console.file, flush=True)

    def _panel(self, status: Status) -> Group:
        progress = status.progress
        steps, seconds = progress.step - self._first[0], progress.seconds - self._first[1]
        left_s = (progress.steps - progress.step) * seconds / steps if steps else None
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"{status.name} ({status.number + 1} of {status.count})"),
            ProgressBar(total=progress.steps, completed=progress.step, width=40),
            Text(f"{progress.step} of {progress.steps} steps"),
            Text(eta(left_s)),
        )
        held_out = ", ".join(f"{name} {progress.metrics[name]:.3f}" for name in _SHOWN if name in progress.metrics)
        line = f"loss {progress.loss:.3f}, learning rate {progress.lr:.1e}"
        return Group(head, Text(f"{line}; held out: {held_out}" if held_out else line))


@contextmanager
def train_display(console: Console) -> Iterator[TrainDisplay]:
    """A display that is live while the context is open."""
    if not console.is_terminal:
        yield TrainDisplay(console, None)
        return
    with Live(Text("starting the processes"), console=console, refresh_per_second=4, transient=True) as live:
        yield TrainDisplay(console, live)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value
