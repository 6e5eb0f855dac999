"""Packed forward of an unmodified transformers model: blocks of rows in, logits of the sampled rows out.

Shape legend: T rows of the step, E hidden, R rows of a block (padded), B blocks, C columns, S sampled rows,
V vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import ConfigError
from workers.attention import ATTENTION_NAME, AttentionProbe, BlockGroup, StepLayout
from workers.blocks import Block
from workers.kv_cache import KVCache, Slab
from workers.kv_storage import KVShape
from workers.native.adapter import NativeAdapter
from workers.native.build import NativeUnavailable
from workers.native.decoder import NativeDecoder
from workers.packing import pack_linears
from workers.ptp.adapter import Adapter
from workers.varlen_steps import VarlenSteps

logger = logging.getLogger(__name__)

MOST_DEVIATION = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Distance between logits of the compiled kernels and of the model's own modules, over the length of the latter."""

MAX_BATCHED_ROWS = 16
"""Blocks of more rows attend in a call of their own: padding the others to their size would cost more than the call."""


def plan_layout(blocks: list[Block], device: torch.device) -> StepLayout:
    """Group blocks by slab and size, and say where each row's keys and values go."""
    first_rows = np.cumsum([0, *(block.num_rows for block in blocks)])
    by_slab: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        by_slab.setdefault(block.slot.capacity, []).append(i)
    writes: list[tuple[Slab, Tensor | None, Tensor]] = []
    groups = []
    for members in by_slab.values():
        slab = blocks[members[0]].slot.slab
        rows = np.concatenate([np.arange(first_rows[i], first_rows[i + 1]) for i in members])
        columns = np.concatenate([_flat_columns(blocks[i]) for i in members])
        row_index = None if len(by_slab) == 1 else torch.from_numpy(rows).to(device)
        writes.append((slab, row_index, torch.from_numpy(columns).to(device)))
        batched = [i for i in members if blocks[i].num_rows <= MAX_BATCHED_ROWS]
        for together in (*_apart(blocks, batched), *([i] for i in members if i not in batched)):
            groups.append(_group([blocks[i] for i in together], [int(first_rows[i]) for i in together], device))
    return StepLayout(writes, groups)


def _apart(blocks: list[Block], members: list[int]) -> list[list[int]]:
    """Members in groups that hold no two blocks of one slot: auxiliary blocks are not their slot's only one."""
    groups: list[list[int]] = []
    seen: Counter[tuple[int, int]] = Counter()
    for i in members:
        place = (blocks[i].slot.capacity, blocks[i].slot.index)
        if seen[place] == len(groups):
            groups.append([])
        groups[seen[place]].append(i)
        seen[place] += 1
    return groups


def _flat_columns(block: Block) -> npt.NDArray[np.int64]:
    first = block.slot.index * block.slot.capacity + block.start
    return np.arange(first, first + block.num_rows)


def _group(blocks: list[Block], first_rows: list[int], device: torch.device) -> BlockGroup:
    """One attention call for blocks of one slab, over the slots they span (those without a block: padding)."""
    first_slot = min(block.slot.index for block in blocks)
    B = max(block.slot.index for block in blocks) + 1 - first_slot
    R = max(block.num_rows for block in blocks)
    C = max(block.start + block.num_rows for block in blocks)
    row_BR = np.zeros((B, R), dtype=np.int64)
    valid_BR = np.zeros((B, R), dtype=np.bool_)
    visible_BRC = np.zeros((B, R, C), dtype=np.bool_)
    distance_BRC = np.zeros((B, R, C), dtype=np.int32)
    visible_BRC[:, :, 0] = True  # padding must see something: a softmax over nothing is NaN
    for block, first_row in zip(blocks, first_rows, strict=True):
        b, rows, start = block.slot.index - first_slot, block.num_rows, block.start
        row_BR[b, :rows] = np.arange(first_row, first_row + rows)
        valid_BR[b, :rows] = True
        mask_RR = np.tri(rows, dtype=np.bool_) if block.mask_RR is None else block.mask_RR
        visible_BRC[b, :rows, : block.columns_seen] = True
        visible_BRC[b, :rows, start : start + rows] = mask_RR
        key_position_C = np.concatenate([np.arange(start), np.array(block.positions)])
        distance_BRC[b, :rows, : start + rows] = np.array(block.positions)[:, None] - key_position_C
    arrays = (row_BR, row_BR[valid_BR], np.flatnonzero(valid_BR), visible_BRC, distance_BRC)
    return BlockGroup(blocks[0].slot.slab, first_slot, C, *(torch.from_numpy(array).to(device) for array in arrays))


_refused: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
"""Models that the compiled kernels do not serve, and why."""


