"""The Ray that a job runs on: the caller's own session, a cluster by its address, or one started here for the job."""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
import pipeline
import workers
from jobs.ray_token import asks_for_token, check_token_mode, refusal
from pipeline import logs
from pipeline.cluster_config import ClusterConfig
from pipeline.config import JobConfig
from pipeline.errors import ConfigError, ConnectionLost

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


def log_as_configured(config: JobConfig) -> None:
    """The log of this process, and of its workers as Ray passes it on. To be called before Ray is imported."""
    logs.configure(config.cluster.log_format)
    if config.cluster.log_format == "json":
        os.environ.setdefault("RAY_DISABLE_WORKER_LOG_PREFIX", "1")  # lines stay JSON
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")


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
    except ConnectionLost:
        raise  # to say good-bye to a head that is gone takes for ever
    except BaseException:
        ray.shutdown()
        raise
    else:
        ray.shutdown()


@contextmanager
def worker_starter(config: JobConfig) -> Iterator[Callable[[int], ActorHandle[Any]]]:
    """Starts a process for worker number i, or several that are one worker. The driver alone decides about retries and
    about other processes.
    """
    if config.cluster.tensor_parallel == 1:
        yield _start_single(config)
    else:
        from jobs.replicas import Replicas

        with Replicas(config) as replicas:
            yield replicas.start


def _start_single(config: JobConfig) -> Callable[[int], ActorHandle[Any]]:
    @functools.cache  # 26 ms for every worker otherwise: Ray sends a class anew whenever it is made one
    def actor_class() -> Any:
        import ray

        from workers.actor import MAX_CONCURRENCY, GenerationWorker

        return ray.remote(GenerationWorker).options(
            num_cpus=config.cluster.cpus_per_worker,
            num_gpus=config.cluster.gpus_per_worker,
            max_concurrency=MAX_CONCURRENCY,
            max_restarts=0,
            max_task_retries=0,
        )

    def start(index: int) -> ActorHandle[Any]:
        from ray.actor import ActorHandle

        handle = actor_class().remote(config, f"worker-{index}", own_process=True)
        assert isinstance(handle, ActorHandle)
        return handle

    return start


def _start_local_ray(config: ClusterConfig, environment: Mapping[str, str], shows_logs: bool) -> None:
    """A Ray of this machine's size, for this process alone; it ends with this process, however that ends."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # CPUs are shares of time here: more workers than cores are slow, not impossible.
    needed = math.ceil(config.min_workers * config.cpus_per_replica)
    with _own_sigterm():
        context = ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, needed),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=config.dashboard,
            dashboard_host="127.0.0.1",  # it lets whoever reaches it run code
            logging_level=logging.ERROR,
            log_to_driver=shows_logs,
            runtime_env={"env_vars": dict(environment)},
        )
    if config.dashboard:
        print(f"Ray's dashboard: http://{context.dashboard_url}", file=sys.stderr)


def _connect(address: str, environment: Mapping[str, str], shows_logs: bool) -> None:
    import ray
    from ray.exceptions import AuthenticationError, RayError

    packages = [str(Path(package.__path__[0])) for package in (pipeline, workers, jobs)]
    try:
        if address != "auto":
            check_reachable(address)
            check_token_mode(address)
        with _own_sigterm():
            ray.init(
                address=address,
                logging_level=logging.ERROR,
                log_to_driver=shows_logs,
                runtime_env={"py_modules": packages, "env_vars": dict(environment)},
            )
    except AuthenticationError as error:
        raise refusal("cluster.address", address) from error
    except (OSError, ValueError, RayError) as error:
        if isinstance(error, ConnectionError) and address != "auto" and asks_for_token(address):  # for another one
            raise refusal("cluster.address", address) from error
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


def check_reachable(address: str) -> None:
    """Raises OSError or ValueError at once, where Ray would try for minutes and then end the process."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
