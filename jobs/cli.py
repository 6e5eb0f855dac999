"""The command `sevenleague`. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from jobs.bench.options import bench_options, make_options
from jobs.cluster_commands import cluster_commands
from jobs.doctor_command import doctor
from jobs.exit_codes import ExitCode
from jobs.export_commands import export_commands
from jobs.overrides import override_options
from jobs.packages import PACKAGES


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, invoke_without_command=True
)
@click.version_option(package_name="sevenleague")
@click.pass_context
def cli(context: click.Context) -> None:
    """Offline batch generation with lossless parallel decoding on Ray: shards in, tokens out, exactly once.

    \b
    Examples:
      sevenleague run configs/quickstart.yaml
      sevenleague preview configs/quickstart.yaml -n 3
      sevenleague status out/quickstart
      sevenleague verify out/quickstart --samples 8
      sevenleague submit configs/cluster.yaml --address http://head:8265 --follow

    \b
    Exit codes: 0 done, 1 failed (for verify: a mismatch), 2 user error, 3 finished with failed rows,
    4 interrupted but resumable.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
@click.argument("job_file", metavar="JOB.yaml")
@override_options
@click.option("--dry-run", is_flag=True, help="Show the resolved job, its rows, shards and prompt lengths; no run.")
@click.option("--calibrate", is_flag=True, help="With --dry-run: also decode for some seconds, and estimate the job.")
@click.option("--retry-failed", is_flag=True, help="Also do rows again that have failed; the others stay as they are.")
@click.option("--error-type", metavar="TYPE", help="With --retry-failed: only rows that failed with this error_type.")
def run(
    job_file: str,
    overrides: Sequence[str],
    dry_run: bool,
    calibrate: bool,
    retry_failed: bool,
    error_type: str | None,
) -> None:
    """Generate for every prompt of a job; run it again to resume what was interrupted.

    \b
    Examples:
      sevenleague run job.yaml
      sevenleague run job.yaml --dry-run --calibrate
      sevenleague run job.yaml --retry-failed --error-type worker_crash
      sevenleague run job.yaml --model Qwen/Qwen3-0.6B --input 'prompts/*.parquet' --output s3://bucket/out
      sevenleague run job.yaml --temperature 0 --limit 100 --set decoding.strategy=lookahead --set decoding.width=7

    An option like --seed is applied after every --set, so it wins over --set sampling.seed=..
    """
    if error_type is not None and not retry_failed:
        raise click.UsageError(f"--error-type needs --retry-failed, got --error-type {error_type} alone")
    if calibrate and not dry_run:
        raise click.UsageError("--calibrate needs --dry-run, got --calibrate alone")
    from jobs.run import command
    from pipeline.preparation import RetryFailed

    sys.exit(command(job_file, overrides, dry_run, RetryFailed(error_type) if retry_failed else None, calibrate))


@cli.command()
@click.argument("job_file", metavar="JOB.yaml")
@override_options
@click.option("-n", "--prompts", "count", type=click.IntRange(min=1), default=3, show_default=True, help="How many.")
def preview(job_file: str, overrides: Sequence[str], count: int) -> None:
    """Show the first prompts as the model reads them, their token counts, and what it generates; write nothing.

    \b
    Examples:
      sevenleague preview job.yaml
      sevenleague preview job.yaml --prompts 1 --temperature 0 --max-tokens 32
    """
    from jobs.preview import command

    command(job_file, overrides, count)


@cli.command()
@click.argument("output", metavar="OUTPUT")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--by", "column", metavar="COLUMN", help="Also acceptance figures for each value of an output column.")
def status(output: str, as_json: bool, column: str | None) -> None:
    """Tell how far a job is, from its storage alone.

    \b
    Examples:
      sevenleague status out/quickstart
      sevenleague status s3://bucket/out --json
      sevenleague status out/spec_bench --by task
    """
    from jobs.status import command

    command(output, as_json, column)


