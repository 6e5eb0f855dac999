"""The commands that hand outputs on, `export` and `push`."""

from __future__ import annotations

import os
from typing import Any

import click

FORMATS = ("messages", "prompt_completion", "sharegpt", "openai_batch", "axolotl_kd", "distillkit", "jsonl")
COUNT = click.IntRange(min=1)


@click.command()
@click.argument("output", metavar="OUTPUT")
@click.argument("dest", metavar="DEST")
@click.option("--format", "format_name", required=True, type=click.Choice(FORMATS), help="What will read it.")
@click.option("--files", "file_format", type=click.Choice(["parquet", "jsonl"]), help="Default: as the format has it.")
@click.option(
    "--split", "splits", metavar="NAME=SHARE,..", default="train=1", show_default=True, help="By hash of the id."
)
@click.option(
    "--finish-reason", "finish_reasons", multiple=True, type=click.Choice(["stop", "length"]), help="Only these."
)
@click.option("--min-tokens", type=COUNT, help="Fewest new tokens of a sample.")
@click.option("--max-tokens", type=COUNT, help="Most new tokens of a sample.")
@click.option("--acceptance", metavar="LOW:HIGH", help="Range of mean_acceptance_length: high flags loops, low garble.")
@click.option("--no-loops", is_flag=True, help="Leave out what ends in the same piece over and over.")
@click.option("--dedup", is_flag=True, help="Leave out a text that the same prompt has given before.")
@click.option("--best", type=COUNT, metavar="N", help="Of each prompt the N samples of the best mean log-probability.")
@click.option(
    "--sequence-length", type=COUNT, metavar="N", help="distillkit: pad to N tokens, leave out what is longer."
)
@click.option("--trailing-tokens", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="axolotl_kd: tokens that the chat template puts after the end token.")  # fmt: skip
@click.option("--file-mb", type=COUNT, default=16, show_default=True, help="About the size of a file, made in memory.")
@click.option("--license", "license_id", metavar="ID", help="For the card, e.g. apache-2.0.")
@click.option("--allow-unfinished", is_flag=True, help="Export what a job has committed so far.")
@click.option("--push-to-hub", "repo", metavar="USER/NAME", help="Also push it to this dataset repository.")
@click.option("--public", is_flag=True, help="With --push-to-hub: a repository that is made is public.")
@click.option("--revision", default="main", show_default=True, help="With --push-to-hub: the branch.")
def export(output: str, dest: str, format_name: str, **values: Any) -> None:
    """Write the samples of a finished job as a data set that trainers read, with a card.

    \b
    Examples:
      sevenleague export out/quickstart sft --format messages --finish-reason stop --split train=0.98,test=0.02
      sevenleague export s3://bucket/out s3://bucket/sft --format sharegpt --dedup --no-loops --min-tokens 8
      sevenleague export out/distillation kd --format axolotl_kd --best 1 --license apache-2.0
    """
    # Before Arrow is imported, and also for its Parquet writer, which `pyarrow.set_memory_pool` does not reach: the
    # default pool keeps what it has had.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from jobs.export import command
    from pipeline.exporting.options import ExportOptions, Filters, parse_range, parse_splits
    from pipeline.hub import parse_target

    for name, formats in (("sequence_length", ("distillkit",)), ("trailing_tokens", ("axolotl_kd",))):
        if values[name] and format_name not in formats:
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} needs --format {formats[0]}, got --format {format_name}")
    acceptance = values["acceptance"]
    filters = Filters(
        finish_reasons=values["finish_reasons"],
        min_tokens=values["min_tokens"],
        max_tokens=values["max_tokens"],
        acceptance=None if acceptance is None else parse_range(acceptance),
        no_loops=values["no_loops"],
        dedup=values["dedup"],
        best=values["best"],
    )
    options = ExportOptions(
        format=format_name,
        file_format=values["file_format"],
        splits=parse_splits(values["splits"]),
        filters=filters,
        license=values["license_id"],
        sequence_length=values["sequence_length"],
        trailing_tokens=values["trailing_tokens"],
        file_mb=values["file_mb"],
        allow_unfinished=values["allow_unfinished"],
    )
    repo = values["repo"]
    target = None if repo is None else parse_target(repo, not values["public"], values["revision"])
    command(output, dest, options, target)


@click.command()
@click.argument("folder", metavar="FOLDER")
@click.argument("repo", metavar="USER/NAME")
@click.option("--public", is_flag=True, help="A repository that is made is public.")
@click.option("--revision", default="main", show_default=True, help="The branch that gets the commit.")
def push(folder: str, repo: str, public: bool, revision: str) -> None:
    """Put a finished output or an exported data set into a dataset repository of the Hugging Face hub, in one commit.

    The token is HF_TOKEN of the environment. Files that are there already are not sent again.

    \b
    Examples:
      sevenleague push sft user/my-data
      sevenleague push s3://bucket/out user/my-data --public
    """
    from jobs.push import command

    command(folder, repo, not public, revision)


export_commands = (export, push)
"""Commands of this module."""
