"""Messages between driver, workers and storage: frozen, small, metadata only (no prompt rows travel through Ray).

`SampleRecord` is the exception that proves the rule: it lives and dies inside a worker, between the engine and the
Parquet part that it becomes a row of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

InputFormat = Literal["parquet", "jsonl", "csv", "tsv", "openai_batch", "datasets"]
FinishReason = Literal["stop", "length", "error"]
WorkerState = Literal["loading", "running", "idle", "draining"]


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous slice of one input file: rows [start_row, start_row + num_rows) of the file.

    `row_groups` are the Parquet row groups that hold these rows (empty for formats without row groups), and
    `first_row_of_groups` is the file row at which the first of them begins. `byte_range` is where the lines of a JSONL
    or CSV shard lie, (start, stop) in bytes. `label` names the file in default row ids: its path below the common
    parent of all inputs, so that it stays the same when the dataset is moved. `num_bytes` is about how much input the
    rows are, 0 where nothing tells.
    """

    index: int
    path: str
    start_row: int
    num_rows: int
    row_groups: tuple[int, ...] = ()
    first_row_of_groups: int = 0
    label: str = ""
    format: InputFormat = "parquet"
    byte_range: tuple[int, int] = (0, 0)
    num_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.num_rows > 0, self
        assert self.start_row >= self.first_row_of_groups >= 0, self


@dataclass(frozen=True, slots=True)
class RetryRound:
    """One `run --retry-failed`, until it is finished: the generation of its commits, and the errors that it is about.

    A shard that has a commit of this generation is done in this round, whatever failed in it again.
    """

    generation: int
    error_type: str | None = None


@dataclass(frozen=True, slots=True)
class Redo:
    """Failed rows of a committed shard are to be done again (`run --retry-failed`), the others copied from `part`.

    `part` is the part that stands, relative to the output, `error_type` limits what is done again to errors of that
    type, and `generation` is what the new commit counts as.
    """

    part: str
    generation: int
    error_type: str | None = None

    def __post_init__(self) -> None:
        assert self.generation > 0, self


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One attempt at one shard, as sent to a worker.

    `run_id` names the driver run, so that attempts of two runs differ too. `output` is the absolute root of the output,
    `passthrough` the Arrow types of `output.columns`, the same for all shards. `dead_rows` are file rows that are
    written as `worker_crash` errors and never decoded, since they killed their workers. With `redo` only the rows that
    it means are decoded, and the part holds the others as they were.
    """

    shard: Shard
    attempt: int
    run_id: str
    output: str
    passthrough: pa.Schema
    dead_rows: tuple[int, ...] = ()
    redo: Redo | None = None

    @property
    def trace(self) -> str:
        """The name of this attempt, in logs and in the name of its part."""
        return f"{self.shard.index:05d}-{self.run_id}-{self.attempt}"

    @property
    def part_name(self) -> str:
        """Attempt-unique object name, relative to the output: a late duplicate can never overwrite a committed part."""
        return f"data/part-{self.trace}.parquet"


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """Counts of parallel decoding, pooled by addition. Rates are derived, never stored, never averaged.

    Invariants (asserted): sum(histogram) = num_steps, sum(j * histogram[j]) = num_accepted_draft_tokens <=
    num_draft_tokens. `completion_tokens = num_steps + num_accepted_draft_tokens`, since each step emits its accepted
    drafts and one more token.

    Worked example: three steps that drafted 4, 4, 0 tokens and accepted 2, 0, 0 give num_steps=3, num_draft_tokens=8,
    num_accepted_draft_tokens=2, acceptance_histogram=(2, 0, 1), window_histogram=(1, 0, 0, 0, 2).
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    window_histogram: tuple[int, ...] = ()
    accepted_by_drafter: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert sum(self.acceptance_histogram) == self.num_steps, self
        assert sum(self.window_histogram) == self.num_steps, self
        accepted = sum(j * count for j, count in enumerate(self.acceptance_histogram))
        assert accepted == self.num_accepted_draft_tokens <= self.num_draft_tokens, self
        assert sum(self.accepted_by_drafter.values()) == self.num_accepted_draft_tokens, self

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        by_drafter = dict(self.accepted_by_drafter)
        for name, count in other.accepted_by_drafter.items():
            by_drafter[name] = by_drafter.get(name, 0) + count
        return AcceptanceStats(
            num_steps=self.num_steps + other.num_steps,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens + other.num_accepted_draft_tokens,
            acceptance_histogram=_add_histograms(self.acceptance_histogram, other.acceptance_histogram),
            window_histogram=_add_histograms(self.window_histogram, other.window_histogram),
            accepted_by_drafter=by_drafter,
        )

    @property
    def completion_tokens(self) -> int:
        return self.num_steps + self.num_accepted_draft_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per decoding step of one sequence: 1 + accepted / steps (1.0 before the first step)."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_window(self) -> float:
        """Draft rows per step."""
        return self.num_draft_tokens / self.num_steps if self.num_steps else 0.0


