"""Peers inside transformers: `generate` on static batches, the same with prompt lookup, and `generate_batch`.

Shape legend: B sequences of a batch, L tokens of the longest prompt in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from jobs.bench.contestants import WARM_UP_TOKENS, Turn
from jobs.bench.workload import Workload
from pipeline.config import ModelConfig, SamplingConfig
from workers.model_files import locate
from workers.model_loading import LoadedModel

PROMPT_LOOKUP_TOKENS = 10
"""Tokens of a draft: the default of transformers' own candidate generator."""

PAGE_SIZE = 256
"""Tokens of a page of `generate_batch`'s cache: its default."""


def load_hf_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """The model as transformers runs it by itself: its own choice of attention, no generation defaults.

    It shares nothing with the engine's model, whose attention is exchanged.
    """
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        locate(config, weights=True),
        dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
        device_map={"": device},
        use_safetensors=True,
        trust_remote_code=config.trust_remote_code,
    ).eval()
    model.generation_config = GenerationConfig()  # what a checkpoint prefers must not slip into a comparison
    return model


def generation_config(sampling: SamplingConfig, eos_token_ids: frozenset[int], **more: Any) -> GenerationConfig:
    """Our sampling in transformers' terms, as far as bench has options for it."""
    if sampling.temperature > 0:
        more |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    ends = None if sampling.ignore_eos or not eos_token_ids else sorted(eos_token_ids)
    return GenerationConfig(max_new_tokens=sampling.max_tokens, eos_token_id=ends, pad_token_id=0, **more)


class HFGenerate:
    """`generate` on batches of `batch` prompts in the given order, padded on the left.

    With prompt lookup, which transformers has at batch 1 alone, forward passes are counted by a hook.
    """

    is_own = False

    def __init__(
        self,
        name: str,
        model: Callable[[], tuple[PreTrainedModel, float]],
        loaded: LoadedModel,
        workload: Workload,
        *,
        prompt_lookup: bool,
    ) -> None:
        self.name = name
        self._model = model
        self._ends = loaded.eos_token_ids
        self._workload = workload
        self._prompt_lookup = prompt_lookup
        self._warm: set[int] = set()
        self._num_forwards = 0

    def refusal(self, batch: int) -> str | None:
        return "no prompt lookup beyond batch 1" if self._prompt_lookup and batch > 1 else None

    def start(self) -> float:
        _, seconds = self._model()
        return seconds

    def prepare(self, batch: int) -> None:
        if batch not in self._warm:
            sampling = self._workload.sampling.model_copy(update={"max_tokens": WARM_UP_TOKENS})
            self._generate([list(ids) for ids in self._workload.warm_up(batch)], sampling)
            self._warm.add(batch)
        torch.manual_seed(self._workload.sampling.seed)

    def run(self, batch: int) -> Turn:
        sequences = self._workload.sequences
        self._num_forwards = 0
        began = time.perf_counter()
        token_ids: list[list[int]] = []
        for first in range(0, len(sequences), batch):
            token_ids += self._generate(sequences[first : first + batch], self._workload.sampling)
        seconds = time.perf_counter() - began
        steps = self._num_forwards if self._prompt_lookup else sum(map(len, token_ids))
        return Turn(seconds, token_ids, steps)

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _generate(self, prompts: list[list[int]], sampling: SamplingConfig) -> list[list[int]]:
        model, _ = self._model()
        more = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS} if self._prompt_lookup else {}
        ids_BL, mask_BL = padded_left(prompts, model.device)
        counter = model.register_forward_hook(self._count)
        try:
            output = model.generate(
                ids_BL, attention_mask=mask_BL, generation_config=generation_config(sampling, self._ends, **more)
            )
        finally:
            counter.remove()
        new = output[:, ids_BL.shape[1] :].tolist()
        return [self._until_end(ids, sampling) for ids in new]

    def _count(self, *_: object) -> None:
        self._num_forwards += 1

    def _until_end(self, ids: list[int], sampling: SamplingConfig) -> list[int]:
        """Without the padding that follows the end token where others of the batch went on."""
        if sampling.ignore_eos:
            return ids
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids) - 1)
        return ids[: end + 1]


def padded_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask `[B, L]`. Worked example: [5], [6, 7] give [[0, 5], [6, 7]] and [[0, 1], [1, 1]]."""
    length = max(map(len, prompts))
    ids_BL = torch.tensor([[0] * (length - len(ids)) + ids for ids in prompts], device=device)
    mask_BL = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    return ids_BL, mask_BL


class HFGenerateBatch:
    """Continuous batching of transformers, with at most `batch` requests in a step.

    It runs in a thread that polls, so each turn has a manager of its own, made and warmed up before the clock starts.
    """

    name = "hf-generate-batch"
    is_own = False

    def __init__(
        self, model: Callable[[], tuple[PreTrainedModel, float]], loaded: LoadedModel, workload: Workload
    ) -> None:
        self._model = model
        self._ends = loaded.eos_token_ids
        self._workload = workload
        self._running = ExitStack()
        self._manager: Any = None

    def refusal(self, batch: int) -> str | None:
        return None

    def start(self) -> float:
        _, seconds = self._model()
        return seconds

    def prepare(self, batch: int) -> None:
        model, _ = self._model()
        pages = -(-self._workload.max_length // PAGE_SIZE) + 1
        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            max_requests_per_batch=batch,
            num_blocks=batch * pages,
            seed=self._workload.sampling.seed,
        )
        generation = generation_config(self._workload.sampling, self._ends)
        if generation.eos_token_id is None:
            generation.eos_token_id = -1  # none, as a manager wants it
        self._manager = self._running.enter_context(
            model.continuous_batching_context_manager(generation, continuous_batching_config=config, timeout=60)
        )
        self._generate([list(ids) for ids in self._workload.warm_up(batch)], WARM_UP_TOKENS)

    def run(self, batch: int) -> Turn:
        began = time.perf_counter()
        token_ids = self._generate(self._workload.sequences, self._workload.sampling.max_tokens)
        return Turn(time.perf_counter() - began, token_ids, sum(map(len, token_ids)))

    def rest(self) -> None:
        self._manager = None
        self._running.close()

    def close(self) -> None:
        self.rest()

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Raises RuntimeError when the manager gives up or a request fails."""
        order = self._manager.add_requests(prompts, max_new_tokens=max_tokens)
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(order):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread of transformers ended early")
            elif result.error is not None:
                raise RuntimeError(result.error)
            elif result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[request_id] for request_id in order]
