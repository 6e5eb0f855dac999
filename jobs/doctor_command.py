"""The command `doctor`."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--output", metavar="FOLDER|URL", help="Try the store: write, read, conditional put, remove.")
@click.option("--model", metavar="MODEL", help="Load this model, weights too.  [default: the demo model, without]")
@click.option("--address", metavar="ADDRESS", help="Try a Ray cluster: auto, HOST:PORT or http://HOST:PORT.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list on stdout.")
def doctor(output: str | None, model: str | None, address: str | None, as_json: bool) -> None:
    """Check whether jobs can run here: versions, machine, store, Ray cluster, model. Exit code 1 if something fails.

    \b
    Examples:
      sevenleague doctor
      sevenleague doctor --output s3://bucket/out --model Qwen/Qwen3-0.6B
      sevenleague doctor --address http://head:8265 --json
    """
    from jobs.doctor import command

    sys.exit(command(output, model, address, as_json))
