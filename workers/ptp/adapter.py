"""An adapter: the weights that make a base model predict several tokens at once, and their folder.

Folder (local or any fsspec URL): `adapter.json` (`pipeline.adapter_config`) and `adapter.safetensors` with tensors
`embedding.*`, and `lora.<module path>.a|b` or `full.<parameter path>`.

Shape legend: W windows (or any leading dimensions), L slots, E hidden size.
"""

from __future__ import annotations

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline import storage
from pipeline.adapter_config import (
    WEIGHTS_FILE,
    AdapterConfig,
    BaseShape,
    read_adapter_config,
    write_adapter_config,
)
from pipeline.errors import ConfigError, SevenLeagueError
from workers.model_loading import LoadedModel
from workers.ptp.auxiliary_embedding import AuxiliaryEmbedding
from workers.ptp.gated import GatedModel


class Adapter(nn.Module):
    """The gated tree over a base model, the embedding of noise, and the configuration of both."""

    def __init__(self, base: PreTrainedModel, config: AdapterConfig, dtype: torch.dtype) -> None:
        """Untrained, from `config.seed`. `dtype` is that of the adapted weights; the embedding is float32 always."""
        super().__init__()
        assert config.base_shape == base_shape(base)
        generator = torch.Generator().manual_seed(config.seed)
        self.config = config
        self.gated = GatedModel(base, config.variant, config.rank, config.scale, dtype, generator)
        self.embedding = AuxiliaryEmbedding(
            config.embedding, config.head, config.base_shape.hidden, self.gated.embedding_norm(), generator
        ).to(base.device)
        if self.embedding.start is not None and config.slot_zero == "context_token":
            # Slot 0 is then the base's own row of that token, and right from the first step on.
            nn.init.zeros_(self.embedding.start)

    def slot_inputs(self, u_WL: Tensor, context_token_W: Tensor) -> Tensor:
        """Inputs `[W, L, E]` of slots in the base's dtype. The token before each window counts if slot_zero says so."""
        context_WE = None
        if self.config.slot_zero == "context_token":
            context_WE = self.gated.embed(context_token_W).to(self.embedding.weight.dtype)
        return self.embedding.slot_inputs(u_WL, context_WE).to(self.gated.tree.dtype)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [*self.embedding.parameters(), *self.gated.trainable_parameters()]

    def state(self) -> dict[str, Tensor]:
        """All trained tensors, by the names of the file."""
        embedding = {f"embedding.{name}": tensor for name, tensor in self.embedding.state_dict().items()}
        return {**embedding, **self.gated.state()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of `state()`; names and shapes must be the same."""
        prefix = "embedding."
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        self.embedding.load_state_dict(own)
        self.gated.load({name: tensor for name, tensor in state.items() if not name.startswith(prefix)})

    def save(self, folder: str, config: AdapterConfig | None = None) -> None:
        """Write the folder; `config` (steps, metrics, ..) takes the place of the adapter's own in it."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state().items()}
        storage.write_bytes(storage.join(folder, WEIGHTS_FILE), safetensors.torch.save(tensors))
        write_adapter_config(folder, self.config if config is None else config)


def base_shape(base: PreTrainedModel) -> BaseShape:
    config = base.config.get_text_config()
    return BaseShape(vocabulary=config.vocab_size, hidden=config.hidden_size, layers=config.num_hidden_layers)


def new_adapter(base: PreTrainedModel, config: AdapterConfig, seed: int) -> Adapter:
    """An untrained adapter to be trained: weights in float32 (float64 over a float64 base). Freezes the base.

    Raises ConfigError for bases that cannot be adapted.
    """
    dtype = torch.promote_types(base.dtype, torch.float32)
    return Adapter(base, config.model_copy(update={"seed": seed}), dtype)


def load_adapter(folder: str, loaded: LoadedModel) -> Adapter:
    """The adapter of a folder on its base model, in the base's dtype.

    Raises ConfigError when the folder is broken or the adapter was made for another base.
    """
    config = read_adapter_config(folder)
    _check_base(folder, config, loaded)
    adapter = Adapter(loaded.model, config, loaded.model.dtype)
    _load_weights(adapter, folder)
    return adapter.requires_grad_(False)


def start_from(adapter: Adapter, folder: str, loaded: LoadedModel) -> AdapterConfig:
    """Give an adapter that is to be trained the weights of another one; what that one says about itself.

    Raises ConfigError when the folder is broken, or the adapters differ in more than slots and what they learn from.
    """
    config = read_adapter_config(folder)
    _check_base(folder, config, loaded)
    for name in ("head", "embedding", "slot_zero", "variant", "rank", "scale"):
        own, other = getattr(adapter.config, name), getattr(config, name)
        if own != other:
            raise ConfigError(f"adapter.start must be an adapter with {name} {own}, got {folder!r} with {other}")
    _load_weights(adapter, folder)
    return config


def _load_weights(adapter: Adapter, folder: str) -> None:
    path = storage.join(folder, WEIGHTS_FILE)
    try:
        state = safetensors.torch.load(storage.read_bytes(path))
    except (OSError, SevenLeagueError, SafetensorError) as error:
        raise ConfigError(f"an adapter must have readable weights, got {path!r}: {error}") from error
    expected = {name: tuple(tensor.shape) for name, tensor in adapter.state().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if expected != found:
        name = min(name for name, _ in expected.items() ^ found.items())
        raise ConfigError(
            f"an adapter's weights must be what its adapter.json says, got {path!r} with {name} of shape "
            f"{found.get(name)}, not {expected.get(name)}"
        )
    adapter.load(state)


def _check_base(folder: str, config: AdapterConfig, loaded: LoadedModel) -> None:
    shape = base_shape(loaded.model)
    for name, wanted in config.base_shape.model_dump().items():
        if wanted != getattr(shape, name):
            raise ConfigError(
                f"an adapter must be one for model.id {loaded.name!r} ({name} {getattr(shape, name)}), got {folder!r}, "
                f"made for {config.base!r} ({name} {wanted})"
            )
    if config.base_revision != loaded.revision:
        raise ConfigError(
            f"an adapter must be one for model.id {loaded.name!r} of revision {loaded.revision}, got {folder!r}, made "
            f"for {config.base!r} of revision {config.base_revision}"
        )
