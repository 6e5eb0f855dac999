"""`sevenleague list`: how far each job below a folder or URL is, told from storage alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.errors import ConfigError, SevenLeagueError
from pipeline.redaction import redacted, without_credentials
from pipeline.summary import JobSummary, status_of

TITLES = ("output", "state", "shards", "rows", "failed", "tokens", "heartbeat")

READS_AT_ONCE = 8
"""Jobs whose state is read at the same time; most of it is waiting for the store."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A job: what its storage tells, or why that cannot be read."""

    output: str
    status: JobSummary | None = None
    heartbeat_age_s: float | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fixed form of `list --json`: that of `status --json`, with the output and the age of the heartbeat."""
        if self.status is None:
            return {"output": self.output, "error": self.error}
        return {"output": self.output, **self.status.to_json(), "heartbeat_age_s": self.heartbeat_age_s}


def command(root: str, as_json: bool) -> None:
    """The CLI command."""
    outputs = list(find_outputs(root))
    if not outputs:
        raise ConfigError(f"the root must be or hold outputs of jobs, got {without_credentials(root)!r}")
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        entries = list(pool.map(entry_of, outputs))
    if as_json:
        print(json.dumps([entry.to_json() for entry in entries]))
    else:
        print(*lines_of(entries), sep="\n")


def find_outputs(root: str) -> Iterator[str]:
    """Outputs of jobs at and below a root, by name. Each folder is listed once; no output is entered."""
    files, folders = storage.list_folder(root)
    if "_job.json" in files:
        yield root
        return
    for name in folders:
        yield from find_outputs(storage.join(root, name))


def entry_of(output: str) -> Entry:
    shown = without_credentials(output)
    try:
        return Entry(shown, status_of(output), JobStore(output).heartbeat_age_s())
    except (SevenLeagueError, OSError, ValueError, KeyError) as error:  # one broken job must not hide the others
        return Entry(shown, error=redacted(f"{type(error).__name__}: {error}"))


def lines_of(entries: Sequence[Entry]) -> Iterator[str]:
    """A title and a line for each job, in columns as wide as they need, so that other programs find whole lines."""
    rows = [TITLES, *map(_cells, entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(TITLES))]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        yield "  ".join([*left, *right]).rstrip()


def _cells(entry: Entry) -> tuple[str, ...]:
    if entry.status is None:
        return (entry.output, "unreadable", *[""] * (len(TITLES) - 2))
    status, age = entry.status, entry.heartbeat_age_s
    return (
        entry.output,
        status.state,
        f"{status.shards_committed}/{status.shards_total}",
        f"{status.rows_ok + status.rows_failed}/{status.rows_total}",
        str(status.rows_failed),
        str(status.completion_tokens),
        "-" if age is None else f"{age:.0f} s ago",
    )
