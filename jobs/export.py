"""`sevenleague export`: a finished output as a data set to train on."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from jobs.push import push_if_possible
from pipeline import hub, storage
from pipeline.data_config import PushConfig
from pipeline.exporting.export import Exported, export
from pipeline.exporting.options import ExportOptions
from pipeline.redaction import without_credentials


def command(output: str, dest: str, options: ExportOptions, target: PushConfig | None) -> None:
    """The CLI command."""
    if target is not None:
        hub.check_token()
    exported = export(storage.absolute(output), storage.absolute(dest), options)
    _show(Console(highlight=False), dest, exported)
    if target is not None:
        push_if_possible(dest, target)


def _show(console: Console, dest: str, exported: Exported) -> None:
    for rule, count in exported.left_out:
        if count:
            console.print(f"left out: {count:,} samples ({escape(rule)})", soft_wrap=True)
    for files in exported.files:
        console.print(f"{files.split}: {files.rows:,} rows in {len(files.names):,} files, {files.num_bytes:,} bytes")
    console.print(f"{exported.samples:,} samples are in {escape(without_credentials(dest))}", soft_wrap=True)
