"""Compare the log-probabilities and top-k of outputs with those of a plain forward pass of transformers.

    python infra/trials/check_logprobs.py OUTPUT [--rows 50] [--reference float32]

The output needs `output.extras: [prompt_ids, token_ids, logprobs, topk]` and `model.dtype: float32`; with
`output.trace: true` the accepted drafts are counted apart. The forward pass is in float64 unless --reference says
otherwise: one in float32 has roundings of its own. Ends with 1 where an error is 1e-4 or more.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config import ModelConfig
from pipeline.parts import read_part_rows
from workers.model_files import locate

TOLERANCE = 1e-4


def errors_of(model: torch.nn.Module, row: dict[str, Any]) -> torch.Tensor:
    """The largest absolute error at each new token: of its own log-probability and of the k best."""
    prompt, answer = row["prompt_token_ids"], row["completion_token_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    own = torch.tensor(row["token_logprobs"]) - expected.gather(1, torch.tensor(answer)[:, None])[:, 0]
    best = torch.tensor(row["topk_logprobs"]) - expected.gather(1, torch.tensor(row["topk_token_ids"]))
    return torch.cat([own[:, None], best], 1).abs().amax(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output")
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--reference", choices=["float64", "float32"], default="float64")
    arguments = parser.parse_args()
    store = JobStore(arguments.output)
    folder = locate(ModelConfig(id=store.load_config().model.id), weights=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.reference)).eval()
    paths = [storage.join(arguments.output, receipt.path) for receipt in store.committed().values()]
    rows = itertools.islice(itertools.chain.from_iterable(read_part_rows(path, []) for path in paths), arguments.rows)
    errors: dict[str, list[torch.Tensor]] = {"accepted drafts": [], "others": []}
    for row in rows:
        accepted = torch.zeros(row["completion_tokens"], dtype=torch.bool)
        for span in row.get("draft_spans") or []:
            accepted[span["start"] : span["start"] + span["length"]] = True
        found = errors_of(model, row)
        errors["accepted drafts"].append(found[accepted])
        errors["others"].append(found[~accepted])
    worst = 0.0
    for name, parts in errors.items():
        values = torch.cat(parts)
        print(f"{name}: {len(values)} tokens of {len(parts)} rows, largest absolute error {values.max().item():.2e}")
        worst = max(worst, values.max().item())
    return int(worst >= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
