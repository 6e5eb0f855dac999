"""The draft model's chains, against plain decoding of that model by the engine and by HF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoregressiveConfig
from pipeline.errors import ConfigError
from workers.drafters.base import GREEDY, Draft, DraftContext, StepOutcome
from workers.drafters.draft_model import DraftModelDrafter, load_draft_model
from workers.engine import Engine, Request
from workers.model_loading import LoadedModel, load_model
from workers.randomness import noise_key

PROMPTS = [(5, 6, 7), (40, 41), tuple(range(60, 90))]
SAMPLINGS = {"greedy": GREEDY, "nucleus": SamplingConfig(temperature=0.7, top_p=0.95, seed=3)}


@pytest.fixture(scope="module")
def draft(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float64"))


def context_of(key: int, prompt: tuple[int, ...], sampling: SamplingConfig = GREEDY) -> DraftContext:
    return DraftContext(
        key, f"row-{key}", list(prompt), len(prompt), sampling, noise_key(sampling.seed, f"row-{key}", 0)
    )


def plain(draft: LoadedModel, key: int, prompt: tuple[int, ...], sampling: SamplingConfig, count: int) -> list[int]:
    params = sampling.model_copy(update={"max_tokens": count, "ignore_eos": True})
    engine = Engine(draft, EngineConfig(), AutoregressiveConfig())
    return list(engine.generate([Request(f"row-{key}", prompt, params)])[0].token_ids)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_chains_are_what_the_draft_model_itself_would_say(draft: LoadedModel, sampling: str) -> None:
    """All contexts in one batch, with chains of different lengths; the noise is that of the sample."""
    drafter = DraftModelDrafter(draft, EngineConfig())
    contexts = [context_of(key, prompt, SAMPLINGS[sampling]) for key, prompt in enumerate(PROMPTS)]
    proposals = drafter.propose(contexts, [4, 0, 6], 0.0)
    assert len(proposals[1].draft) == 0
    for key, rows in ((0, 4), (2, 6)):
        expected = plain(draft, key, PROMPTS[key], SAMPLINGS[sampling], rows)
        assert list(proposals[key].draft.tokens) == expected
        assert proposals[key].draft.parents == tuple(range(-1, rows - 1))


def test_scores_are_probabilities_of_the_path(draft: LoadedModel, tiny_model_dir: Callable[[str], Path]) -> None:
    drafter = DraftModelDrafter(draft, EngineConfig())
    chain = drafter.propose([context_of(0, PROMPTS[2])], [5], 0.0)[0].draft
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"), dtype=torch.float64).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPTS[2], *chain.tokens]])).logits[0]
    probs = logits.softmax(-1)[len(PROMPTS[2]) - 1 : -1].gather(1, torch.tensor(chain.tokens)[:, None])[:, 0]
    assert chain.scores == pytest.approx(probs.cumprod(0).tolist(), abs=1e-6)


def test_the_cache_follows_what_was_emitted(draft: LoadedModel) -> None:
    """Rejected, partly and wholly accepted chains, unobserved tokens, and growth past the first slot's capacity."""
    drafter = DraftModelDrafter(draft, EngineConfig())
    context = context_of(0, PROMPTS[0])
    for step in range(40):
        chain = drafter.propose([context], [4], 0.0)[0].draft.tokens
        assert list(chain) == plain(draft, 0, tuple(context.tokens), GREEDY, 4)
        accepted = step % 5
        emitted = (*chain[:accepted], 300 - step)
        context.tokens += emitted
        if step % 3:
            path = tuple(range(accepted + 1))
            drafter.observe(context, StepOutcome(Draft.chain(chain, "toy"), emitted, path, emitted))
        if step % 7 == 0:
            context.tokens += [20, 21, 22]
    assert len(context.tokens) > 128
    drafter.finish(context)
    assert drafter._cache.used_bytes == 0


def test_long_prompts_are_read_in_bounded_forwards(draft: LoadedModel) -> None:
    drafter = DraftModelDrafter(draft, EngineConfig(max_tokens_per_step=8))
    contexts = [context_of(key, prompt) for key, prompt in enumerate(PROMPTS)]
    for key, proposal in enumerate(drafter.propose(contexts, [3, 3, 3], 0.0)):
        assert list(proposal.draft.tokens) == plain(draft, key, PROMPTS[key], GREEDY, 3)


def test_chains_end_where_their_score_does(draft: LoadedModel) -> None:
    drafter = DraftModelDrafter(draft, EngineConfig())
    context = context_of(0, PROMPTS[2])
    scores = drafter.propose([context], [8], 0.0)[0].draft.scores
    floor = (scores[2] + scores[3]) / 2 if scores[3] < scores[2] else scores[2]
    cut = drafter.propose([context], [8], floor)[0].draft
    assert cut.scores == pytest.approx([score for score in scores if score >= floor])
    assert 0 < len(cut) < 8


def test_claims_that_never_come_true_are_believed_less_and_less(draft: LoadedModel) -> None:
    drafter = DraftModelDrafter(draft, EngineConfig())
    context = context_of(0, PROMPTS[0])
    before = drafter.propose([context], [1], 0.0)[0].draft.scores[0]
    for _ in range(60):
        chain = drafter.propose([context], [1], 0.0)[0].draft
        wrong = (chain.tokens[0] + 1) % 300
        context.tokens.append(wrong)
        drafter.observe(context, StepOutcome(chain, (wrong, 0), (0,), (wrong,)))
        context.tokens[:] = PROMPTS[0]
        drafter.finish(context)
    assert drafter.propose([context], [1], 0.0)[0].draft.scores[0] < before / 2


def test_no_draft_where_context_or_memory_ends(draft: LoadedModel) -> None:
    drafter = DraftModelDrafter(draft, EngineConfig())
    long = context_of(0, (7,) * (draft.max_context - 3))
    assert [len(p.draft) for p in drafter.propose([long], [4], 0.0)] == [0]
    assert [len(p.draft) for p in drafter.propose([long], [3], 0.0)] == [3]
    drafter = DraftModelDrafter(draft, EngineConfig(kv_memory_gb=1e-6))
    assert [len(p.draft) for p in drafter.propose([context_of(0, PROMPTS[0])], [4], 0.0)] == [0]


def test_another_vocabulary_is_refused(
    draft: LoadedModel, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model_dir("mistral")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["seven leagues"])
    tokenizer.save_pretrained(tmp_path)
    load_draft_model(str(folder), draft)
    with pytest.raises(
        ConfigError, match=r"^decoding\.model must be a model with the vocabulary of model\.id '.*got '"
    ):
        load_draft_model(str(tmp_path), draft)
