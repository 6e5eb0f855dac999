"""The command `sevenleague`. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from jobs.bench.options import bench_options, make_options
from jobs.exit_codes import ExitCode

PACKAGES = ("pipeline", "workers", "jobs")

OVERRIDES: dict[str, tuple[str, Any, str]] = {
    "model": ("model.id", str, "Hub id, folder, URL, GGUF file or builtin name."),
    "input": ("input.path", str, "File, glob, folder, URL or datasets name; may be given more than once."),
    "output": ("output.path", str, "Folder or URL; one folder holds one job."),
    "max-tokens": ("sampling.max_tokens", int, "Most new tokens of a sample."),
    "temperature": ("sampling.temperature", float, "0 is greedy."),
    "top-p": ("sampling.top_p", float, "Keep the likeliest tokens that make up this probability."),
    "top-k": ("sampling.top_k", int, "Keep this many likeliest tokens; 0 is off."),
    "n": ("sampling.n", int, "Samples of each prompt."),
    "seed": ("sampling.seed", int, "Seed of all samples."),
    "workers": ("cluster.workers", int, "Model replicas."),
    "limit": ("input.limit", int, "Use only the first rows."),
}


def override_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the common overrides and `--set`; the command gets all of them as one list `overrides`.

    An own option is applied after every `--set`, so it wins over a `--set` of the same key.
    """

    @functools.wraps(command)
    def with_overrides(set_values: tuple[str, ...], **values: Any) -> None:
        overrides = list(set_values)
        for name, (key, _, _) in OVERRIDES.items():
            value = values.pop(name.replace("-", "_"))
            if value not in (None, ()):
                overrides.append(f"{key}={json.dumps(value)}")  # JSON is YAML, and it never reads "1e3" as a number
        command(overrides=overrides, **values)

    for name, (key, kind, text) in reversed(OVERRIDES.items()):
        option = click.option(f"--{name}", type=kind, multiple=name == "input", help=f"{text} [{key}]")
        with_overrides = option(with_overrides)
    return click.option(
        "--set", "set_values", multiple=True, metavar="KEY=VALUE", help="Set any key of the job file, as YAML."
    )(with_overrides)


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

    \b
    Exit codes: 0 done, 1 failed (for verify: a mismatch), 2 user error, 3 finished with failed rows,
    4 interrupted but resumable.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
@click.argument("job_file", metavar="JOB.yaml")
@override_options
@click.option("--dry-run", is_flag=True, help="Show the resolved job, its rows and its shards; start nothing.")
def run(job_file: str, overrides: Sequence[str], dry_run: bool) -> None:
    """Generate for every prompt of a job; run it again to resume what was interrupted.

    \b
    Examples:
      sevenleague run job.yaml
      sevenleague run job.yaml --dry-run
      sevenleague run job.yaml --model Qwen/Qwen3-0.6B --input 'prompts/*.parquet' --output s3://bucket/out
      sevenleague run job.yaml --temperature 0 --limit 100 --set decoding.strategy=lookahead --set decoding.width=7

    An option like --seed is applied after every --set, so it wins over --set sampling.seed=..
    """
    from jobs.run import command

    sys.exit(command(job_file, overrides, dry_run))


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
    if problem is not None:
        _fail(problem, ExitCode.USER_ERROR)
    from pipeline.errors import ConfigError, SevenLeagueError

    try:
        sys.exit(cli.main(arguments, prog_name="sevenleague", standalone_mode=False) or ExitCode.DONE)
    except click.ClickException as error:
        _fail(error.format_message(), ExitCode.USER_ERROR)
    except ConfigError as error:
        _fail(str(error), ExitCode.USER_ERROR)
    except SevenLeagueError as error:
        _fail(str(error), ExitCode.FAILED)
    except (click.Abort, KeyboardInterrupt):
        click.echo("sevenleague: interrupted, run the same command again to resume", err=True)
        sys.exit(ExitCode.INTERRUPTED)


def _fail(sentence: str, exit_code: ExitCode) -> NoReturn:
    click.echo(f"sevenleague: {sentence}", err=True)
    sys.exit(exit_code)
