"""`sevenleague report`: one self-contained page about a job, from its storage alone."""

from __future__ import annotations

import click

from jobs.reporting.contents import report
from pipeline import storage
from pipeline.redaction import without_credentials


def command(output: str, against: str | None, target: str, price: float | None) -> None:
    """The CLI command."""
    page = report(output, against, price).encode()
    storage.write_bytes(target, page)
    click.echo(f"{without_credentials(target)}: {len(page) / 1e6:.1f} MB")
