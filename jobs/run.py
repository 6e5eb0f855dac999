"""`sevenleague run`: a job from its file to its output, on a Ray cluster that is started here unless there is one."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import jobs
import pipeline
import workers
from jobs.exit_codes import ExitCode
from jobs.progress import progress_display, stderr_console
from jobs.tables import drafter_table
from pipeline import storage
from pipeline.config import JobConfig
from pipeline.config_io import dump_job, load_job, parse_job
from pipeline.errors import ConfigError
from pipeline.preparation import prepare
from pipeline.records import ProgressCallback
from pipeline.shards import plan
from pipeline.summary import JobSummary

if TYPE_CHECKING:
    from ray.actor import ActorHandle

OBJECT_STORE_BYTES = 80 * 2**20
"""Near Ray's minimum: only tasks and receipts travel, never rows."""

QUIET_WORKERS = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def run_job(
    config: JobConfig | Mapping[str, Any] | str,
    overrides: Sequence[str] = (),
    on_progress: ProgressCallback | None = None,
) -> JobSummary:
    """Run a job, or resume it: config, plain data, or the path of a job file, with overrides like `sampling.seed=1`.

    Mistakes in the job show before Ray is touched. It uses the Ray session that this process has, else the cluster at
    `cluster.address`, else one started on this machine for the time of the job. Raises `ConfigError` for mistakes in
    the job and `PermanentError` for what no retry can help; failed rows are no error (see `JobSummary.rows_failed`).
    """
    from pipeline import driver

    prepared = prepare(resolve(config, overrides))
    with ray_session(prepared.config) if prepared.remaining else nullcontext():
        return driver.run(prepared, worker_starter(prepared.config), on_progress or (lambda progress: None))


def resolve(config: JobConfig | Mapping[str, Any] | str, overrides: Sequence[str] = ()) -> JobConfig:
    if isinstance(config, str):
        return load_job(config, overrides)
    return parse_job(config.model_dump() if isinstance(config, JobConfig) else config, overrides)


@contextmanager
def ray_session(config: JobConfig) -> Iterator[None]:
    """A connection to Ray that ends with the context, or the one that this process has already."""
    import ray

    from workers.actor import worker_threads

    if ray.is_initialized():
        yield
        return
    environment = {**QUIET_WORKERS, "OMP_NUM_THREADS": str(worker_threads(config))}
    try:
        if config.cluster.address is None:
            _start_local_ray(config, environment)
        else:
            _connect(config.cluster.address, environment)
        yield
    finally:
        ray.shutdown()


def worker_starter(config: JobConfig) -> Callable[[int], ActorHandle[Any]]:
    """Starts worker number i. The driver alone decides about retries: Ray restarts processes but repeats no calls."""

    def start(index: int) -> ActorHandle[Any]:
        import ray
        from ray.actor import ActorHandle

        from workers.actor import MAX_CONCURRENCY, GenerationWorker

        actor_class = ray.remote(GenerationWorker).options(
            num_cpus=config.cluster.cpus_per_worker,
            num_gpus=config.cluster.gpus_per_worker,
            max_concurrency=MAX_CONCURRENCY,
            max_restarts=-1,
            max_task_retries=0,
        )
        handle = actor_class.remote(config, f"worker-{index}")
        assert isinstance(handle, ActorHandle)
        return handle

    return start


def _start_local_ray(config: JobConfig, environment: Mapping[str, str]) -> None:
    """A Ray of this machine's size, for this process alone; it ends with this process, however that ends."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # CPUs are shares of time here: more workers than cores are slow, not impossible.
    needed = math.ceil(config.cluster.workers * config.cluster.cpus_per_worker)
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, needed),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": dict(environment)},
    )


def _connect(address: str, environment: Mapping[str, str]) -> None:
    import ray

    packages = [str(Path(package.__path__[0])) for package in (pipeline, workers, jobs)]
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            runtime_env={"py_modules": packages, "env_vars": dict(environment)},
        )
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"cluster.address must be a running Ray cluster, got {address!r}: {error}") from error


def command(job_file: str, overrides: Sequence[str], dry_run: bool) -> ExitCode:
    """The CLI command."""
    config = load_job(job_file, overrides)
    console = Console(highlight=False)
    if dry_run:
        _show_plan(console, config)
        return ExitCode.DONE
    with progress_display(stderr_console()) as on_progress:
        summary = run_job(config, on_progress=on_progress)
    _show_summary(console, config, summary)
    if summary.state == "interrupted":
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED_ROWS if summary.rows_failed else ExitCode.DONE


def _show_plan(console: Console, config: JobConfig) -> None:
    job_plan = plan(config)
    console.print(dump_job(config), markup=False, soft_wrap=True)
    console.print(
        f"{job_plan.num_rows:,} rows of {len(job_plan.files):,} files, in {len(job_plan.shards):,} shards; "
        f"{config.sampling.n:,} samples of each."
    )


def _show_summary(console: Console, config: JobConfig, summary: JobSummary) -> None:
    console.print(drafter_table(summary.stats))
    for error_type, count in sorted(summary.errors.items()):
        console.print(f"failed: {count:,} samples with {error_type}", markup=False)
    output = storage.absolute(config.output.path)
    if summary.state == "interrupted":
        console.print(f"Interrupted; run the same command again to resume. Output so far: {output}", soft_wrap=True)
    else:
        console.print(f"{summary.rows_ok:,} of {summary.rows_total:,} samples are in {output}", soft_wrap=True)
