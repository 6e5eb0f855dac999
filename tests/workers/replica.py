"""A tensor-parallel replica of two processes beside the one of the tests."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from pipeline.config import EngineConfig, ModelConfig
from pipeline.decoding_config import DecodingConfig
from pipeline.errors import ConfigError
from workers.engine import Engine, Request
from workers.model_loading import LoadedModel
from workers.tensor_parallel import follow, load_replica

Tokens = list[tuple[str, int, tuple[int, ...]]]
Waves = Sequence[Sequence[Request]]

# All processes are forks of one that has imported everything.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        __name__,
        "torch.distributed.tensor",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.tokenization_utils_tokenizers",
    ]
)


def decode(loaded: LoadedModel, config: EngineConfig, decoding: DecodingConfig, waves: Waves) -> Tokens:
    """Uid, index and tokens of each sample of requests that come in waves."""
    gc.collect()  # so that the engine before is gone
    engine = Engine(loaded, config, decoding)
    results = [result for wave in waves for result in engine.generate(wave)]
    return [(result.uid, result.sample_index, result.token_ids) for result in results]


class Replica:
    """Both processes, as children of this one. A model that is refused: see `refused`."""

    def __init__(self, model: ModelConfig) -> None:
        self._connection, theirs = context.Pipe()
        self.leader = context.Process(target=_lead, args=(model, theirs))
        self.leader.start()
        theirs.close()
        follower = context.Process(target=follow, args=(model, self._connection.recv(), 1), daemon=True)
        follower.start()
        self.follower_pid: int = follower.pid
        self.refused: str | None = self._connection.recv()

    def decode(self, engine: EngineConfig, decoding: DecodingConfig, waves: Waves) -> Tokens:
        self._connection.send((engine, decoding, waves))
        tokens: Tokens = self._connection.recv()
        return tokens

    def operations(self) -> set[str]:
        """What rank 0 has announced to happen to keys and values, so far."""
        self._connection.send("operations")
        names: set[str] = self._connection.recv()
        return names

    def bound_collectives(self, seconds: float) -> None:
        self._connection.send(seconds)

    def close(self) -> None:
        self.leader.kill()
        self.leader.join()


def _lead(model: ModelConfig, connection: Connection[Any, Any]) -> None:
    try:
        loaded = load_replica(model, 2, start_followers=connection.send)
    except ConfigError as error:
        connection.send(str(error))
        connection.recv()  # until the end
    connection.send(None)
    names: set[str] = set()
    announce = loaded.leader.announce

    def noting(message: Any) -> None:
        names.update(name for _, name, _ in getattr(message, "operations", ()))
        announce(message)

    loaded.leader.announce = noting
    while True:
        match connection.recv():
            case "operations":
                connection.send(names)
            case float(seconds):
                group = loaded.model._mesh_manager.get_mesh("tp").get_group()
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
            case engine, decoding, waves:
                connection.send(decode(loaded, engine, decoding, waves))
