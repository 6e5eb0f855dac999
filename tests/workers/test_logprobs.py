"""Log-probabilities and top-k of outputs are those of a plain forward pass of transformers; so for accepted drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, SuffixConfig
from workers.engine import Engine, Request, SampleResult
from workers.model_loading import load_model

ROWS, K = 50, 5
TOLERANCE = 1e-4
"""Of float32 against transformers in float64, whose own float32 is 1.1e-4 away from that on one of these models."""
EXTRAS = frozenset(["token_ids", "logprobs", "topk", "trace"])


@pytest.mark.parametrize("family", ["llama", "llama_native"])
@pytest.mark.parametrize("decoding", [AutoConfig(), SuffixConfig()], ids=["auto", "suffix"])
def test_equal_to_those_of_transformers(
    tiny_model_dir: Callable[[str], Path], family: str, decoding: AutoConfig | SuffixConfig
) -> None:
    """Ten prompts, five times each and few at once, so that finished outputs are drafts; some rows are sampled."""
    folder = str(tiny_model_dir(family))
    model = load_model(ModelConfig(id=folder, dtype="float32"))
    engine = Engine(model, EngineConfig(max_sequences=4), decoding, EXTRAS)
    requests = [
        Request(
            f"row-{i}",
            (10 + i // 5, 20, 30, 40),
            SamplingConfig(max_tokens=24, temperature=0.6 * (i % 5 == 4), logprobs=K, ignore_eos=True),
        )
        for i in range(ROWS)
    ]
    results = engine.generate(requests)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    worst = {True: 0.0, False: 0.0}
    num_accepted = 0
    for request, result in zip(requests, results, strict=True):
        errors = errors_of(reference, request, result)
        accepted = accepted_of(result)
        num_accepted += int(accepted.sum())
        for kind in (True, False):
            worst[kind] = max(worst[kind], float(errors[accepted == kind].max(initial=0.0)))
    assert num_accepted == engine.stats.num_accepted_draft_tokens
    fewest = 5 * ROWS if isinstance(decoding, SuffixConfig) else 1  # auto drafts where measured times say so
    assert num_accepted >= fewest
    assert max(worst.values()) < TOLERANCE, worst


def accepted_of(result: SampleResult) -> NDArray[np.bool_]:
    """Which tokens are drafts that a step accepted."""
    assert result.draft_spans is not None
    accepted = np.zeros(len(result.token_ids), bool)
    for span in result.draft_spans:
        accepted[span.start : span.start + span.length] = True
    return accepted


def errors_of(reference: torch.nn.Module, request: Request, result: SampleResult) -> NDArray[np.float64]:
    """The largest absolute error of each token: of its own log-probability, and of the K best."""
    ids = torch.tensor([[*request.prompt_ids, *result.token_ids]])
    with torch.no_grad():
        logits = reference(ids).logits[0, len(request.prompt_ids) - 1 : -1]
    expected_TV = logits.log_softmax(-1)
    own_T = torch.tensor(result.token_logprobs) - expected_TV.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    best_TK = torch.tensor(result.topk_logprobs)
    assert best_TK.shape == (len(result.token_ids), K)
    by_id_TK = best_TK - expected_TV.gather(1, torch.tensor(result.topk_token_ids))
    by_rank_TK = best_TK - expected_TV.topk(K).values
    return torch.cat([own_T[:, None], by_id_TK, by_rank_TK], 1).abs().amax(1).numpy()
