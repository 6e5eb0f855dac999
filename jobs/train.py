"""`sevenleague train`: the arms of a training file, one after another, on Ray Train."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.exit_codes import ExitCode
from jobs.progress import stderr_console
from jobs.ray_session import ray_cluster
from jobs.train_progress import TrainDisplay, train_display
from pipeline import storage
from pipeline.cluster_config import ClusterConfig
from pipeline.errors import ConfigError, PermanentError
from pipeline.train_config import BASE, Arm, TrainConfig, arms_of, load_train

POLL_S = 0.5

QUIET_RAY_TRAIN = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}


def command(
    config_file: str, output: str, json_file: str | None, overrides: Sequence[str], names: Sequence[str]
) -> ExitCode:
    """The CLI command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = load_train(config_file, overrides)
    is_base_alone = names == [BASE] and config.base.pretrain is not None
    arms = [] if is_base_alone else chosen_arms(arms_of(config), names)
    with train_display(stderr_console()) as display:
        results = run_training(config, arms, output, display)
    if json_file is not None:
        storage.write_bytes(json_file, (json.dumps({"arms": results}, indent=1) + "\n").encode())
    _show(results)
    return ExitCode.DONE


def chosen_arms(arms: Sequence[Arm], names: Sequence[str]) -> list[Arm]:
    """The arms of these names (with or without their seed), in the order of the file; all without names."""
    chosen: list[Arm] = []
    found: set[str] = set()
    for arm in arms:
        matching = {arm.name, arm.name.removesuffix(f"-{arm.config.training.seed}")} & {*names}
        found |= matching
        if matching or not names:
            chosen.append(arm)
    unknown = [name for name in names if name not in found]
    if unknown:
        known = ", ".join(arm.name for arm in arms)
        raise ConfigError(f"--arms must name arms of the file ({known}), got {unknown[0]!r}")
    return chosen


def run_training(
    config: TrainConfig, arms: Sequence[Arm], output: str, display: TrainDisplay | None = None
) -> list[dict[str, Any]]:
    """Train the base, if the file has one to train, and the arms that are not trained yet; the figures of all.

    Without arms it is the base alone, whose figures are given then.

    It uses the Ray session that this process has, else the cluster at `cluster.address`, else one started on this
    machine. Raises ConfigError for mistakes in the file.
    """
    _check_installed()
    os.environ.update({key: value for key, value in QUIET_RAY_TRAIN.items() if key not in os.environ})
    from workers.ptp.arms import adapt_of, base_figures, finished, needs_base
    from workers.ptp.process import clear_status, work

    output = storage.absolute(output)
    storage.check_writable(output)
    for arm in arms:
        adapt_of(arm.config)
    left = [arm for arm in arms if finished(arm, output) is None]
    with_base = needs_base(config, output)
    if left or with_base:
        clear_status(output, len(left) + with_base)
        threads = max(1, int(config.cluster.cpus_per_worker))
        environment = {**QUIET_RAY_TRAIN, "OMP_NUM_THREADS": str(threads)}
        with ray_cluster(config.cluster, environment, shows_logs=False):
            _run_on_ray(work(config, output, left, with_base=with_base), config.cluster, output, display)
    if not arms:
        return base_figures(output)
    return [result for arm in arms if (result := finished(arm, output)) is not None]


def _run_on_ray(work: dict[str, Any], cluster: ClusterConfig, output: str, display: TrainDisplay | None) -> None:
    """Run the processes to their end, in a thread: in the main thread Ray Train would take over Ctrl-C."""
    from workers.ptp.process import read_status

    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            _fit(work, cluster, output)
        except BaseException as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    number = 0
    while thread.is_alive():
        thread.join(POLL_S)
        while display is not None and (status := read_status(output, number)) is not None:
            display.show(status)
            if not status.ended:
                break
            number += 1
    if outcome[0] is not None:
        raise _explained(outcome[0]) from outcome[0]


def _fit(work: dict[str, Any], cluster: ClusterConfig, output: str) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from workers.ptp.process import run_work

    logging.getLogger("ray.train").setLevel(logging.ERROR)
    resources = {"CPU": cluster.cpus_per_worker}
    if cluster.gpus_per_worker:
        resources["GPU"] = cluster.gpus_per_worker
    TorchTrainer(
        run_work,
        train_loop_config=work,
        scaling_config=ScalingConfig(
            num_workers=cluster.max_workers, use_gpu=cluster.gpus_per_worker > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(name=f"run-{time.time_ns()}", storage_path=storage.join(output, "_ray")),
    ).fit()


def _explained(error: BaseException) -> BaseException:
    """The user's mistake that a process met, where it was one; else what went wrong, in one sentence."""
    failures = getattr(error, "worker_failures", None) or {0: error}
    for failure in failures.values():
        cause: Any = failure
        while cause is not None:
            if isinstance(cause, ConfigError):
                return ConfigError(str(cause))
            cause = getattr(cause, "_base_exc", None) or getattr(cause, "cause", None) or cause.__cause__
    if not isinstance(error, Exception):
        return error
    lines = str(next(iter(failures.values()))).strip().splitlines()
    return PermanentError(f"the training failed: {lines[-1] if lines else type(error).__name__}")


def _check_installed() -> None:
    for package in ("pandas", "tensorboard"):
        if find_spec(package) is None:
            raise ConfigError(
                f"training needs the package {package!r}, which is not installed: pip install 'sevenleague[train]'"
            )


def _show(results: Sequence[dict[str, Any]]) -> None:
    names = ("loss", "correct", "accepted", "correct_shuffled", "perplexity", "reference_perplexity")
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("arm")
    for name in (*names, "steps", "seconds"):
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        figures = ("-" if result.get(name) is None else f"{result[name]:.3f}" for name in names)
        table.add_row(result["name"], *figures, str(result["steps"]), f"{result['seconds']:.0f}")
    Console(file=sys.stdout, highlight=False).print(table)