@cli.command()
@click.argument("output", metavar="OUTPUT")
@click.option("--samples", type=click.IntRange(min=1), default=16, show_default=True, help="Finished samples to check.")
@click.option("--dtype", type=click.Choice(["float64", "float32", "bfloat16", "float16"]), help="Default: the job's.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def verify(output: str, samples: int, dtype: str | None, as_json: bool) -> None:
    """Decode finished samples again, one at a time with plain decoding, and compare token by token.

    The samples are spread evenly over all finished ones, the same ones each time. A near-tie is a sample whose first
    different token was, to plain decoding, as good as its own but for rounding. A mismatch ends with exit code 1.

    \b
    Examples:
      sevenleague verify out/quickstart
      sevenleague verify s3://bucket/out --samples 64 --json
    """
    from jobs.verify import command

    sys.exit(command(output, samples, dtype, as_json))


@cli.command()
@click.argument("output", metavar="OUTPUT")
@click.option("--against", metavar="OTHER", help="Compare with another output: figures, settings, samples.")
@click.option("--output", "target", metavar="FILE", default="report.html", show_default=True, help="Where to write it.")
@click.option("--price", type=click.FloatRange(min=0), metavar="USD", help="Of a GPU-hour; without GPUs, of a worker.")
def report(output: str, against: str | None, target: str, price: float | None) -> None:
    """Write one HTML page about a job, running or finished: speed, acceptance, workers, errors, cost, samples.

    The page holds everything it needs and loads nothing. It is made from storage alone.

    \b
    Examples:
      sevenleague report out/quickstart
      sevenleague report s3://bucket/out --output s3://bucket/reports/out.html --price 2.5
      sevenleague report out/lookahead --against out/quickstart
    """
    from jobs.report import command

    command(output, against, target, price)


@cli.command()
@click.argument("config_file", metavar="CONFIG.yaml")
@click.option("--output", required=True, metavar="DIR", help="Folder or URL for the base, the arms and checkpoints.")
@click.option("--json", "json_file", metavar="FILE", help="Write the figures of all arms as one JSON object.")
@click.option("--arms", metavar="A,B", default="", help="Train these arms only; `base`: the base alone.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set any key of the file, as YAML.")
def train(config_file: str, output: str, json_file: str | None, arms: str, overrides: Sequence[str]) -> None:
    """Train adapters of Parallel Token Prediction; run it again to go on with what was interrupted.

    An adapter lies in DIR/ARM/adapter and serves with `decoding: {strategy: ptp, adapter: DIR/ARM/adapter}`. Arms that
    are trained already are not trained again.

    \b
    Examples:
      sevenleague train configs/ptp/markov.yaml --output out/markov --json markov.json
      sevenleague train my.yaml --output out/mine --arms o,c --set training.steps=2000 --set cluster.workers=2
    """
    from jobs.train import command

    names = [name.strip() for name in arms.split(",") if name.strip()]
    sys.exit(command(config_file, output, json_file, overrides, names))


@cli.command()
@bench_options
def bench(**values: Any) -> None:
    """Measure decoding strategies and other systems on the same prompts: new tokens per second.

    Contestants take turns, several rounds of them, and medians count. All get the same prompts as token ids and make
    the same number of new tokens; prefill is timed, start-up, compilation and warm-up are told but not timed.

    \b
    Examples:
      sevenleague bench --model builtin:smollm2-135m --prompts prompts.parquet --json bench.json
      sevenleague bench --model M --prompts FILE --batch 1,8 --contestants auto,hf-generate --chart bench.png
      sevenleague bench --model M --prompts FILE --contestants auto,vllm --peer-python vllm=venv/bin/python
    """
    from jobs.bench.command import command

    sys.exit(command(make_options(**values)))


for command in (*cluster_commands, *export_commands):
    cli.add_command(command)
cli.add_command(doctor)


def shadowed_package() -> str | None:
    """What is wrong, in a sentence, unless the three packages (their names are plain ones) come from one folder."""
    own = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            return f"the package {name!r} of sevenleague must be beside its others in {own}, got nothing of that name"
        folder = Path(next(iter(spec.submodule_search_locations))).resolve().parent
        if folder != own:
            return (
                f"the package {name!r} of sevenleague must be beside its others in {own}, got one in {folder}, where "
                "another distribution or folder shadows it"
            )
    return None


def entry() -> NoReturn:
    """The console script: `main`, and then the end of the process without taking Python down.

    Threads of Arrow and Ray may still hold Python objects, and one that lets go of them while Python ends aborts the
    process (seen in one `status` of thirty): the exit code would be 134 after the work was done.
    """
    try:
        main()
    except SystemExit as ending:
        code = ending.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else ExitCode.DONE if code is None else ExitCode.FAILED)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command. Mistakes become one sentence on stderr, never a traceback. Ends by SystemExit."""
    problem = shadowed_package()
    if problem is not None:  # then nothing of the packages can be imported
        click.echo(f"sevenleague: {problem}", err=True)
        sys.exit(ExitCode.USER_ERROR)
    from pipeline import logs
    from pipeline.errors import ConfigError, SevenLeagueError, TransientError

    logs.configure("text")
    try:
        sys.exit(cli.main(arguments, prog_name="sevenleague", standalone_mode=False) or ExitCode.DONE)
    except click.ClickException as error:
        _fail(error.format_message(), ExitCode.USER_ERROR)
    except ConfigError as error:
        _fail(str(error), ExitCode.USER_ERROR)
    except TransientError as error:
        _fail(f"{error}; run the same command again to resume", ExitCode.INTERRUPTED)
    except SevenLeagueError as error:
        _fail(str(error), ExitCode.FAILED)
    except (click.Abort, KeyboardInterrupt):
        click.echo("sevenleague: interrupted, run the same command again to resume", err=True)
        sys.exit(ExitCode.INTERRUPTED)


def _fail(sentence: str, exit_code: ExitCode) -> NoReturn:
    from pipeline.redaction import redacted

    click.echo(f"sevenleague: {redacted(sentence)}", err=True)
    sys.exit(exit_code)