class ModelRunner:
    """One model replica behind the packed step. The model's own code stays as it is.

    On a CPU, models that are built like Llama run through compiled kernels, unless `compile` is off; all others run
    through their own modules, with packed linear layers where that is known to help.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        compile: Literal["auto", "off", "on"] = "auto",
        adapter: Adapter | None = None,
        *,
        plain: bool = False,
    ) -> None:
        """With an `adapter`, made for this model, blocks of auxiliary rows can be run. `plain`: through the model's own
        modules, as they are, on any device.
        """
        self.model = model
        self.adapter = adapter
        self.device = model.device
        model.set_attn_implementation(ATTENTION_NAME)
        probe = self._probe()
        one = next(iter(probe.layers.values()))
        self.kv_shape = KVShape(len(probe.layers), one.kv_heads, one.key_size, model.dtype, self.device)
        self.native: NativeDecoder | None = None
        self._native_adapter: NativeAdapter | None = None
        self.varlen: VarlenSteps | None = None
        if plain:
            return
        if compile != "off" and self.device.type == "cpu":
            self.native = self._native(probe, compile)
        if self.native is None and compile != "off":
            pack_linears(model)
        if self.native is not None and adapter is not None:
            state, scale = adapter.gated.state(), adapter.config.scale
            self._native_adapter = NativeAdapter(self.native, model, state, scale)
        if self.device.type == "cuda":
            self.varlen = VarlenSteps.of(model, probe, self.kv_shape, compile)

    def new_cache(self, budget_bytes: int, max_slots: int, limit_bytes: int = 0) -> KVCache:
        """A cache for blocks of this runner (see `KVCache`)."""
        return KVCache(self.kv_shape, budget_bytes, max_slots, limit_bytes)

    def _probe(self) -> AttentionProbe:
        """One dry forward of one token, to learn what each layer stores and that every layer comes to our attention.

        Raises ConfigError for models whose layers do not: they cannot be served.
        """
        probe = AttentionProbe()
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            self.model(input_ids=one, position_ids=one, use_cache=False, step=probe)
        layers = self.model.config.get_text_config().num_hidden_layers
        kinds = {(layer.kv_heads, layer.key_size, layer.value_size) for layer in probe.layers.values()}
        if len(probe.layers) != layers or len(kinds) != 1 or any(k != v for _, k, v in kinds):
            raise ConfigError(
                f"model.id must be a model whose {layers} layers all do softmax attention with equal key and value "
                f"heads, got {type(self.model).__name__} with {len(probe.layers)} such layers of {len(kinds)} kinds"
            )
        if probe.own_mask:
            raise ConfigError(
                f"model.id must be a model that leaves masks to its attention function, got {type(self.model).__name__}"
            )
        return probe

    def _native(self, probe: AttentionProbe, compile: Literal["auto", "on"]) -> NativeDecoder | None:
        """The compiled decoder of this model, if there is one and it agrees with the model's own forward."""
        try:
            if self.model in _refused:  # its linear layers were packed since, so it cannot be looked at again
                raise NativeUnavailable(_refused[self.model])
            native = NativeDecoder.of(self.model, probe)
            self._check(native)
        except NativeUnavailable as reason:
            _refused[self.model] = str(reason)
            NativeDecoder.forget(self.model)
            if compile == "on":
                raise ConfigError(f"engine.compile must be auto or off here, got on: {reason}") from reason
            logger.info("the model's own modules are used instead of compiled kernels: %s", reason)
            return None
        return native

    def _check(self, native: NativeDecoder) -> None:
        """Raises NativeUnavailable when a short prompt's logits are not those of the model itself."""
        tokens = tuple(i * 7919 % native.vocabulary for i in range(1, 33))
        slot = KVCache(self.kv_shape, 1 << 40, max_slots=1).allocate(len(tokens))
        assert slot is not None
        rows = tuple(range(len(tokens)))
        blocks = [Block(slot, 0, tokens, positions=rows, mask_RR=None, sampled=rows)]
        with torch.inference_mode():
            own_RV, native_RV = self._forward_modules(blocks).double(), native.forward(blocks).double()
        # The median: in bfloat16 a row of a wild model may differ much by rounding alone, but not every other row.
        deviation = ((native_RV - own_RV).norm(dim=1) / own_RV.norm(dim=1)).median().item()
        if not deviation < MOST_DEVIATION[self.model.dtype]:
            raise NativeUnavailable(f"{type(self.model).__name__} is not built like Llama: its logits differ")

    def forward(self, blocks: list[Block]) -> Tensor:
        """Logits `[S, V]` after the sampled rows of all blocks, in order; keys and values of all rows are stored."""
        if self.native is not None:  # takes no gradients anyway
            return self.native.forward(blocks, None if self._native_adapter is None else self._native_adapter.fields)
        with torch.inference_mode():
            if self.varlen is not None and all(block.inputs_RE is None for block in blocks):
                return self.varlen.forward(blocks)
            return self._forward_modules(blocks)

    @property
    def bucket_edges(self) -> tuple[int, ...]:
        """Row counts up to which rows are free, because captured steps are padded to the next; empty: none are."""
        graphs = None if self.varlen is None else self.varlen.graphs
        return () if graphs is None else graphs.bucket_edges

    def _forward_modules(self, blocks: list[Block]) -> Tensor:
        tokens = torch.tensor([[token for block in blocks for token in block.tokens]], device=self.device)
        positions = torch.tensor([[p for block in blocks for p in block.positions]], device=self.device)
        first_rows = np.cumsum([0, *(block.num_rows for block in blocks)])
        sampled = [int(first) + row for first, block in zip(first_rows, blocks, strict=False) for row in block.sampled]
        model, rows = self._rows(tokens, [block.inputs_RE for block in blocks if block.inputs_RE is not None])
        output = model(
            **rows,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.tensor(sampled, dtype=torch.int64, device=self.device),
            step=plan_layout(blocks, self.device),
        )
        logits: Tensor = output.logits[0]
        return logits

    def _rows(self, tokens_1T: Tensor, auxiliary: list[Tensor]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
        """The module tree that runs such rows, and what it is called with."""
        if not auxiliary:
            return self.model, {"input_ids": tokens_1T}
        assert self.adapter is not None, "auxiliary rows need an adapter"
        gated = self.adapter.gated
        gated.first = tokens_1T.shape[1]
        ordinary_1TE = gated.embed(tokens_1T.long())
        inputs_1TE = torch.cat([part.to(ordinary_1TE) for part in auxiliary])[None]
        return gated.tree, {"inputs_embeds": torch.cat([ordinary_1TE, inputs_1TE], dim=1)}
