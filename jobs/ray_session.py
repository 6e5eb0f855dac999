"""The Ray that a job runs on: the caller's own session, a cluster by its address, or one started here for the job."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipeline
import workers
from pipeline.config import ClusterConfig, JobConfig
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

OBJECT_STORE_BYTES = 80 * 2**20
"""Near Ray's minimum: only tasks and receipts travel, never rows."""

CONNECT_S = 10.0

QUIET_WORKERS = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


@contextmanager
def ray_session(config: JobConfig) -> Iterator[None]:
    """A connection to Ray for a generation job (see `ray_cluster`)."""
    from workers.actor import worker_threads

    with ray_cluster(config.cluster, {"OMP_NUM_THREADS": str(worker_threads(config))}):
        yield


@contextmanager
def ray_cluster(config: ClusterConfig, environment: Mapping[str, str], *, shows_logs: bool = True) -> Iterator[None]:
    """A connection to Ray that ends with the context, or the one that this process has already.

    `environment` is that of its workers, besides what keeps them quiet; `shows_logs`: what they print appears here.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    environment = {**QUIET_WORKERS, **environment}
    try:
        if config.address is None:
            _start_local_ray(config, environment, shows_logs)
        else:
            _connect(config.address, environment, shows_logs)
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


def _start_local_ray(config: ClusterConfig, environment: Mapping[str, str], shows_logs: bool) -> None:
    """A Ray of this machine's size, for this process alone; it ends with this process, however that ends."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # CPUs are shares of time here: more workers than cores are slow, not impossible.
    needed = math.ceil(config.workers * config.cpus_per_worker)
    with _own_sigterm():
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, needed),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=shows_logs,
            runtime_env={"env_vars": dict(environment)},
        )


def _connect(address: str, environment: Mapping[str, str], shows_logs: bool) -> None:
    import ray

    packages = [str(Path(package.__path__[0])) for package in (pipeline, workers)]
    try:
        if address != "auto":
            _check_reachable(address)
        with _own_sigterm():
            ray.init(
                address=address,
                logging_level=logging.ERROR,
                log_to_driver=shows_logs,
                runtime_env={"py_modules": packages, "env_vars": dict(environment)},
            )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cluster.address must be auto or the host:port of a running Ray cluster, got {address!r}: {error}"
        ) from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps the handler of SIGTERM: `ray.init` sets one of its own, which ends the process with code 15."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _check_reachable(address: str) -> None:
    """Raises OSError or ValueError at once, where Ray would try for minutes and then end the process."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
