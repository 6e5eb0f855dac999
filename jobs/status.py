"""`sevenleague status`: how far a job is, told from its storage alone."""

from __future__ import annotations

import json

from rich.console import Console

from jobs.tables import group_table, print_acceptance
from pipeline.summary import acceptance_by, status_of


def command(output: str, as_json: bool, column: str | None) -> None:
    """The CLI command. `--json` prints the fixed form; a column adds the key `by` to it."""
    status = status_of(output)
    groups = acceptance_by(output, column) if column else {}
    if as_json:
        by = {"by": {value: figures.to_json() for value, figures in groups.items()}} if column else {}
        print(json.dumps({**status.to_json(), **by}))
        return
    console = Console(highlight=False)
    console.print(
        f"{status.state}: {status.shards_committed:,} of {status.shards_total:,} shards, "
        f"{status.rows_ok + status.rows_failed:,} of {status.rows_total:,} samples, {status.rows_failed:,} failed"
    )
    print_acceptance(console, status.stats)
    if column:
        console.print(group_table(column, groups))
