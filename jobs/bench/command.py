"""`sevenleague bench`: from options to contestants, and from their turns to JSON, table and chart."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from jobs.bench.chart import check_chart, draw_chart
from jobs.bench.contestants import Contestant, OwnContestant, strategies
from jobs.bench.hf import HFGenerate, HFGenerateBatch, load_hf_model
from jobs.bench.options import BenchOptions
from jobs.bench.report import print_report, report
from jobs.bench.rounds import Entry, compete
from jobs.bench.vllm_client import VllmPeer
from jobs.bench.workload import Workload, load_workload
from jobs.exit_codes import ExitCode
from jobs.progress import stderr_console
from pipeline.config import JobConfig
from pipeline.config_io import parse_job
from pipeline.errors import ConfigError
from workers.model_loading import LoadedModel, load_model

PEERS = ("hf-generate", "hf-generate-batch", "hf-prompt-lookup", "vllm", "vllm-ngram")
SETTABLE = ("decoding", "engine", "input", "model")
OWN_OPTIONS = {
    "decoding.strategy": "--contestants",
    "engine.max_sequences": "--batch",
    "engine.threads": "--threads",
    "input.limit": "--limit",
    "input.path": "--prompts",
    "model.id": "--model",
    "model.dtype": "--dtype",
}

Value = TypeVar("Value")


def command(options: BenchOptions) -> ExitCode:
    """The CLI command. Fails when no contestant could be measured at all."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as good as Ctrl-C: peers are ended
    check(options)
    jobs = {name: job_of(options, name) for name in options.contestants if name not in PEERS}
    job = next(iter(jobs.values()), None) or job_of(options, "autoregressive")
    torch.set_num_threads(options.threads)
    own_model = _timed_once(lambda: load_model(job.model))
    loaded, _ = own_model()
    workload = load_workload(
        job, loaded, limit=options.limit, spread=options.spread, max_prompt_chars=options.max_prompt_chars
    )
    contestants = _contestants(options, job, jobs, own_model, workload)
    entries: list[Entry] = []
    progress = stderr_console()

    def on_turn(number: int, entry: Entry) -> None:
        said = entry.error or f"{entry.rates[-1]:,.1f} tokens/s"
        where = f"round {number + 1} of {options.rounds}, batch {entry.batch}, {entry.contestant.name}"
        progress.print(f"{where}: {said}", markup=False, highlight=False, soft_wrap=True)
        _write(options, entries, contestants, workload)

    try:
        compete(contestants, options.batches, options.rounds, workload, entries, on_turn)
    finally:
        for contestant in contestants:
            contestant.close()
    figures = _write(options, entries, contestants, workload)
    if options.chart_path is not None:
        draw_chart(options.chart_path, figures)
    print_report(Console(highlight=False, markup=False), figures)
    return ExitCode.DONE if any(entry.seconds for entry in entries) else ExitCode.FAILED


def check(options: BenchOptions) -> None:
    """What can be said before the model is loaded. Raises ConfigError."""
    known = [*strategies(), *PEERS]
    for name in options.contestants:
        if name not in known:
            raise ConfigError(f"--contestants must be among {', '.join(known)}, got {name!r}")
        peer = name.split("-")[0]
        if peer == "vllm" and shutil.which(options.peer_pythons.get("vllm", "")) is None:
            given = options.peer_pythons.get("vllm", "nothing")
            raise ConfigError(f"--peer-python must name an interpreter for {name} (vllm=PATH), got {given!r}")
    for name in options.peer_pythons:
        if name != "vllm":
            raise ConfigError(f"--peer-python must be for vllm, got {name!r}")
    for option, path in (("--json", options.json_path), ("--chart", options.chart_path)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{option} must name a file in a folder that exists, got {path!r}")
    if options.chart_path is not None:
        check_chart(options.chart_path)


def job_of(options: BenchOptions, strategy: str) -> JobConfig:
    """The job that a strategy's contestant stands for. Keys of `decoding` apply to the strategies that have them.

    Raises ConfigError for keys that bench has options for or that it cannot honour, and as `parse_job` does.
    """
    own = [name for name in options.contestants if name not in PEERS]
    overrides = []
    for override in options.overrides:
        key = override.partition("=")[0].strip()
        section, _, name = key.partition(".")
        if key in OWN_OPTIONS:
            raise ConfigError(f"--set must not name {key}, for which there is {OWN_OPTIONS[key]}, got {override!r}")
        if section not in SETTABLE:
            raise ConfigError(f"--set must name a key of {', '.join(SETTABLE)}, got {override!r}")
        name = name.split(".")[0]
        owners = [other for other in own if name in strategies()[other].model_fields]
        if section != "decoding" or not owners or strategy in owners:
            overrides.append(override)
    data = {
        "model": {"id": options.model, "dtype": options.dtype},
        "input": {"path": options.prompts},
        "output": {"path": "unused"},
        "sampling": {
            "n": options.n,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "coupling": options.coupling,
            "max_tokens": options.max_tokens,
            "ignore_eos": options.ignore_eos,
            "seed": options.seed,
        },
        "decoding": {"strategy": strategy},
        "engine": {"threads": options.threads},
    }
    return parse_job(data, overrides)


def _contestants(
    options: BenchOptions,
    job: JobConfig,
    jobs: dict[str, JobConfig],
    own_model: Callable[[], tuple[LoadedModel, float]],
    workload: Workload,
) -> list[Contestant]:
    loaded, _ = own_model()
    hf_model = _timed_once(lambda: load_hf_model(job.model, loaded.model.device))

    def make(name: str) -> Contestant:
        if name in jobs:
            return OwnContestant(name, own_model, jobs[name].engine, jobs[name].decoding, workload)
        if name == "hf-generate-batch":
            return HFGenerateBatch(hf_model, loaded, workload)
        if name.startswith("hf-"):
            return HFGenerate(name, hf_model, loaded, workload, prompt_lookup=name == "hf-prompt-lookup")
        python = options.peer_pythons["vllm"]
        most = max(options.batches)
        return VllmPeer(name, python, job.model, loaded, workload, max_batch=most, threads=options.threads)

    return [make(name) for name in options.contestants]


def _timed_once(load: Callable[[], Value]) -> Callable[[], tuple[Value, float]]:
    """`load` with the seconds that it took, called when first needed and never again."""

    @functools.cache
    def loaded() -> tuple[Value, float]:
        began = time.perf_counter()
        value = load()
        return value, time.perf_counter() - began

    return loaded


def _write(
    options: BenchOptions,
    entries: Sequence[Entry],
    contestants: Sequence[Contestant],
    workload: Workload,
) -> dict[str, Any]:
    """The figures so far; what is measured is not lost when a later turn ends the process."""
    vllm = next((peer.version for peer in contestants if isinstance(peer, VllmPeer) and peer.version), None)
    figures = report(entries, workload, asdict(options), vllm)
    if options.json_path is not None:
        Path(options.json_path).write_text(json.dumps(figures, indent=1) + "\n")
    return figures
