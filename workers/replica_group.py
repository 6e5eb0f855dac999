"""The processes of one tensor-parallel replica: how they find each other, talk, and die together.

They run on one machine, so all goes over its loopback interface. Rank 0 listens; the others connect, prove that they
know its secret, and from then on read what rank 0 announces. The connection also tells of death: when one process ends,
all others do at once, wherever they are. A half of a model is of no use, and whoever started the replica starts it
again as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from pipeline.errors import TransientError
from workers.kv_storage import Operation

START_TIMEOUT_S = 300.0
"""Until a follower must have connected: Ray may first have to end the processes of the replica before."""
COLLECTIVE_TIMEOUT_S = 120.0
"""Until the other processes must have joined in a collective operation."""

LOOPBACK = "127.0.0.1"
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0 waits for the others: a port of torch's store and one of its own."""

    size: int
    store_port: int
    port: int
    secret: bytes = field(repr=False)


StartFollowers = Callable[[Rendezvous], object]
"""Starts ranks 1, 2, .. (see `tensor_parallel.follow`). What it returns is kept as long as the replica lives."""


class Leader:
    """Rank 0's end of the connections. `close` it when the replica comes to nothing; else it lasts as the process."""

    def __init__(self, size: int) -> None:
        secret = secrets.token_bytes(32)
        self._listener = Listener((LOOPBACK, 0), authkey=secret)
        self._store, store_port = _open_store(size)
        self.operations: list[Operation] = []
        """What happened to caches since the others were last told."""
        self.rendezvous = Rendezvous(size, store_port, self._listener.address[1], secret)
        self._followers: dict[int, Connection[Any, Any]] = {}
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_closed = False
        self._started: object = None

    def start(self, start_followers: StartFollowers) -> None:
        """Raises TransientError when the others do not come."""
        threading.Thread(target=self._accept, name="followers", daemon=True).start()
        self._started = start_followers(self.rendezvous)
        self._await_each("connected", START_TIMEOUT_S)

    def join(self, device: torch.device) -> None:
        """Make torch's process group, together with the others."""
        _join_group(self.rendezvous, self._store, 0, device)

    def await_loaded(self) -> None:
        """Until the others have their models: collectives have too short a time-out to wait for that."""
        self._await_each("loaded", None)

    def announce(self, message: object) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            for follower in self._followers.values():
                follower.send_bytes(data)
        except OSError as error:
            self.end(f"the connection to another rank broke: {error}")

    def end(self, reason: str, error: Exception | None = None) -> NoReturn:
        """End this process: the ranks are out of step for good."""
        logger.critical("the tensor-parallel replica ends: %s", reason, exc_info=error)
        os._exit(1)

    def close(self) -> None:
        """Let the others end; this process goes on."""
        self._is_closed = True
        self._started = None
        self._listener.close()
        for follower in self._followers.values():
            _hang_up(follower)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _accept(self) -> None:
        while len(self._followers) < self.rendezvous.size - 1:
            try:
                connection = self._listener.accept()
                rank = connection.recv()
            except Exception as error:
                if self._is_closed:
                    return
                logger.warning("somebody connected who is no rank of this replica: %s", error)
                continue
            if self._is_closed:  # the others see the connection end
                return
            self._followers[rank] = connection
            threading.Thread(target=self._read, args=(rank, connection), name=f"rank-{rank}", daemon=True).start()
            self._news.put("connected")

    def _read(self, rank: int, connection: Connection[Any, Any]) -> None:
        try:
            while True:
                self._news.put(connection.recv())
        except (EOFError, OSError):
            if not self._is_closed:
                self.end(f"rank {rank} has died")

    def _await_each(self, news: str, timeout_s: float | None) -> None:
        for rank in range(1, self.rendezvous.size):
            try:
                said = self._news.get(timeout=timeout_s)
            except queue.Empty:
                raise TransientError(f"rank {rank} of a tensor-parallel replica did not start") from None
            assert said == news


class Follower:
    """The end of the connection of another rank. This process ends with that of rank 0."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._connection = Client((LOOPBACK, rendezvous.port), authkey=rendezvous.secret)
        self._connection.send(rank)
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="rank-0", daemon=True).start()

    def join(self, device: torch.device) -> None:
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = TCPStore(LOOPBACK, self._rendezvous.store_port, self._rendezvous.size, False, timeout)
        _join_group(self._rendezvous, store, self._rank, device)

    def say_loaded(self) -> None:
        self._connection.send("loaded")

    def wait_for_end(self) -> NoReturn:
        while True:
            self._messages.get()

    def announced(self) -> Iterator[Any]:
        """What rank 0 announces, for ever."""
        while True:
            yield self._messages.get()

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def _hang_up(connection: Connection[Any, Any]) -> None:
    """`close` would not tell the other end while a thread of this one reads."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own, contextlib.suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)


def _open_store(size: int) -> tuple[TCPStore, int]:
    """torch's key-value store, on a free port that no other machine can reach."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = TCPStore(LOOPBACK, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, port


def _join_group(rendezvous: Rendezvous, store: Store, rank: int, device: torch.device) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        _BACKENDS[device.type],
        store=store,
        rank=rank,
        world_size=rendezvous.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
