"""How many workers a cluster has room for: what is impossible is refused at once, what is short is told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from pipeline.cluster_config import ClusterConfig
from pipeline.errors import ConfigError

SHORTAGE_PERIOD_S = 60.0

_ROUNDING = 1e-6

logger = logging.getLogger(__name__)

Resources = Mapping[str, float]
"""What one machine has in all, under Ray's names (`CPU`, `GPU`)."""


def check_resources(cluster: ClusterConfig, nodes: Sequence[Resources]) -> None:
    """Raise ConfigError where there is no room for the fewest workers asked for; Ray would wait for it forever."""
    workers = cluster.min_workers
    processes = f" of {cluster.tensor_parallel} processes" if cluster.tensor_parallel > 1 else ""
    for key, name, wanted in (
        ("gpus_per_worker", "GPU", cluster.gpus_per_replica),
        ("cpus_per_worker", "CPU", cluster.cpus_per_replica),
    ):
        total = sum(node.get(name, 0.0) for node in nodes)
        if wanted * workers > total + _ROUNDING:
            raise ConfigError(
                f"cluster.{key} asks for {wanted * workers:g} {name}s in all ({wanted:g} for each of "
                f"{workers} workers{processes}), the cluster has {total:g}"
            )
        largest = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if wanted > largest:
            raise ConfigError(f"cluster.{key} asks for {wanted:g} {name}s of one machine, the largest has {largest:g}")
    room = sum(room_on(cluster, node) for node in nodes)
    if room < workers:
        raise ConfigError(
            f"cluster.workers asks for {workers} workers of {cluster.cpus_per_replica:g} CPUs and "
            f"{cluster.gpus_per_replica:g} GPUs each, the machines of the cluster have room for {room:g}"
        )


def room_on(cluster: ClusterConfig, node: Resources) -> float:
    """How many workers one machine holds when it holds nothing else; without end where a worker asks for nothing.

    Worked example: 7 CPUs and 2 GPUs hold two workers of 2 CPUs and 1 GPU; the third would find CPUs but no GPU.
    """
    asked = (("CPU", cluster.cpus_per_replica), ("GPU", cluster.gpus_per_replica))
    rooms = [(node.get(name, 0.0) + _ROUNDING) // wanted for name, wanted in asked if wanted]
    return min(rooms, default=float("inf"))


class ShortageNotice:
    """Says now and then that a job has fewer workers than `cluster.workers` asks for, so that no wait is silent."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._wanted = cluster.min_workers
        self._next_at: float | None = None

    def see(self, now: float, placed: int) -> str | None:
        """What was said, if it was time to: `placed` workers have a machine now."""
        if placed >= self._wanted:
            self._next_at = None
        elif self._next_at is None:
            self._next_at = now + SHORTAGE_PERIOD_S
        elif now >= self._next_at:
            self._next_at = now + SHORTAGE_PERIOD_S
            sentence = f"{placed} of {self._wanted} workers have a machine; the others wait until the cluster has room"
            logger.warning(sentence)
            return sentence
        return None
