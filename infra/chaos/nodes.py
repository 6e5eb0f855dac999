"""A Ray cluster of a head that runs no workers and two nodes that run one each, all on this machine."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from infra.chaos import processes

_OBJECT_STORE_BYTES = 80 * 2**20
_NODES = 2


class Nodes:
    """Started at the first `ensure`; `environment` is that of all its processes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._cluster: Any = None
        self._nodes: list[Any] = []

    def ensure(self) -> str:
        """The address of a cluster that is whole."""
        from ray.cluster_utils import Cluster

        with _environment(self._environment):
            if self._cluster is None:
                self._cluster = Cluster(initialize_head=True, head_node_args=_arguments(0))
            while len(self._nodes) < _NODES:
                self._nodes.append(self._cluster.add_node(**_arguments(1)))
        return str(self._cluster.address)

    def kill_node(self, rng: random.Random) -> str:
        """A node dies with all that runs on it, as when its machine loses power; a fresh one takes its place."""
        node = self._nodes.pop(rng.randrange(len(self._nodes)))
        self._kill(node)
        self._cluster.remove_node(node, allow_graceful=False)
        self.ensure()
        return f"a node, and {self._cluster.address} has a fresh one"

    def kill_all(self) -> None:
        """Head and nodes die at once."""
        if self._cluster is None:
            return
        for node in self._cluster.list_all_nodes():
            self._kill(node)
        with _environment(self._environment):
            self._cluster.shutdown()
        self._cluster, self._nodes = None, []

    def _kill(self, node: Any) -> None:
        pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
        processes.kill(process for pid in pids for process in processes.tree(pid))


def _arguments(cpus: int) -> dict[str, Any]:
    return {
        "num_cpus": cpus,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Ray's processes take over this process's environment; its handler of SIGTERM is not to replace ours."""
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ.update(variables)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        os.environ.clear()
        os.environ.update(before)
