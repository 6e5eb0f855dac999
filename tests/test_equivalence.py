"""The keystone: guesses never change the output.

Every strategy, batch mix and arrival order gives, token for token, what one-at-a-time plain decoding gives, and
greedy plain decoding gives what HF `generate` gives. Models are tiny and random, and in float64, so that equality is
exact; through the compiled kernels it must be exact in bfloat16 and float32 too.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import (
    AutoConfig,
    AutoregressiveConfig,
    DecodingConfig,
    DraftModelConfig,
    JacobiConfig,
    LookaheadConfig,
    PromptLookupConfig,
    PTPConfig,
    RecyclingConfig,
    SuffixConfig,
)
from workers.drafters.base import DraftContext, ExtraRows, Proposal, StepOutcome, TreeBuilder
from workers.engine import Engine, Request, SampleResult
from workers.model_loading import LoadedModel, load_model
from workers.native.build import NativeUnavailable, load_kernels

FAMILIES = ["llama", "qwen3", "gemma2", "gpt_neox"]
OTHER_FAMILIES = ["qwen2", "mistral", "gemma3", "phi3"]
NATIVE_FAMILIES = ["llama_native", "llama_wide_native", "qwen2_native", "qwen3_native", "mistral_native"]
"""Served by compiled kernels in float32 and bfloat16."""
STRATEGIES: dict[str, DecodingConfig] = {
    "autoregressive": AutoregressiveConfig(),
    "jacobi-copy": JacobiConfig(init="copy"),
    "jacobi-random": JacobiConfig(init="random"),
    "jacobi-suffix": JacobiConfig(init="suffix"),
    "lookahead": LookaheadConfig(width=5, ngram=4, candidates=5),
    "suffix": SuffixConfig(),
    "suffix-own": SuffixConfig(use_finished=False),
    "recycling": RecyclingConfig(),
    "auto": AutoConfig(),
    "auto-lookahead": AutoConfig(lookahead_width=3),
    "prompt-lookup": PromptLookupConfig(),
    "draft-other": DraftModelConfig(model="mistral"),
    "draft-self": DraftModelConfig(model="self"),
    "ptp-serial": PTPConfig(adapter="c-context_token-full", mode="serial"),
    "ptp-serial-plain": PTPConfig(adapter="o-plain-lora", mode="serial"),
    "ptp-one-pass": PTPConfig(adapter="o-context_token-lora", mode="one_pass"),
    "ptp-one-pass-plain": PTPConfig(adapter="c-plain-full", mode="one_pass", branches=2),
    "ptp-small": PTPConfig(adapter="c-context_token-lora", model="mistral"),
    "auto-ptp": AutoConfig(adapter="c-context_token-lora"),
}
"""Draft models are named by family, adapters by head, slot zero and variant; `self` is the target's own."""
SAMPLINGS = {
    "greedy": SamplingConfig(temperature=0.0, max_tokens=24),
    "nucleus": SamplingConfig(temperature=0.7, top_p=0.95, max_tokens=24, seed=3),
    "T=1": SamplingConfig(temperature=1.0, max_tokens=24, seed=4),
}
BATCHES = ["alone", "mixed", "n=3"]


def batches_of(strategy: str) -> list[str]:
    """Adapters come in many kinds, each of which runs alone too where it is tested by itself (drafters/test_ptp.py)."""
    return ["mixed"] if strategy.startswith("ptp") else BATCHES


def sampled_for(strategy: str, sampling: str) -> SamplingConfig:
    """Adapters need inverse-CDF coupling."""
    coupling = "inverse_cdf" if "ptp" in strategy else "gumbel"
    return SAMPLINGS[sampling].model_copy(update={"coupling": coupling})


