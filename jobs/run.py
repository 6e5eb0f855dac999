"""`sevenleague run`: a job from its file to its output."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from jobs.estimate import calibration_lines, plan_lines, prompt_lines
from jobs.exit_codes import ExitCode
from jobs.progress import progress_display, stderr_console
from jobs.push import check_push, push_finished
from jobs.ray_session import log_as_configured, ray_session, worker_starter
from jobs.tables import print_acceptance
from pipeline import storage
from pipeline.config import JobConfig
from pipeline.config_io import dump_job, load_job, parse_job
from pipeline.errors import ConfigError
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

    resolved = resolve(config, overrides)
    check_push(resolved)
    prepared = prepare(resolved, retry_failed)
    with (
        ray_session(prepared.config) if prepared.remaining else nullcontext(),
        worker_starter(prepared.config) as start,
    ):
        summary = driver.run(prepared, start, on_progress or (lambda progress: None))
    push_finished(prepared.config, summary)
    return summary


def resolve(config: JobConfig | Mapping[str, Any] | str, overrides: Sequence[str] = ()) -> JobConfig:
    if isinstance(config, str):
        return load_job(config, overrides)
    return parse_job(config.model_dump() if isinstance(config, JobConfig) else config, overrides)


def command(
    job_file: str, overrides: Sequence[str], dry_run: bool, retry_failed: RetryFailed | None, calibrated: bool = False
) -> ExitCode:
    """The CLI command. `calibrated`: a dry run also measures."""
    # Until the driver listens for both itself, SIGTERM is as good as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = load_job(job_file, overrides)
    console = Console(highlight=False)
    if dry_run:
        _show_plan(console, config, calibrated)
        return ExitCode.DONE
    log_as_configured(config)
    with progress_display(stderr_console(), as_json=config.cluster.log_format == "json") as on_progress:
        summary = run_job(config, on_progress=on_progress, retry_failed=retry_failed)
    _show_summary(console, config, summary)
    if summary.state == "interrupted":
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED_ROWS if summary.rows_failed else ExitCode.DONE


def _show_plan(console: Console, config: JobConfig, calibrated: bool) -> None:
    """The resolved job, and what it will take."""
    job_plan = plan(config)
    console.print(redacted(dump_job(config)), markup=False, soft_wrap=True)
    for line in plan_lines(config, job_plan):
        console.print(line, soft_wrap=True)
    from jobs import calibration  # imports torch
    from workers.model_loading import context_length, load_tokenizer

    prompts = calibration.sampled_prompts(config, job_plan)
    try:
        tokenizer, longest = load_tokenizer(config.model), context_length(config.model)
        figures = calibration.measure_prompts(config, prompts, tokenizer, longest)
    except ConfigError as error:
        if calibrated:
            raise
        console.print(f"Prompt lengths are not known: {error}", markup=False, soft_wrap=True)
        return
    for line in prompt_lines(config, figures):
        console.print(line, soft_wrap=True)
    if calibrated:
        measured = calibration.calibrate(config, job_plan, prompts)
        for line in calibration_lines(config, job_plan.num_rows * figures.served_share(config), measured):
            console.print(line, soft_wrap=True)


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
