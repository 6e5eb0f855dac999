"""`sevenleague verify`: decode finished samples again, one at a time with plain decoding, and compare.

Which samples: of all M finished ones, in the order of shards and rows, number (2i + 1) M / 2N for i in 0..N-1. So they
are spread evenly over the parts and are the same ones each time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track

from jobs.exit_codes import ExitCode
from jobs.progress import stderr_console
from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config import JobConfig
from pipeline.decoding_config import AutoregressiveConfig
from pipeline.errors import ConfigError
from pipeline.parts import read_part_rows
from pipeline.prompts import stored_columns, stored_prompt
from workers.actor import worker_threads
from workers.audit import is_near_tie
from workers.engine import Engine, Request
from workers.model_loading import LoadedModel, load_model
from workers.rendering import Renderer, make_renderer

COLUMNS = ("sample_index", "generation", "finish_reason", "model_revision")

Verdict = Literal["identical", "near_tie", "mismatch"]


class Auditor:
    """Decodes rows of an output again."""

    def __init__(self, config: JobConfig, loaded: LoadedModel) -> None:
        self._config = config
        self._loaded = loaded
        self._renderer: Renderer = make_renderer(loaded, config)
        engine = config.engine.model_copy(update={"max_sequences": 1})
        self._engine = Engine(loaded, engine, AutoregressiveConfig())

    def verdict(self, row: dict[str, Any]) -> Verdict:
        """Compares token ids where the output has them, else the text (which knows no near-ties).

        Raises `ConfigError` when the model is not the one that made the output.
        """
        if row["model_revision"] != self._loaded.revision:
            raise ConfigError(
                f"the model must be the one that made the output, revision {row['model_revision']}, "
                f"got {self._loaded.revision}"
            )
        request = self._request(row)
        again = self._engine.generate([request])[-1]
        stored = row.get("completion_token_ids")
        if stored is None:
            return "identical" if again.text == row["generation"] else "mismatch"
        if list(again.token_ids) == stored:
            return "identical"
        return self._near_tie_or_mismatch(request, row["sample_index"], list(again.token_ids), stored)

    def _request(self, row: dict[str, Any]) -> Request:
        """The row's own request, with as many samples as it takes to reach the row's one."""
        prompt = stored_prompt(row)
        sampling = prompt.sampled_by(self._config.sampling)
        ids = self._renderer.token_ids(prompt, sampling.max_tokens)
        return Request(prompt.uid, ids, sampling.model_copy(update={"n": row["sample_index"] + 1}))

    def _near_tie_or_mismatch(
        self, request: Request, sample_index: int, again: list[int], stored: list[int]
    ) -> Verdict:
        """Worked example: again [5, 6, 7], stored [5, 9, 2] differ first at index 1, after the prefix [5]."""
        common = next((i for i, (a, b) in enumerate(zip(again, stored, strict=False)) if a != b), None)
        if common is None:
            return "mismatch"  # one is the beginning of the other: no rounding ends a sample early
        is_tie = is_near_tie(self._loaded, request, sample_index, stored[:common], stored[common])
        return "near_tie" if is_tie else "mismatch"


def command(output: str, num_samples: int, dtype: str | None, as_json: bool) -> ExitCode:
    """The CLI command; a mismatch is a failure."""
    store = JobStore(output)
    config = store.load_config()
    if dtype is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    rows = list(sampled_rows(store, config, num_samples))
    if not rows:
        raise ConfigError(f"verify needs at least one finished sample, got none in {output!r}")
    torch.set_num_threads(worker_threads(config))
    auditor = Auditor(config, load_model(config.model))
    verdicts: dict[tuple[str, int], Verdict] = {}
    for row in track(rows, description="verifying", console=stderr_console(), transient=True):
        verdicts[row["id"], row["sample_index"]] = auditor.verdict(row)
    _show(verdicts, as_json)
    return ExitCode.FAILED if "mismatch" in verdicts.values() else ExitCode.DONE


def sampled_rows(store: JobStore, config: JobConfig, num_samples: int) -> Iterator[dict[str, Any]]:
    """Rows of finished samples, evenly spread (see the head of this file)."""
    receipts = [receipt for _, receipt in sorted(store.committed().items())]
    total = sum(receipt.num_rows - receipt.num_failed for receipt in receipts)
    count = min(num_samples, total)
    wanted = [(2 * i + 1) * total // (2 * count) for i in range(count)]
    token_ids = ["completion_token_ids"] if "token_ids" in config.output.extras else []
    columns = [*COLUMNS, *stored_columns(config.input), *token_ids]
    first = 0
    for receipt in receipts:
        finished = receipt.num_rows - receipt.num_failed
        mine = {number - first for number in wanted if first <= number < first + finished}
        if mine:
            part = read_part_rows(storage.join(store.output, receipt.path), columns)
            rows = (row for row in part if row["finish_reason"] != "error")
            yield from (row for number, row in enumerate(rows) if number in mine)
        first += finished


def _show(verdicts: dict[tuple[str, int], Verdict], as_json: bool) -> None:
    counts = Counter(verdicts.values())
    if as_json:
        kinds: tuple[Verdict, ...] = ("identical", "near_tie", "mismatch")
        print(json.dumps({"checked": len(verdicts), **{kind: counts[kind] for kind in kinds}}))
        return
    console = Console(highlight=False)
    console.print(
        f"{len(verdicts)} samples decoded again: {counts['identical']} identical, {counts['near_tie']} near-ties, "
        f"{counts['mismatch']} mismatches"
    )
    for (uid, sample_index), verdict in verdicts.items():
        if verdict != "identical":
            console.print(f"{verdict}: {uid} sample {sample_index}", markup=False)