class Bench:
    """Models and reference outputs, each made once per session."""

    def __init__(self, folder_of: Callable[[str], Path], adapter_of: Callable[..., Path]) -> None:
        self.folder_of = folder_of
        self.adapter_of = adapter_of

    @functools.cache  # noqa: B019 (one instance, lives as long as the session)
    def model(self, family: str, dtype: str = "float64") -> LoadedModel:
        return load_model(ModelConfig(id=str(self.folder_of(family)), dtype=dtype))

    @functools.cache  # noqa: B019
    def hf_model(self, family: str) -> PreTrainedModel:
        # A float64 softmax: HF's eager attention rounds to float32, but only it knows Gemma 2's softcap.
        backend = "eager" if family == "gemma2" else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(
            self.folder_of(family), dtype=torch.float64, attn_implementation=backend
        )
        return model.eval()

    def decoding(self, strategy: str, family: str) -> DecodingConfig:
        config = STRATEGIES[strategy]
        other = "qwen2" if family == "qwen2_native" else "mistral"  # whose tokenizer has as many tokens
        if isinstance(config, DraftModelConfig):
            name = family if config.model == "self" else other
            return DraftModelConfig(model=str(self.folder_of(name)), window=config.window)
        if isinstance(config, PTPConfig | AutoConfig) and config.adapter is not None:
            small = isinstance(config, PTPConfig) and config.model is not None
            head, slot_zero, variant = config.adapter.split("-")
            base = other if small else family
            changed = {"adapter": str(self.adapter_of(base, head=head, slot_zero=slot_zero, variant=variant))}
            if small:
                changed["model"] = str(self.folder_of(other))
            return config.model_copy(update=changed)
        return config

    @functools.cache  # noqa: B019
    def plain(self, family: str, request: Request, dtype: str = "float64") -> tuple[tuple[int, ...], ...]:
        """Token ids of all samples of a request, decoded one at a time."""
        engine = Engine(self.model(family, dtype), EngineConfig(max_sequences=1), AutoregressiveConfig())
        return tuple(result.token_ids for result in engine.generate([request]))


@pytest.fixture(scope="session")
def bench(tiny_model_dir: Callable[[str], Path], adapter_dir: Callable[..., Path]) -> Bench:
    return Bench(tiny_model_dir, adapter_dir)


def some_requests(sampling: SamplingConfig, count: int = 7) -> list[Request]:
    """Prompts of 1 to 60 tokens, some with repeats to match, with outputs of different lengths."""
    rng = random.Random(1)
    requests = []
    for i in range(count):
        ids = [rng.randrange(2, 320) for _ in range(rng.choice([1, 5, 30]))]
        ids = ids * rng.choice([1, 2])
        params = sampling.model_copy(update={"max_tokens": rng.choice([1, 2, 9, sampling.max_tokens])})
        requests.append(Request(f"row-{i}", tuple(ids), params))
    return requests


def run_with_arrivals(engine: Engine, requests: list[Request]) -> dict[str, list[SampleResult]]:
    """Requests come in twos while others run and leave."""
    results: dict[str, list[SampleResult]] = {request.uid: [] for request in requests}
    queue = list(requests)
    while queue or engine.has_work:
        for request in queue[:2]:
            engine.submit(request)
        queue = queue[2:]
        for _ in range(3):
            for result in engine.step():
                results[result.uid].append(result)
    return {uid: sorted(samples, key=lambda r: r.sample_index) for uid, samples in results.items()}


def check(
    bench: Bench,
    family: str,
    requests: list[Request],
    results: dict[str, list[SampleResult]],
    dtype: str = "float64",
) -> None:
    for request in requests:
        got = tuple(result.token_ids for result in results[request.uid])
        assert got == bench.plain(family, request, dtype), request
        for result in results[request.uid]:
            assert result.stats.completion_tokens == len(result.token_ids)


