"""A base model whose last rows run through adapted weights: its ordinary rows stay what they are, bit for bit.

Rows [0, first) of a forward are ordinary, rows [first, T) auxiliary (algorithms.md section 8; gated LoRA after arXiv
2507.11851). Two variants:

- lora: linear layers inside the decoder layers become y = W x + scale * B (A x), the second term on auxiliary rows
  only;
- full: linear layers, norms and whatever else has parameters inside the decoder layers, and the final norm, get a copy
  of their own for auxiliary rows.

The base's own part is computed for all T rows in both, so ordinary rows get what the base gives them in a forward of
the same T. (A product of fewer rows may round differently. Auxiliary rows are few, and weights are what is read.)

Embeddings and unembedding are the base's. The tree is a copy of the modules alone: it shares every Parameter with the
base, so it costs no memory, and they are frozen for both. Build it before `ModelRunner` packs the base's linear layers.

Which dimension of a module's input counts the rows differs (some norms see [B, T, H, D], others [B, H, T, D]). One dry
forward with a number of rows that no other dimension has finds out, for models of any architecture.

Slot inputs enter as `inputs_embeds`, which transformers takes after the token embedding: where a model scales its
embeddings (Gemma: inside `embed_tokens`), `embed` gives them scaled, and inputs are not scaled again.

Shape legend: T rows, E hidden size.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.adapter_config import Variant
from pipeline.errors import ConfigError
from workers.attention import ATTENTION_NAME, AttentionLayer, AttentionProbe
from workers.packing import PackedLinear
from workers.ptp.rms_norm import epsilon_of, rms_norm

NO_AUXILIARY = sys.maxsize
"""`first` of a forward whose rows are all ordinary."""


def autocast_once(x: Tensor) -> Tensor:
    """`x` as autocast would hand it to a product, so that several products of it need one cast; else as it is."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


@dataclass(slots=True)
class _Gate:
    """One for all modules of a tree: where the auxiliary rows begin."""

    first: int = 0


class _Gated(nn.Module):
    """A module with two kinds of rows. `row_dim` is the (negative) dimension of its input that counts them."""

    def __init__(self, gate: _Gate) -> None:
        super().__init__()
        self.gate = gate
        self.row_dim = -2

    def own_state(self) -> dict[str, nn.Parameter]:
        """Trained parameters, by the end of their name."""
        raise NotImplementedError


