"""From `model` in a job file to a transformers model that the engine can serve, or one sentence that says why not."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from workers.model_files import WEIGHTS, locate, revision_of, weight_files
from workers.replica_group import Leader

Distribute = Callable[[PreTrainedConfig, torch.device], DistributedConfig]
"""Called when a model's configuration is known: how the processes that load it together share its weights."""

SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, with all that a job needs to know about it.

    `name` is `model.id` as given; `revision` changes whenever the files do; `max_context` counts prompt and output.
    With a `leader`, the other processes of a tensor-parallel replica hold the rest of the weights.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str
    eos_token_ids: frozenset[int]
    max_context: int
    leader: Leader | None = None


def load_model(
    config: ModelConfig, device: torch.device | None = None, distribute: Distribute | None = None
) -> LoadedModel:
    """Load weights and tokenizer, on `device` or else where `config.device` says.

    With `distribute`, only this process's part of the weights. Every call gives a model of its own with a configuration
    of its own. Raises ConfigError when the model is not found or cannot be served.
    """
    device = device_of(config) if device is None else device
    transformers.logging.disable_progress_bar()
    folder = locate(config, weights=True)
    with _explained(config):
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    _check_config(config.id, hf_config)
    _check_weights(config, folder)
    distribution = None if distribute is None else distribute(hf_config, device)
    with _explained(config):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
            device_map={"": device} if distribution is None else None,
            distributed_config=distribution,
            use_safetensors=None if config.allow_pickle else True,
            weights_only=True,  # a pickle may hold tensors and nothing that runs
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    if report["missing_keys"]:  # transformers would go on with random numbers in their place
        first = min(report["missing_keys"])
        raise ConfigError(f"model.id must have all its weights, got {config.id!r} without {first}")
    _check_attention(config.id, model)
    tokenizer = _tokenizer(config, folder)
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        name=config.id,
        revision=revision_of(folder),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_context=_max_context(config.id, model.config),
    )


def check_model(config: ModelConfig) -> None:
    """Refuse what configuration and tokenizer alone show that `load_model` would refuse. Raises ConfigError."""
    folder = locate(config, weights=False)
    with _explained(config):
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    _check_config(config.id, hf_config)
    _max_context(config.id, hf_config)
    _tokenizer(config, folder)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer alone. Weights are neither downloaded nor read (but a GGUF file is converted whole, once)."""
    return _tokenizer(config, locate(config, weights=False))


def context_length(config: ModelConfig) -> int:
    """The context length of a model, from its configuration alone."""
    folder = locate(config, weights=False)
    with _explained(config):
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    return _max_context(config.id, hf_config)


def device_of(config: ModelConfig) -> torch.device:
    """Where this process computes."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device must be cpu or auto on a worker without a CUDA device, got cuda")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _tokenizer(config: ModelConfig, folder: str) -> PreTrainedTokenizerBase:
    with _explained(config):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)


@contextlib.contextmanager
def _explained(config: ModelConfig) -> Iterator[None]:
    """What transformers raises for broken files, unknown architectures and missing packages, in one sentence."""
    try:
        yield
    except UnpicklingError as error:
        raise ConfigError(
            f"model.id must be a model whose pickled weights hold nothing but tensors, got {config.id!r}"
        ) from error
    except (ImportError, OSError, ValueError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"model.id must be one that transformers can load here, got {config.id!r}: {reason}"
        ) from error


def _refused(model_id: str, rule: str, found: str) -> ConfigError:
    return ConfigError(f"model.id must be a decoder-only text model {rule}, got {model_id!r} {found}")


def _check_weights(config: ModelConfig, folder: str) -> None:
    """Refuse pickled weights unless they are asked for."""
    if not config.allow_pickle and not any(name.endswith(WEIGHTS) for name in weight_files(os.listdir(folder))):
        raise ConfigError(
            f"model.id must be a model with safetensors weights unless model.allow_pickle is true, got {config.id!r} "
            "without any"
        )


def _check_config(model_id: str, config: PreTrainedConfig) -> None:
    """Refuse, before any weights are read, what the packed step cannot serve."""
    kind = f"of type {config.model_type}"
    if config.is_encoder_decoder:
        raise _refused(model_id, "without an encoder", f"{kind}, an encoder-decoder")
    if config.get_text_config() is not config:
        raise _refused(model_id, "without other inputs", f"{kind}, which wraps a text model")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - SERVED_LAYER_TYPES)
    if others:
        raise _refused(model_id, "with full or sliding-window attention only", f"{kind} with {', '.join(others)}")
    if str(getattr(config, "transformers_weights", "")).endswith(".bin"):  # would pass by `use_safetensors`
        raise _refused(model_id, "with weights of its own", f"{kind}, whose weights are in a pickle of an adapter")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _refused(model_id, "with keys and values in each layer", f"{kind}, whose last layers share them")


def _check_attention(model_id: str, model: PreTrainedModel) -> None:
    """Refuse models whose attention transformers cannot exchange for ours, or means more than ours computes."""
    model_class = type(model)
    kind = f"of class {model_class.__name__}"
    if not (model_class._supports_attention_backend and model_class._can_set_attn_implementation()):
        raise _refused(model_id, "whose attention goes through transformers' AttentionInterface", kind)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _refused(model_id, "that takes position_ids", kind)
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise _refused(model_id, "with causal attention", f"{kind}, which also looks ahead")
    if "s_aux=" in inspect.getsource(sys.modules[model_class.__module__]):  # the name under which sinks are passed on
        raise _refused(model_id, "without attention sinks", kind)


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All ids that end a sample: checkpoints name them in up to three places, as a number, a list, or not at all."""
    named: list[Any] = [model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id]
    ids: set[int] = set()
    for value in named:
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ids)


def _max_context(model_id: str, config: PreTrainedConfig) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise _refused(
            model_id, "with a context length", f"of type {config.model_type} without max_position_embeddings"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else rope.values():
        if parameters["rope_type"] == "longrope":
            # All rows of a step take the long frequencies as soon as one position passes the original length: a sample
            # would depend on its batch mates, and keys cached before would not match. So the context ends there.
            # (The type `dynamic` does the same, but only past max_position_embeddings, where the context ends anyway.)
            longest = min(longest, parameters["original_max_position_embeddings"])
    return int(longest)
