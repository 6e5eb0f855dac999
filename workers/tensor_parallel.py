"""Replicas of several processes, each with a part of every layer: transformers' tensor parallelism.

`load_replica` is rank 0, which the engine takes for the whole model; `follow` is any other rank. They run the model's
own modules: compiled kernels, packed layers, flash attention and CUDA graphs know nothing of parts.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError, TransientError
from workers.lockstep import repeat
from workers.model_loading import LoadedModel, load_model
from workers.replica_group import COLLECTIVE_TIMEOUT_S, Follower, Leader, Rendezvous, StartFollowers

logger = logging.getLogger(__name__)


def load_replica(config: ModelConfig, size: int, start_followers: StartFollowers) -> LoadedModel:
    """Load this process's part of the model as rank 0, together with the followers.

    Raises ConfigError when the model cannot be served, or not so, and TransientError when the others do not come.
    """
    leader = Leader(size)

    def distribute(hf_config: PreTrainedConfig, device: torch.device) -> DistributedConfig:
        check_divisible(config.id, hf_config, size)
        check_device(device)
        leader.start(start_followers)
        leader.join(device)
        return DistributedConfig(tp_size=size, tp_plan="auto")

    try:
        loaded = load_model(config, distribute=distribute)
    except (ConfigError, TransientError):
        leader.close()
        raise
    except Exception as error:
        leader.end("the model could not be loaded", error)
    leader.await_loaded()
    _bound_collectives(loaded.model)
    return replace(loaded, leader=leader)


def follow(config: ModelConfig, rendezvous: Rendezvous, rank: int) -> None:
    """Be another rank of a replica. Does not return: this process ends with rank 0's, or with the first error."""
    follower = Follower(rendezvous, rank)

    def distribute(hf_config: PreTrainedConfig, device: torch.device) -> DistributedConfig:
        follower.join(device)
        return DistributedConfig(tp_size=rendezvous.size, tp_plan="auto")

    try:
        loaded = load_model(config, distribute=distribute)
        follower.say_loaded()
        _bound_collectives(loaded.model)
        repeat(loaded.model, follower.announced())
    except ConfigError:
        follower.wait_for_end()  # rank 0 finds the same, and tells it
    except Exception:
        logger.critical("rank %d of a tensor-parallel replica ends", rank, exc_info=True)
        os._exit(1)


def check_divisible(model_id: str, config: PreTrainedConfig, size: int) -> None:
    """Refuse, before any weights are read, a model whose layers cannot be divided among so many processes."""
    if not config.base_model_tp_plan:
        raise ConfigError(
            f"cluster.tensor_parallel must be 1 for a model that has no tensor-parallel plan in transformers, got "
            f"{size} for {model_id!r} of type {config.model_type}"
        )
    heads = config.num_attention_heads
    for kind, number in (("attention", heads), ("key/value", getattr(config, "num_key_value_heads", None) or heads)):
        if number % size:
            raise ConfigError(
                f"cluster.tensor_parallel must divide the {number} {kind} heads of {model_id!r}, got {size}"
            )


def check_device(device: torch.device) -> None:
    """transformers distributes a model over the kind of device that torch was built for, and asks no one."""
    built_for = torch.accelerator.current_accelerator()
    if device.type != ("cpu" if built_for is None else built_for.type):
        raise ConfigError(
            f"model.device must be cuda where cluster.tensor_parallel is above 1 and torch was built for it, got "
            f"{device.type}"
        )


def _bound_collectives(model: PreTrainedModel) -> None:
    """transformers makes groups of processes with torch's time-outs of up to half an hour."""
    group = model._mesh_manager.get_mesh("tp").get_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S), group)