@pytest.mark.parametrize(("strategy", "batch"), [(s, b) for s in STRATEGIES for b in batches_of(s)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_gives_the_tokens_of_plain_decoding(
    bench: Bench, family: str, strategy: str, sampling: str, batch: str
) -> None:
    params = sampled_for(strategy, sampling)
    limits = {
        "alone": EngineConfig(max_sequences=1),
        "mixed": EngineConfig(max_sequences=3, max_tokens_per_step=70),
        "n=3": EngineConfig(max_sequences=4),
    }[batch]
    if batch == "n=3":
        params = params.model_copy(update={"n": 3})
    requests = some_requests(params, count=3 if batch == "n=3" else 7)
    engine = Engine(bench.model(family), limits, bench.decoding(strategy, family))
    check(bench, family, requests, run_with_arrivals(engine, requests))
    assert not engine.scheduler.cache.used_bytes


@pytest.fixture
def kernels() -> None:
    try:
        load_kernels()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [(s, sampling) for s in STRATEGIES for sampling in SAMPLINGS if sampling == "nucleus" or not s.startswith("ptp")],
)
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_compiled_kernels_are_exact_in_bfloat16(bench: Bench, family: str, strategy: str, sampling: str) -> None:
    """Arrivals and departures change the batch from step to step, prompts come in chunks, drafts as trees."""
    limits = EngineConfig(max_sequences=3, max_tokens_per_step=70, compile="on")
    requests = some_requests(sampled_for(strategy, sampling))
    engine = Engine(bench.model(family, "bfloat16"), limits, bench.decoding(strategy, family))
    check(bench, family, requests, run_with_arrivals(engine, requests), "bfloat16")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("compile", ["on", "off"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "strategy", ["autoregressive", "recycling", "auto", "auto-lookahead", "draft-other", "ptp-serial", "ptp-one-pass"]
)
def test_float32_with_and_without_compiled_kernels(
    bench: Bench, strategy: str, sampling: str, compile: Literal["on", "off"]
) -> None:
    limits = EngineConfig(max_sequences=4, compile=compile)
    requests = some_requests(sampled_for(strategy, sampling))
    for family in NATIVE_FAMILIES:
        engine = Engine(bench.model(family, "float32"), limits, bench.decoding(strategy, family))
        check(bench, family, requests, run_with_arrivals(engine, requests), "float32")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_compiled_deep_acceptance_in_wide_trees(bench: Bench, family: str, dtype: str) -> None:
    requests = some_requests(SamplingConfig(temperature=0.9, max_tokens=60, seed=1), count=9)
    # a named strategy: auto buys by measured times, on a busy machine next to nothing
    engine = Engine(bench.model(family, dtype), EngineConfig(max_sequences=4, compile="on"), RecyclingConfig())
    assert engine.speculation is not None
    engine.speculation._drafter = Oracle({request.uid: bench.plain(family, request, dtype)[0] for request in requests})
    check(bench, family, requests, run_with_arrivals(engine, requests), dtype)
    assert engine.stats.mean_acceptance_length > 1.7


@pytest.mark.parametrize("family", FAMILIES + OTHER_FAMILIES)
def test_greedy_plain_decoding_equals_hf_generate(bench: Bench, family: str) -> None:
    model = bench.hf_model(family)
    for request in some_requests(SAMPLINGS["greedy"]):
        ids = torch.tensor([request.prompt_ids])
        limit = request.sampling.max_tokens
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0)
        assert bench.plain(family, request) == (tuple(output[0, ids.shape[1] :].tolist()),)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_families_under_auto(bench: Bench, family: str) -> None:
    for sampling in SAMPLINGS.values():
        requests = some_requests(sampling)
        engine = Engine(bench.model(family), EngineConfig(max_sequences=4), AutoConfig())
        check(bench, family, requests, run_with_arrivals(engine, requests))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_penalties_logprobs_and_inverse_cdf(bench: Bench, strategy: str) -> None:
    """Penalties are evaluated on each row's own hypothetical prefix, so drafts see the penalties of earlier drafts."""
    params = SamplingConfig(
        temperature=0.8,
        top_k=50,
        min_p=0.01,
        max_tokens=30,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        coupling="inverse_cdf",
        logprobs=3,
    )
    extras = frozenset({"logprobs", "topk", "cdf"})
    requests = some_requests(params, count=5)
    engine = Engine(bench.model("llama"), EngineConfig(max_sequences=3), bench.decoding(strategy, "llama"), extras)
    results = run_with_arrivals(engine, requests)
    check(bench, "llama", requests, results)
    alone = Engine(bench.model("llama"), EngineConfig(max_sequences=1), AutoregressiveConfig(), extras)
    plain = alone.generate(requests)
    for reference in plain:
        (result,) = results[reference.uid]
        assert result.topk_token_ids == reference.topk_token_ids
        for name in ("token_logprobs", "cdf_low", "cdf_high"):
            np.testing.assert_allclose(getattr(result, name), getattr(reference, name), atol=1e-6)


def test_logprobs_equal_hf_logits(bench: Bench) -> None:
    params = SamplingConfig(temperature=0.7, max_tokens=20, logprobs=4)
    (request,) = some_requests(params, count=1)
    engine = Engine(bench.model("qwen3"), EngineConfig(), AutoConfig(), frozenset({"logprobs", "topk"}))
    (result,) = engine.generate([request])
    ids = torch.tensor([[*request.prompt_ids, *result.token_ids]])
    with torch.inference_mode():
        logits = bench.hf_model("qwen3")(ids).logits[0]
    logp = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    assert result.token_logprobs is not None
    assert result.topk_logprobs is not None
    picked = logp.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(result.token_logprobs, picked.numpy(), atol=1e-5)
    np.testing.assert_allclose(result.topk_logprobs, logp.topk(4).values.numpy(), atol=1e-5)


class Oracle:
    """A drafter that knows the answers and mixes them with nonsense, in wide trees, with extra rows that must not
    matter.
    """

    name = "oracle"
    top_k = 2

    def __init__(self, answers: dict[str, tuple[int, ...]]) -> None:
        self.answers = answers
        self.rng = random.Random(5)

    def start(self, context: DraftContext) -> None: ...

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        return [self.proposal(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def proposal(self, context: DraftContext, max_rows: int) -> Proposal:
        done = len(context.tokens) - context.prompt_length
        truth = self.answers[context.group][done : done + self.rng.randrange(6)]
        tree = TreeBuilder()
        for _ in range(3):
            path = [token if self.rng.random() < 0.8 else self.rng.randrange(320) for token in truth]
            tree.insert(tuple(path), (0.5,) * len(path), self.name, max_rows)
        extra = ExtraRows((9, 10), (1, 3), np.tri(2, dtype=np.bool_), (1,))
        return Proposal(tree.build(), extra if self.rng.random() < 0.5 else None)

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        assert tuple(context.tokens[-len(outcome.emitted) :]) == outcome.emitted
        assert outcome.topk_tokens_RK is not None
        assert len(outcome.topk_tokens_RK) == len(outcome.picks) == 1 + len(outcome.draft)

    def finish(self, context: DraftContext) -> None: ...


@pytest.mark.parametrize("family", FAMILIES)
def test_deep_acceptance_in_wide_trees(bench: Bench, family: str) -> None:
    """Accepted paths through trees must be moved in the cache; most steps here accept several tokens."""
    requests = some_requests(SamplingConfig(temperature=0.9, max_tokens=40, seed=1), count=9)
    # a named strategy: auto buys by measured times, on a busy machine next to nothing
    engine = Engine(bench.model(family), EngineConfig(max_sequences=4), RecyclingConfig())
    assert engine.speculation is not None
    engine.speculation._drafter = Oracle({request.uid: bench.plain(family, request)[0] for request in requests})
    check(bench, family, requests, run_with_arrivals(engine, requests))
    assert engine.stats.mean_acceptance_length > 1.7
    assert engine.stats.accepted_by_drafter == {"oracle": engine.stats.num_accepted_draft_tokens}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_draft_model_that_is_the_target_guesses_right(bench: Bench, sampling: str) -> None:
    """Also where tokens are sampled: both pick with the same noise."""
    requests = some_requests(SAMPLINGS[sampling])
    engine = Engine(bench.model("llama"), EngineConfig(max_sequences=3), bench.decoding("draft-self", "llama"))
    check(bench, "llama", requests, run_with_arrivals(engine, requests))
    assert engine.stats.num_draft_tokens >= 40
    assert engine.stats.draft_acceptance_rate > 0.97


@pytest.mark.parametrize("strategy", ["autoregressive", "auto", "lookahead"])
def test_sequences_that_are_sent_back_for_memory_lose_nothing(bench: Bench, strategy: str) -> None:
    model = bench.model("llama")
    params = SamplingConfig(temperature=1.0, max_tokens=200, ignore_eos=True, n=2)
    requests = [Request(f"row-{i}", tuple(range(5 + i, 60 + i)), params) for i in range(4)]
    probe = Engine(model, EngineConfig(), AutoregressiveConfig())
    three_slots = 3 * 512 * probe.runner.kv_shape.bytes_per_token
    engine = Engine(
        model, EngineConfig(max_sequences=8, kv_memory_gb=three_slots / 2**30), bench.decoding(strategy, "llama")
    )
    sent_back = []
    original = engine.scheduler._send_back
    engine.scheduler._send_back = lambda s: (sent_back.append(s), original(s))  # type: ignore[func-returns-value]
    check(bench, "llama", requests, run_with_arrivals(engine, requests))
    assert sent_back, "the budget was not tight enough for this test to mean anything"


def test_stop_strings_cut_the_same_under_every_strategy(bench: Bench) -> None:
    params = SamplingConfig(temperature=0.0, max_tokens=60, ignore_eos=True)
    requests = some_requests(params, count=4)
    model = bench.model("llama")
    texts = Engine(model, EngineConfig(), AutoregressiveConfig()).generate(requests)
    stopping = [
        Request(request.uid, request.prompt_ids, request.sampling.model_copy(update={"stop": (free.text[5:8],)}))
        for request, free in zip(requests, texts, strict=True)
        if len(free.text) >= 8
    ]
    assert stopping
    for strategy in STRATEGIES:
        results = Engine(model, EngineConfig(max_sequences=2), bench.decoding(strategy, "llama")).generate(stopping)
        for request, result in zip(stopping, results, strict=True):
            assert (result.token_ids,) == bench.plain("llama", request)
            assert result.finish_reason == "stop"
            assert request.sampling.stop[0] not in result.text


@pytest.mark.parametrize("coupling", ["gumbel", "inverse_cdf"])
def test_first_tokens_follow_the_models_distribution(bench: Bench, coupling: str) -> None:
    """Chi-square of 4,000 sampled first tokens (n samples of one prompt) against HF's own softmax.

    The negative control, the same counts against the distribution at another temperature, must fail.
    """
    samples = 4000
    prompt = tuple(range(5, 25))
    params = SamplingConfig(n=samples, temperature=1.2, max_tokens=1, coupling=coupling)
    engine = Engine(bench.model("llama"), EngineConfig(max_sequences=64), AutoConfig())
    counts = Counter(result.token_ids[0] for result in engine.generate([Request("row", prompt, params)]))
    with torch.inference_mode():
        logits = bench.hf_model("llama")(torch.tensor([prompt])).logits[0, -1]

    def p_value(temperature: float) -> float:
        probs = (logits / temperature).softmax(-1).numpy()
        order = np.argsort(-probs)
        common = [int(token) for token in order if probs[token] * samples >= 8]
        observed = np.array([counts[token] for token in common] + [samples - sum(counts[token] for token in common)])
        expected = np.append(probs[common], 1 - probs[common].sum()) * samples
        return float(stats.chisquare(observed, expected).pvalue)

    assert p_value(1.2) > 1e-3
    assert p_value(1.6) < 1e-6
