"""Batch generation in this process, without Ray and without files: `sevenleague.Engine`.

    with Engine("builtin:smollm2-135m", dtype="bfloat16") as engine:
        for result in engine.generate(["One step", "Two steps"], {"temperature": 0, "max_tokens": 32}):
            print(result.text, result.stats.mean_acceptance_length)

It decodes as a worker of a job does, and takes the same configuration: a row of a job and a prompt with the same id,
seed and parameters give the same tokens.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Literal

import torch
from pydantic import BaseModel

from pipeline.config import EngineConfig, JobConfig, ModelConfig, SamplingConfig
from pipeline.config_io import parse_job
from pipeline.decoding_config import DecodingConfig
from pipeline.errors import ConfigError, RowError
from pipeline.prompts import Prompt, make_prompt
from workers.engine import Engine as StepEngine
from workers.engine import Request
from workers.engine_thread import EngineThread
from workers.generation import GenerateProgress, Generation, failed_generations, generations_of
from workers.in_flight import ResultFuture
from workers.model_loading import load_model
from workers.rendering import TOKENIZED_TOGETHER, make_renderer

PromptLike = str | Sequence[Mapping[str, str]]
"""A string, or a messages list: `[{"role": .., "content": ..}, ..]`."""
SamplingLike = SamplingConfig | Mapping[str, Any] | None
DecodingLike = DecodingConfig | Mapping[str, Any] | str

_NOWHERE = "(in process)"
_MISSING: Any = object()
_MUST_BE_IDLE = "an engine must be open and idle when it is called, got one that is {}"


class Engine:
    """A model that generates for many prompts at once, with parallel decoding. One call at a time.

    It holds the model until `close`, or the end of a `with` block. Mistakes in the arguments raise ConfigError; what is
    wrong with one prompt becomes results with an `error_type`.
    """

    def __init__(
        self,
        model: str | ModelConfig,
        *,
        dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        engine: EngineConfig | Mapping[str, Any] | None = None,
        extras: Sequence[Literal["logprobs", "topk", "cdf"]] = (),
        chat_template: bool | None = None,
        on_too_long: Literal["error", "truncate_left"] = "error",
    ) -> None:
        """`dtype` and `device` are those of a model given by name; a `ModelConfig` has its own.

        The rest are keys of a job file: sections `engine` and `input`, and `output.extras`.
        """
        named = {"id": model, "dtype": dtype, "device": device} if isinstance(model, str) else _plain(model)
        source = {"path": _NOWHERE, "chat_template": chat_template, "on_too_long": on_too_long}
        self._settings = {
            "model": named,
            "input": source,
            "output": {"path": _NOWHERE, "extras": list(extras)},
            "engine": _plain(engine or {}),
        }
        config = parse_job({**self._settings, "output": _NOWHERE})
        if config.engine.threads is not None:
            torch.set_num_threads(config.engine.threads)
        self._loaded = load_model(config.model)
        self._renderer = make_renderer(self._loaded, config)
        self._steps: tuple[DecodingConfig, EngineThread] | None = None
        self._in_use = threading.Lock()
        self._is_closed = False

    @property
    def model_revision(self) -> str:
        """Commit of a hub model, else a hash of its files."""
        return self._loaded.revision

    def generate(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingLike = None,
        decoding: DecodingLike = "auto",
        *,
        ids: Sequence[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        on_progress: Callable[[GenerateProgress], None] | None = None,
    ) -> list[Generation]:
        """All samples of all prompts, in the order of prompts and then of samples.

        `sampling`, `decoding`, `ids` and `tools` are those of `stream`. `on_progress` is called in this thread whenever
        a prompt is done.
        """
        if isinstance(prompts, str):
            raise ConfigError(f"prompts must be a list of prompts, got the string {prompts!r}")
        began, tokens = time.perf_counter(), 0
        config = self._config(sampling, decoding)
        total = len(prompts) * config.sampling.n
        results: list[Generation] = []
        with closing(self._streamed(prompts, config, ids, tools)) as stream:
            for result in stream:
                results.append(result)
                tokens += len(result.token_ids)
                if on_progress is not None:
                    on_progress(GenerateProgress(len(results), total, tokens, time.perf_counter() - began))
        return sorted(results, key=lambda result: (result.prompt_index, result.sample_index))

    def stream(
        self,
        prompts: Iterable[PromptLike],
        sampling: SamplingLike = None,
        decoding: DecodingLike = "auto",
        *,
        ids: Iterable[str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Generator[Generation, None, None]:
        """Samples as they are done; those of one prompt come together. Prompts are taken as the engine has room.

        `ids` fix the noise of each prompt, as row ids do in a job; default: 0, 1, 2, .. as text. `tools` are described
        to the model by its chat template. A stream that is closed early drops what it has begun.
        """
        return self._streamed(prompts, self._config(sampling, decoding), ids, tools)

    def close(self) -> None:
        """Ends the engine's thread. The model goes when nothing else refers to it."""
        self._is_closed = True
        if self._steps is not None:
            self._steps[1].close()
            self._steps = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _config(self, sampling: SamplingLike, decoding: DecodingLike) -> JobConfig:
        return parse_job({**self._settings, "sampling": _plain(sampling or {}), "decoding": _plain(decoding)})

    def _streamed(
        self,
        prompts: Iterable[PromptLike],
        config: JobConfig,
        ids: Iterable[str] | None,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Generator[Generation, None, None]:
        settings = config.input.model_copy(update={"tools_column": "tools"})
        own = {"tools": None if tools is None else list(tools)}
        made = (
            make_prompt(index, uid, _listed(prompt), own, settings)
            for index, (prompt, uid) in enumerate(_named(prompts, ids))
        )
        return self._decoded(made, config)

    def _thread(self, config: JobConfig) -> EngineThread:
        """The engine of this way of decoding: the last one, if it is the same, with all that its drafters learnt."""
        if self._steps is None or self._steps[0] != config.decoding:
            if self._steps is not None:
                self._steps[1].close()
                self._steps = None  # its memory goes before the next one takes its own

            def new_engine(halvings: int) -> StepEngine:
                return StepEngine(self._loaded, config.engine, config.decoding, config.output.recorded, halvings)

            self._steps = config.decoding, EngineThread(new_engine, owns_process=False)
        return self._steps[1]

    def _decoded(self, prompts: Iterator[Prompt], config: JobConfig) -> Generator[Generation, None, None]:
        self._check_open()
        if not self._in_use.acquire(blocking=False):
            raise ConfigError(_MUST_BE_IDLE.format("busy with another call"))
        most = 4 * config.engine.max_sequences
        done: queue.SimpleQueue[ResultFuture] = queue.SimpleQueue()
        in_flight: dict[ResultFuture, tuple[Prompt, int]] = {}
        is_last = False
        try:
            thread = self._thread(config)
            while not is_last or in_flight:
                while not is_last and len(in_flight) <= most:
                    chunk = list(itertools.islice(prompts, TOKENIZED_TOGETHER))
                    is_last = len(chunk) < TOKENIZED_TOGETHER
                    for prompt, outcome in zip(chunk, self._token_ids(chunk, config), strict=True):
                        if isinstance(outcome, RowError):
                            yield from failed_generations(prompt, outcome, config)
                        else:
                            future = thread.submit(Request(prompt.uid, outcome, config.sampling))
                            in_flight[future] = prompt, len(outcome)
                            future.add_done_callback(done.put)
                if in_flight:
                    self._check_open()  # else nobody would ever be done
                    future = done.get()
                    yield from generations_of(*in_flight.pop(future), future, config)
        finally:
            for future in in_flight:
                future.cancel()
            self._in_use.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(_MUST_BE_IDLE.format("closed"))

    def _token_ids(self, prompts: Sequence[Prompt], config: JobConfig) -> list[tuple[int, ...] | RowError]:
        return self._renderer.batch_token_ids(prompts, config.sampling.max_tokens)


def _plain(value: BaseModel | Mapping[str, Any] | str) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


def _listed(prompt: object) -> object:
    """Messages as a list, however they come."""
    return list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else prompt


def _named(prompts: Iterable[PromptLike], ids: Iterable[str] | None) -> Iterator[tuple[PromptLike, str]]:
    """Each prompt with its id. Raises ConfigError for an id that comes twice: the noise of both would be the same."""
    if ids is None:
        yield from ((prompt, str(index)) for index, prompt in enumerate(prompts))
        return
    seen: set[str] = set()
    for prompt, uid in itertools.zip_longest(prompts, ids, fillvalue=_MISSING):
        if prompt is _MISSING or uid is _MISSING:
            raise ConfigError(f"ids must be as many as prompts, got {'fewer' if uid is _MISSING else 'more'}")
        if uid in seen:
            raise ConfigError(f"ids must be unique, got {uid!r} twice")
        seen.add(uid)
        yield prompt, uid
