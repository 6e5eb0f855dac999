"""Adapters over tiny models with weights that matter, and the same weights merged into plain transformers models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.adapter_config import AdapterConfig
from pipeline.config import ModelConfig
from workers.model_loading import LoadedModel, load_model
from workers.ptp.adapter import Adapter, base_shape, new_adapter
from workers.ptp.windows import PackedTokens

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "phi3"]


def load(folder: Path, dtype: str = "float64") -> LoadedModel:
    return load_model(ModelConfig.model_validate({"id": str(folder), "dtype": dtype}))


def make_adapter(
    loaded: LoadedModel, *, trained: bool = True, seed: int = 3, dtype: torch.dtype | None = None, **settings: Any
) -> Adapter:
    """An adapter of `loaded`; `trained`: every adapted weight is moved, as if it had been trained.

    `dtype`: of adapted weights, if not that of training.
    """
    settings.setdefault("variant", "lora")
    if settings["variant"] == "lora":
        settings = {"rank": 4, "scale": 0.5, **settings}
    config = AdapterConfig(
        base=loaded.name, base_revision=loaded.revision, base_shape=base_shape(loaded.model), **settings
    )
    if dtype is None:
        adapter = new_adapter(loaded.model, config, seed)
    else:
        adapter = Adapter(loaded.model, config.model_copy(update={"seed": seed}), dtype)
    if trained:
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in adapter.gated.trainable_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.2 * noise.to(parameter))
    return adapter


def merged(folder: Path, adapter: Adapter, attention: str = "eager") -> PreTrainedModel:
    """A plain model whose own weights are the adapted ones, for all its rows. Reads the file's names."""
    dtype = adapter.gated.tree.dtype
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    state = adapter.gated.state()
    with torch.no_grad():
        for name, tensor in state.items():
            kind, path = name.split(".", 1)
            if kind == "full":
                model.get_parameter(path).copy_(tensor)
            elif path.endswith(".a"):
                module = path.removesuffix(".a")
                change = state[f"lora.{module}.b"].double() @ tensor.double()
                weight = model.get_parameter(f"{module}.weight")
                weight.copy_((weight.double() + adapter.config.scale * change).to(weight))
    return model


def packed(documents: list[list[tuple[list[int], bool]]], columns: int, end: int | None = None) -> PackedTokens:
    """Rows of documents, each a list of turns (tokens, sampled), padded to `columns`."""
    rows = []
    for row in documents:
        ids, document, sampled = [], [], []
        for number, turn in enumerate(_turns(row)):
            for tokens, is_sampled in turn:
                ids += tokens
                document += [number] * len(tokens)
                sampled += [is_sampled] * len(tokens)
        padding = columns - len(ids)
        rows.append((ids + [0] * padding, document + [-1] * padding, sampled + [False] * padding))
    ids_BS, document_BS, sampled_BS = (torch.tensor([row[i] for row in rows]) for i in range(3))
    ends_BS = torch.zeros_like(sampled_BS) if end is None else ids_BS == end
    return PackedTokens(ids_BS, document_BS, sampled_BS, ends_BS)


def _turns(row: list[tuple[list[int], bool]]) -> list[list[tuple[list[int], bool]]]:
    """A row's turns by document: a turn that is not sampled begins a document."""
    documents: list[list[tuple[list[int], bool]]] = []
    for turn in row:
        if not turn[1] or not documents:
            documents.append([])
        documents[-1].append(turn)
    return documents


def random_ids(count: int, seed: int) -> list[int]:
    ids: Tensor = torch.randint(5, 300, (count,), generator=torch.Generator().manual_seed(seed))
    return ids.tolist()  # type: ignore[no-any-return]