def _add_histograms(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    if len(a) < len(b):
        a, b = b, a
    return tuple(x + (b[i] if i < len(b) else 0) for i, x in enumerate(a))


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """Tokens [start, start + length) of an output are drafts of one drafter that one step accepted.

    They are the characters [text_start, text_start + text_length) of its text. A character whose bytes several tokens
    share belongs to the last of them.
    """

    start: int
    length: int
    drafter: str
    text_start: int = 0
    text_length: int = 0


@dataclass(frozen=True, slots=True)
class OccupancyClass:
    """Steps of an engine in which `at_least` to twice as many (excluded) samples were decoding.

    `sequence_steps` counts each of these samples in each of the steps, `draft_rows` what was verified for them beside
    their pending tokens, `accepted` the drafts of it that were right.
    """

    at_least: int
    steps: int
    sequence_steps: int
    draft_rows: int
    accepted: int


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One output row: a sample of one prompt, or the error that took its place.

    `prompt` or `messages` holds what the user gave; `passthrough` the values of `output.columns`. `prompt_token_ids` is
    the rendered prompt (extra `prompt_ids`). `seed` is null where it is the job's; `sampling` and `tools` (as JSON) are
    what the row itself asked for. The other optional lists have one entry per completion token: `topk_*` one list of k
    per token, `cdf_*` the interval of the noise that picks the token (inverse-CDF coupling).
    """

    id: str
    sample_index: int
    prompt: str | None
    messages: tuple[Mapping[str, str], ...] | None
    generation: str | None
    finish_reason: FinishReason
    error_type: str | None
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    stats: AcceptanceStats
    latency_s: float
    passthrough: Mapping[str, Any] = field(default_factory=dict)
    completion_token_ids: tuple[int, ...] | None = None
    token_logprobs: tuple[float, ...] | None = None
    topk_token_ids: tuple[tuple[int, ...], ...] | None = None
    topk_logprobs: tuple[tuple[float, ...], ...] | None = None
    cdf_low: tuple[float, ...] | None = None
    cdf_high: tuple[float, ...] | None = None
    draft_spans: tuple[DraftSpan, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    sampling: Mapping[str, Any] | None = None
    tools: str | None = None

    def __post_init__(self) -> None:
        assert (self.finish_reason == "error") == (self.error_type is not None), self
        assert self.completion_tokens == self.stats.completion_tokens, self


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """What a worker says of a part that it has written whole. Counts rows of output (samples), not of input.

    `generation` is 0 for a shard's first part; the commit of the highest generation stands (see `Redo`). `num_looping`
    and `num_cut_off` are outputs that end in a loop, or at `sampling.max_tokens` (see `quality`). `began` is when the
    attempt began and `worker_began` when its process did, by the clock of its machine (Unix seconds; 0.0 in receipts of
    earlier versions). `occupancy` is what the worker's engine did since the receipt before, for whichever shards.
    """

    shard_index: int
    attempt: int
    path: str
    num_rows: int
    num_failed: int
    num_bytes: int
    prompt_tokens: int
    completion_tokens: int
    stats: AcceptanceStats
    errors: Mapping[str, int]
    seconds: float
    worker: str
    generation: int = 0
    num_looping: int = 0
    num_cut_off: int = 0
    began: float = 0.0
    worker_began: float = 0.0
    occupancy: tuple[OccupancyClass, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.num_failed <= self.num_rows, self


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """A worker's counters since it started, sampled by the driver: for the progress display, and to see it alive.

    `stalled_s`: so long ago the engine finished its last step although it has work; 0.0 without work or a model.
    """

    worker: str
    state: WorkerState
    rows_done: int
    rows_failed: int
    completion_tokens: int
    running: int
    waiting: int
    stats: AcceptanceStats
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. Rows are output rows; those that workers have finished but not committed yet count as done."""

    rows_done: int
    rows_failed: int
    rows_total: int
    shards_committed: int
    shards_total: int
    completion_tokens: int
    workers: tuple[WorkerProgress, ...]
    elapsed_s: float


ProgressCallback = Callable[[Progress], None]
