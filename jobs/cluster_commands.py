"""The commands for jobs on a Ray cluster, `submit`, `stop` and `logs`, and `list`, which reads storage alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import click

from jobs.overrides import override_options


def address_option(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--address`, under the variable that Ray's own commands read."""
    return click.option(
        "--address",
        required=True,
        envvar="RAY_API_SERVER_ADDRESS",
        metavar="http://HOST:PORT",
        help="The dashboard of the cluster's head.  [variable RAY_API_SERVER_ADDRESS]",
    )(command)


@click.command()
@click.argument("job_file", metavar="JOB.yaml")
@address_option
@override_options
@click.option("--follow", is_flag=True, help="Show the job's log until it ends, and end with its exit code.")
@click.option(
    "--wheel", metavar="FILE", help="Run the packages of this wheel of sevenleague, not the ones in use here."
)
@click.option("--env", "variables", multiple=True, metavar="NAME", help="Pass this environment variable of yours on.")
def submit(
    job_file: str, address: str, overrides: Sequence[str], follow: bool, wheel: str | None, variables: Sequence[str]
) -> None:
    """Run a job on a Ray cluster, which goes on when this command has ended; submit it again to resume it.

    The job file and the code travel with the job; prompts, model and output must be where the cluster's machines find
    them. An output that has a job pending or running takes no second one.

    \b
    Examples:
      sevenleague submit job.yaml --address http://head:8265
      sevenleague submit job.yaml --address http://head:8265 --follow --set cluster.workers=8
      sevenleague submit job.yaml --address http://head:8265 --env AWS_ACCESS_KEY_ID --env AWS_SECRET_ACCESS_KEY
    """
    from jobs.submit import command

    sys.exit(command(job_file, overrides, address, wheel, variables, follows=follow))


@click.command()
@click.argument("job", metavar="OUTPUT|JOB.yaml|ID")
@address_option
def stop(job: str, address: str) -> None:
    """Stop a submitted job: its running shards get time to finish, and what is done stays.

    \b
    Examples:
      sevenleague stop s3://bucket/out --address http://head:8265
      sevenleague stop job.yaml --address http://head:8265
    """
    from jobs.stop import command

    sys.exit(command(job, address))


@click.command()
@click.argument("job", metavar="OUTPUT|JOB.yaml|ID")
@address_option
@click.option("--follow", is_flag=True, help="Until the job ends; the exit code is the job's.")
def logs(job: str, address: str, follow: bool) -> None:
    """Show what a submitted job has printed; of several submissions to one output, the last one's.

    \b
    Examples:
      sevenleague logs job.yaml --address http://head:8265
      sevenleague logs s3://bucket/out --address http://head:8265 --follow
    """
    from jobs.logs import command

    sys.exit(command(job, address, follows=follow))


@click.command("list")
@click.argument("root", metavar="OUTPUT_ROOT")
@click.option("--json", "as_json", is_flag=True, help="One JSON list on stdout.")
def list_jobs(root: str, as_json: bool) -> None:
    """Tell how far each job below a folder or URL is, from storage alone.

    \b
    Examples:
      sevenleague list out
      sevenleague list s3://bucket/generations --json
    """
    from jobs.listing import command

    command(root, as_json)


cluster_commands = (submit, stop, logs, list_jobs)
