"""The card of a data set: what made it, what was left out, how large it is, and the head that `datasets` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.config import JobConfig
from pipeline.exporting.options import ExportOptions
from pipeline.redaction import without_credentials

if TYPE_CHECKING:
    from pipeline.exporting.export import Exported

_TOPK_COLUMNS = ("topk_token_ids", "topk_logprobs", "logprobs", "target_token_ids", "token_ids", "top_values")
_VALUE_BYTES = {"float32": 4, "float16": 2}


def card(config: JobConfig, revision: str, options: ExportOptions, state: str, exported: Exported) -> str:
    """`README.md`. The head names the files of each split, so `datasets.load_dataset(DEST)` reads no others."""
    model = without_credentials(config.model.id)
    left_out = [(rule, f"{count:,}") for rule, count in exported.left_out]
    parts = [
        f"---\n{_head(options, exported)}---\n# Generations of {model}\n",
        f"Format `{options.format}`, written by `sevenleague export`"
        + ("." if state == "done" else f" from a job that was {state}: more rows may have followed."),
        _table("split", ["rows", "bytes"], [(f.split, f"{f.rows:,}", f"{f.num_bytes:,}") for f in exported.files]),
        "## Made by\n\n" + _table("setting", ["value"], _settings(config, revision)),
        "## Tokens\n\n" + _table("", ["value"], _tokens(config, exported)),
        "## Left out\n\n" + _table("rule, applied in this order", ["samples left out"], left_out),
        f"## Licence\n\n{options.license or 'Not stated. The licences of the model and of the prompts apply.'}",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _head(options: ExportOptions, exported: Exported) -> str:
    files = [{"split": f.split, "path": f"data/{f.split}-*"} for f in exported.files if f.rows]
    head: dict[str, Any] = {"license": options.license} if options.license else {}
    head |= {"configs": [{"config_name": "default", "data_files": files}], "tags": ["synthetic", "sevenleague"]}
    text: str = yaml.safe_dump(head, sort_keys=False)
    return text


def _settings(config: JobConfig, revision: str) -> list[tuple[str, str]]:
    """The model, what decides the tokens, and what only decided the speed."""
    sampling = config.sampling.model_dump(mode="json", exclude_defaults=True)
    shown = {"temperature": config.sampling.temperature, "max_tokens": config.sampling.max_tokens, **sampling}
    decoding = config.decoding.model_dump(mode="json", exclude_defaults=True, exclude={"strategy"})
    return [
        ("model", without_credentials(config.model.id)),
        ("revision", revision),
        ("dtype", config.model.dtype),
        *((f"sampling.{key}", repr(value)) for key, value in sorted(shown.items())),
        ("decoding.strategy", f"{config.decoding.strategy} (drafts do not change the output)"),
        *((f"decoding.{key}", repr(value)) for key, value in sorted(decoding.items()) if key in ("adapter", "model")),
    ]


def _tokens(config: JobConfig, exported: Exported) -> list[tuple[str, str]]:
    samples, total = exported.samples, exported.completion_tokens
    rows = [
        ("samples", f"{samples:,}"),
        ("prompt tokens", f"{exported.prompt_tokens:,}"),
        ("new tokens", f"{total:,}"),
    ]
    if samples:
        percentiles = ", ".join(f"{percentile(exported.lengths, share):,}" for share in (0.05, 0.5, 0.95))
        rows.append(("new tokens of a sample: mean", f"{total / samples:.1f}"))
        rows.append(
            ("new tokens of a sample: 5th, 50th, 95th percentile, most", f"{percentiles}, {max(exported.lengths):,}")
        )
    stored = sum(f.column_bytes[name] for f in exported.files for name in _TOPK_COLUMNS)
    if stored and total:
        k, dtype = config.sampling.logprobs, config.output.topk_dtype
        plain = k * (4 + _VALUE_BYTES[dtype])
        rows.append((f"top-k: k = {k}, {dtype}", f"{plain} bytes a token, {stored / total:.1f} in these files"))
    return rows


def percentile(lengths: Counter[int], share: float) -> int:
    """The least length that at least this share of the samples does not exceed."""
    left = share * sum(lengths.values())
    for length in sorted(lengths):
        left -= lengths[length]
        if left <= 0:
            return length
    return max(lengths)


def _table(first: str, others: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = [first, *others]
    lines: list[Sequence[str]] = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
