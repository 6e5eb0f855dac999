"""`sevenleague run`: a job from its file to its output."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from jobs.exit_codes import ExitCode
from jobs.progress import progress_display, stderr_console
from jobs.ray_session import log_as_configured, ray_session, worker_starter
from jobs.tables import print_acceptance
from pipeline import storage
from pipeline.config import JobConfig
from pipeline.config_io import dump_job, load_job, parse_job
from pipeline.preparation import RetryFailed, prepare
from pipeline.records import ProgressCallback
from pipeline.redaction import redacted, without_credentials
from pipeline.shards import plan
from pipeline.summary import JobSummary


def run_job(
    config: JobConfig | Mapping[str, Any] | str,
    overrides: Sequence[str] = (),
    on_progress: ProgressCallback | None = None,
    retry_failed: RetryFailed | None = None,
) -> JobSummary:
    """Run a job, or resume it: config, plain data, or the path of a job file, with overrides like `sampling.seed=1`.

    Mistakes in the job show before Ray is touched. It uses the Ray session that this process has, else the cluster at
    `cluster.address`, else one started on this machine for the time of the job. Raises `ConfigError` for mistakes in
    the job and `PermanentError` for what no retry can help; failed rows are no error (see `JobSummary.rows_failed`).
    `retry_failed` also does committed rows again that failed, all of them or those of one error type.
    """
    from pipeline import driver

    prepared = prepare(resolve(config, overrides), retry_failed)
    with (
        ray_session(prepared.config) if prepared.remaining else nullcontext(),
        worker_starter(prepared.config) as start,
    ):
        return driver.run(prepared, start, on_progress or (lambda progress: None))


def resolve(config: JobConfig | Mapping[str, Any] | str, overrides: Sequence[str] = ()) -> JobConfig:
    if isinstance(config, str):
        return load_job(config, overrides)
    return parse_job(config.model_dump() if isinstance(config, JobConfig) else config, overrides)


def command(job_file: str, overrides: Sequence[str], dry_run: bool, retry_failed: RetryFailed | None) -> ExitCode:
    """The CLI command."""
    # Until the driver listens for both itself, SIGTERM is as good as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = load_job(job_file, overrides)
    console = Console(highlight=False)
    if dry_run:
        _show_plan(console, config)
        return ExitCode.DONE
    log_as_configured(config)
    with progress_display(stderr_console(), as_json=config.cluster.log_format == "json") as on_progress:
        summary = run_job(config, on_progress=on_progress, retry_failed=retry_failed)
    _show_summary(console, config, summary)
    if summary.state == "interrupted":
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED_ROWS if summary.rows_failed else ExitCode.DONE


def _show_plan(console: Console, config: JobConfig) -> None:
    job_plan = plan(config)
    console.print(redacted(dump_job(config)), markup=False, soft_wrap=True)
    console.print(
        f"{job_plan.num_rows:,} rows of {len(job_plan.files):,} files, in {len(job_plan.shards):,} shards; "
        f"{config.sampling.n:,} samples of each."
    )


def _show_summary(console: Console, config: JobConfig, summary: JobSummary) -> None:
    print_acceptance(console, summary.stats)
    for error_type, count in sorted(summary.errors.items()):
        console.print(f"failed: {count:,} samples with {error_type}", markup=False)
    if summary.num_looping:
        console.print(f"{summary.num_looping:,} samples end in a loop (the same piece over and over).")
    output = without_credentials(storage.absolute(config.output.path))
    if summary.state == "interrupted":
        console.print(f"Interrupted; run the same command again to resume. Output so far: {output}", soft_wrap=True)
    else:
        console.print(f"{summary.rows_ok:,} of {summary.rows_total:,} samples are in {output}", soft_wrap=True)
