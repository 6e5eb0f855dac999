"""Speculative decoding with a small draft model (Leviathan et al. 2023): it continues each sample by a few tokens.

It picks with the very noise with which the target will pick (Gumbel coupling: arXiv 2408.07978), so where both models
agree on the distribution they agree on the token, sampled or greedy.

Shape legend: C contexts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.errors import ConfigError
from workers.blocks import Block, prompt_block
from workers.drafters.base import EMPTY_PROPOSAL, DraftContext, Proposal, StepOutcome
from workers.drafters.draft_cache import DraftCache
from workers.drafters.growth import Buckets, Claim, grade_chain, likely_chain
from workers.kv_cache import Slot
from workers.model_loading import LoadedModel, load_model
from workers.model_runner import ModelRunner
from workers.sampling import noise_of, pick, widened


@dataclass(slots=True)
class _Sample:
    """What the draft model knows of one sample: columns 0.. of `slot` hold `context.tokens[:committed]`, then `chain`
    without its last token."""

    slot: Slot
    committed: int = 0
    chain: list[Claim] = field(default_factory=list)
    score: float = 1.0


def load_draft_model(model_id: str, target: LoadedModel) -> LoadedModel:
    """The draft model on the device and in the precision of the target.

    Raises ConfigError when it cannot be loaded or its token ids do not mean what the target's do.
    """
    dtype = str(target.model.dtype).removeprefix("torch.")
    draft = load_model(ModelConfig.model_validate({"id": model_id, "dtype": dtype}), target.model.device)
    if draft.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ConfigError(
            f"decoding.model must be a model with the vocabulary of model.id {target.name!r}, got {model_id!r} "
            "with another one"
        )
    return draft


class DraftModelDrafter:
    """Chains of the draft model, which keeps keys and values of its own; all samples of a step in one batch."""

    name = "draft_model"
    top_k = 0

    def __init__(self, draft: LoadedModel, engine: EngineConfig) -> None:
        self._runner = ModelRunner(draft.model, "off" if engine.compile == "off" else "auto")
        self._cache = DraftCache(draft, self._runner, engine)
        self._samples: dict[int, _Sample] = {}
        self._buckets = Buckets(self.name)

    def start(self, context: DraftContext) -> None:
        """Its prompt is read when it first asks for a draft."""

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        """Chains as long as their score stays at `min_score`; none where the draft model's context or memory ends."""
        samples = [
            self._sample(context, rows) if rows else None for context, rows in zip(contexts, max_rows, strict=True)
        ]
        growing = [
            (context, sample, rows)
            for context, sample, rows in zip(contexts, samples, max_rows, strict=True)
            if sample is not None
        ]
        logits = self._cache.read([(sample.slot, context.tokens) for context, sample, _ in growing])
        while growing:
            self._extend([(context, sample) for context, sample, _ in growing], logits)
            growing = [item for item in growing if len(item[1].chain) < item[2] and item[1].score >= min_score]
            if growing:
                logits = self._runner.forward([self._next_block(sample) for _, sample, _ in growing])
        return [EMPTY_PROPOSAL if sample is None else self._proposal(sample, min_score) for sample in samples]

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        sample = self._samples.get(context.key)
        if sample is None or sample.committed != len(context.tokens) - len(outcome.emitted):
            return
        grade_chain(sample.chain, outcome.emitted)

    def finish(self, context: DraftContext) -> None:
        self._samples.pop(context.key, None)
        self._cache.free(context.key)

    def _sample(self, context: DraftContext, rows: int) -> _Sample | None:
        """The sample with room for a chain of `rows`, its cache cut to what agrees with the committed tokens."""
        slot = self._cache.slot(context.key, len(context.tokens) + rows)
        if slot is None:
            return None
        sample = self._samples.setdefault(context.key, _Sample(slot))
        sample.slot = slot
        emitted = context.tokens[sample.committed :]
        cached = [token for token, _, _ in sample.chain[:-1]]
        agreeing = next((i for i, (a, b) in enumerate(zip(cached, emitted, strict=False)) if a != b), len(emitted))
        # the pending token is read again even where it is cached: its logits begin the new chain
        sample.slot.used = sample.committed + min(agreeing, len(cached), len(emitted) - 1)
        sample.committed, sample.chain, sample.score = len(context.tokens), [], 1.0
        return sample

    def _next_block(self, sample: _Sample) -> Block:
        """The last token of the chain."""
        sample.slot.used += 1
        return prompt_block(sample.slot, sample.slot.used - 1, (sample.chain[-1][0],), sampled=True)

    def _extend(self, items: Sequence[tuple[DraftContext, _Sample]], logits_CV: Tensor) -> None:
        """One more token for each chain."""
        wide_CV = widened(logits_CV)
        token_C, prob_C = [0] * len(items), [0.0] * len(items)
        for sampling in dict.fromkeys(context.sampling for context, _ in items):
            members = [i for i, (context, _) in enumerate(items) if context.sampling == sampling]
            tokens, probs = self._pick(wide_CV[members], sampling, [items[i] for i in members])
            for i, token, prob in zip(members, tokens, probs, strict=True):
                token_C[i], prob_C[i] = token, prob
        for (_, sample), token, prob in zip(items, token_C, prob_C, strict=True):
            bucket = self._buckets.of()[int(prob * 4)]
            sample.chain.append((token, prob, bucket))
            sample.score *= bucket.chance(prob)

    def _pick(
        self, logits_CV: Tensor, sampling: SamplingConfig, items: Sequence[tuple[DraftContext, _Sample]]
    ) -> tuple[list[int], list[float]]:
        """What the target would pick from these logits (penalties aside), and how likely that is."""
        indices = [len(context.tokens) - context.prompt_length + len(sample.chain) for context, sample in items]
        noise = [context.noise_at(index) for (context, _), index in zip(items, indices, strict=True)]
        token_C = pick(logits_CV, sampling, noise_of(noise, indices, logits_CV)).token_R
        probs_CV = (logits_CV / (sampling.temperature or 1.0)).softmax(-1)
        return token_C.tolist(), probs_CV.gather(1, token_C[:, None])[:, 0].tolist()

    def _proposal(self, sample: _Sample, min_score: float) -> Proposal:
        chances = [bucket.chance(claimed) for _, claimed, bucket in sample.chain]
        return Proposal(likely_chain(sample.chain, chances, min_score, self.name))