class GatedLinear(_Gated):
    """y = W x, and + scale * B (A x) on auxiliary rows. B is zero at first, so that nothing changes at first."""

    def __init__(
        self, linear: nn.Linear, gate: _Gate, rank: int, scale: float, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        super().__init__(gate)
        self.linear, self.scale = linear, scale
        device = linear.weight.device
        a = torch.randn(rank, linear.in_features, generator=generator) * linear.in_features**-0.5
        self.a = nn.Parameter(a.to(device, dtype))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = autocast_once(x)
        y: Tensor = self.linear(x)
        first, rows = self.gate.first, x.shape[self.row_dim]
        if first >= rows:
            return y
        if first > 0:
            x = x.narrow(self.row_dim, first, rows - first)
        change = F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        if first == 0:
            return torch.add(y, change, alpha=self.scale)
        y.narrow(self.row_dim, first, rows - first).add_(change, alpha=self.scale)
        return y

    def own_state(self) -> dict[str, nn.Parameter]:
        return {"a": self.a, "b": self.b}


class GatedCopy(_Gated):
    """The base's module for ordinary rows, a trained copy of it for auxiliary rows."""

    def __init__(self, module: nn.Module, gate: _Gate, dtype: torch.dtype) -> None:
        super().__init__(gate)
        self.ordinary = module
        self.own = copy.deepcopy(module).to(dtype).requires_grad_()
        self._norm_epsilon = epsilon_of(module)

    def forward(self, x: Tensor) -> Tensor:
        first, rows = self.gate.first, x.shape[self.row_dim]
        if first == 0:
            return self._trained(x) if torch.is_grad_enabled() else autocast_once(self.own(x))
        if first >= rows:
            return autocast_once(self.ordinary(x))
        y: Tensor = self.ordinary(x)
        y.narrow(self.row_dim, first, rows - first).copy_(self.own(x.narrow(self.row_dim, first, rows - first)))
        return y

    def _trained(self, x: Tensor) -> Tensor:
        if self._norm_epsilon is None:
            return autocast_once(self.own(x))
        return rms_norm(x, self.own.get_parameter("weight"), self._norm_epsilon, autocast_once(x).dtype)

    def own_state(self) -> dict[str, nn.Parameter]:
        return dict(self.own.named_parameters())


class GatedModel(nn.Module):
    """A base model and its adapted weights as one module tree. Set `first` before each forward of `tree`.

    `tree` is a transformers model like the base, with a configuration of its own; give it to `ModelRunner`, or call it.
    It stays in evaluation mode: a teacher without dropout, and a student that must match it.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        variant: Variant,
        rank: int,
        scale: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        """`dtype` is that of the adapted weights. Raises ConfigError for models whose rows cannot be told apart."""
        super().__init__()
        base.requires_grad_(False)
        shared = {id(tensor): tensor for tensor in chain(base.parameters(), base.buffers())}
        self.tree: PreTrainedModel = copy.deepcopy(base, shared)
        self._gate = _Gate()
        self.variant = variant
        self._gated: dict[str, _Gated] = {}
        for path, module in _adapted_modules(self.tree, variant):
            assert not isinstance(module, PackedLinear), "build the tree before the base is packed"
            gated: _Gated
            if variant == "lora":
                assert isinstance(module, nn.Linear)
                gated = GatedLinear(module, self._gate, rank, scale, dtype, generator)
            else:
                gated = GatedCopy(module, self._gate, dtype)
            parent, _, name = path.rpartition(".")
            setattr(self.tree.get_submodule(parent), name, gated)
            self._gated[path] = gated
        self.eval()
        self.attention = self._find_rows()

    @property
    def first(self) -> int:
        """The first auxiliary row of the next forward: 0, all are; `NO_AUXILIARY`, none is."""
        return self._gate.first

    @first.setter
    def first(self, row: int) -> None:
        self._gate.first = row

    def train(self, mode: bool = True) -> GatedModel:
        return super().train(False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids `[..]` as the decoder layers get them, `[.., E]`."""
        return self.tree.get_input_embeddings()(tokens)  # type: ignore[no-any-return]

    def embedding_norm(self) -> float:
        """Mean length of token embeddings, over 4096 of them spread over the vocabulary."""
        embedding = self.tree.get_input_embeddings()
        size = int(embedding.weight.shape[0])
        ids = torch.arange(0, size, max(1, size // 4096), device=embedding.weight.device)
        return float(self.embed(ids).float().norm(dim=-1).mean())

    def state(self) -> dict[str, nn.Parameter]:
        """Adapted weights by the names of an adapter file: `lora.<module path>.a`, `full.<parameter path>`."""
        return {
            f"{self.variant}.{path}.{end}": parameter
            for path, module in self._gated.items()
            for end, parameter in module.own_state().items()
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over the weights of `state()`; names and shapes must be the same."""
        own = self.state()
        assert own.keys() == state.keys()
        for name, parameter in own.items():
            parameter.copy_(state[name])

    def trainable_parameters(self) -> list[nn.Parameter]:
        return list(self.state().values())

    @torch.no_grad()
    def _find_rows(self) -> dict[int, AttentionLayer]:
        """Set every module's `row_dim` by one dry forward; what each layer's attention is."""
        config = self.tree.config.get_text_config()
        taken = {size for parameter in self.tree.parameters() for size in parameter.shape}
        taken |= {value for value in config.to_dict().values() if isinstance(value, int)}
        rows = next(count for count in range(3, 1 << 30) if count not in taken)
        seen: dict[nn.Module, set[tuple[int, ...]]] = {}

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            shape = arguments[0].shape
            seen.setdefault(module, set()).add(tuple(i - len(shape) for i, size in enumerate(shape) if size == rows))

        hooks = [module.register_forward_pre_hook(note) for module in self._gated.values()]
        probe = AttentionProbe()
        tokens = torch.zeros(1, rows, dtype=torch.int64, device=self.tree.device)
        self.tree.set_attn_implementation(ATTENTION_NAME)
        self.first = NO_AUXILIARY
        positions = torch.arange(rows, device=self.tree.device)[None]
        self.tree(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1, step=probe)
        self.first = 0
        for hook in hooks:
            hook.remove()
        for path, module in self._gated.items():
            found = seen.get(module, set())
            if len(found) != 1 or len(next(iter(found))) != 1:
                raise _refused(self.tree, f"whose {path} is not called with one vector for each token")
            ((module.row_dim,),) = found
        if probe.own_mask or len(probe.layers) != config.num_hidden_layers:
            raise _refused(self.tree, "whose layers do not all leave attention to transformers' AttentionInterface")
        return probe.layers


def _adapted_modules(model: PreTrainedModel, variant: Variant) -> list[tuple[str, nn.Module]]:
    """Paths and modules that get adapted weights."""
    found: list[tuple[str, nn.Module]] = []
    for path, root in _decoder_parts(model):
        for name, module in root.named_modules(prefix=path):
            if variant == "lora":
                if isinstance(module, nn.Linear | PackedLinear):
                    found.append((name, module))
            elif next(module.parameters(recurse=False), None) is not None:
                if next(module.children(), None) is not None:
                    raise _refused(model, f"whose {name} has both parameters and parts")
                found.append((name, module))
    if not any(isinstance(module, nn.Linear | PackedLinear) for _, module in found):
        raise _refused(model, "without plain linear layers")
    return found


def _decoder_parts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The stack of decoder layers and the final norm: all parts of the inner model but embeddings."""
    embedding = model.get_input_embeddings()
    prefix: str = model.base_model_prefix
    for name, part in model.get_submodule(prefix).named_children():
        if part is not embedding and next(part.parameters(), None) is not None:
            yield f"{prefix}.{name}", part


def _refused(model: PreTrainedModel, found: str) -> ConfigError:
    return ConfigError(f"an adapter's base must be a decoder of plain layers, got {type(model).__name__}, {found}")
