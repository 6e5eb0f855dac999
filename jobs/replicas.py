"""Workers of several processes: a tensor-parallel replica is a group of actors on one machine.

Each replica has a placement group with a bundle for every process. The driver deals with the actor of rank 0 alone,
which starts the others in its own group, so that a new rank 0 comes with new ones. Ray ends actors with the one that
started them, and the processes watch each other besides (see `workers.replica_group`).
"""

from __future__ import annotations

import functools
import signal
from types import TracebackType
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.cluster_config import ClusterConfig
from pipeline.config import JobConfig
from pipeline.errors import ConnectionLost
from workers.actor import MAX_CONCURRENCY, GenerationWorker, worker_threads
from workers.replica_group import Rendezvous
from workers.tensor_parallel import follow


class Replicas:
    """Starts replicas; their placement groups go when the context ends, or when another takes the same number."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._actor_class = ray.remote(GenerationWorker)  # once: Ray sends a class anew whenever it is made one
        self._groups: dict[int, PlacementGroup] = {}

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not isinstance(error, ConnectionLost):  # there is nobody who could remove them
            for index in list(self._groups):
                self._remove(index)

    def start(self, index: int) -> ActorHandle[Any]:
        """The actor of rank 0. It waits for a machine that has room for the whole replica."""
        self._remove(index)
        cluster = self._config.cluster
        group = self._groups[index] = placement_group([_bundle(cluster)] * cluster.tensor_parallel, "STRICT_PACK")
        actor_class = self._actor_class.options(
            max_concurrency=MAX_CONCURRENCY, max_restarts=0, max_task_retries=0, **_placed(cluster, group, rank=0)
        )
        start_followers = functools.partial(start_followers_of, self._config)
        handle = actor_class.remote(self._config, f"worker-{index}", own_process=True, start_followers=start_followers)
        assert isinstance(handle, ActorHandle)
        return handle

    def _remove(self, index: int) -> None:
        if (group := self._groups.pop(index, None)) is not None:
            remove_placement_group(group)


def start_followers_of(config: JobConfig, rendezvous: Rendezvous) -> list[ActorHandle[Any]]:
    """Called in the actor of rank 0: an actor for each other rank, in the group of this one."""
    group = get_current_placement_group()
    assert group is not None
    followers: list[ActorHandle[Any]] = []
    for rank in range(1, rendezvous.size):
        placed = _placed(config.cluster, group, rank)
        follower: Any = ray.remote(FollowerActor).options(max_restarts=0, max_task_retries=0, **placed).remote()
        follower.follow.remote(config, rendezvous, rank)
        followers.append(follower)
    return followers


class FollowerActor:
    """A rank of a replica but the first. It ends with rank 0, also when that one drains after a SIGTERM to both."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def follow(self, config: JobConfig, rendezvous: Rendezvous, rank: int) -> None:
        torch.set_num_threads(worker_threads(config))
        follow(config.model, rendezvous, rank)


def _bundle(cluster: ClusterConfig) -> dict[str, float]:
    wanted = {"CPU": cluster.cpus_per_worker, "GPU": cluster.gpus_per_worker}
    return {name: amount for name, amount in wanted.items() if amount}


def _placed(cluster: ClusterConfig, group: PlacementGroup, rank: int) -> dict[str, Any]:
    return {
        "num_cpus": cluster.cpus_per_worker,
        "num_gpus": cluster.gpus_per_worker,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
    }
