"""Figures of a benchmark: as plain data for JSON, and as a table for people."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from jobs.bench.rounds import Entry
from jobs.bench.workload import Workload

PLAIN = "autoregressive"


def report(entries: Sequence[Entry], workload: Workload, settings: dict[str, Any], vllm: str | None) -> dict[str, Any]:
    """Everything that a reader of the figures needs, as plain JSON values."""
    lengths = [len(ids) for ids in workload.prompts]
    return {
        "machine": machine(),
        "versions": versions(vllm),
        "command": sys.argv,
        "settings": settings,
        "prompts": {"count": len(lengths), "tokens": sum(lengths), "longest": max(lengths)},
        "rows": [row(entry, entries, workload) for entry in entries],
    }


def row(entry: Entry, entries: Sequence[Entry], workload: Workload) -> dict[str, Any]:
    """One contestant at one batch size. `same_as_plain` is the share of samples that equal our plain decoding's."""
    rates = entry.rates
    spread = {"median": statistics.median(rates), "min": min(rates), "max": max(rates)} if rates else None
    figures: dict[str, Any] = {
        "contestant": entry.contestant.name,
        "batch": entry.batch,
        "tokens_per_s": spread,
        "tokens_per_step": entry.tokens_per_step,
        "startup_s": entry.startup_s,
        "seconds": entry.seconds,
        "tokens": entry.num_tokens[-1] if entry.num_tokens else 0,
        "same_as_plain": _same_as_plain(entry, entries, workload),
    }
    return figures | {key: text for key, text in (("note", entry.note), ("error", entry.error)) if text is not None}


def _same_as_plain(entry: Entry, entries: Sequence[Entry], workload: Workload) -> float | None:
    """None where equality means nothing: a peer draws its own noise unless decoding is greedy."""
    plain = next((e for e in entries if e.contestant.name == PLAIN and e.batch == entry.batch), None)
    comparable = entry.contestant.is_own or workload.sampling.temperature == 0
    if plain is None or not plain.token_ids or not entry.token_ids or plain is entry or not comparable:
        return None
    same = [a == b for a, b in zip(entry.token_ids, plain.token_ids, strict=True)]
    return sum(same) / len(same)


def machine() -> dict[str, Any]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "gpu": gpu,
        "system": platform.platform(),
    }


def versions(vllm: str | None) -> dict[str, str | None]:
    names = ("sevenleague", "torch", "transformers")
    return {"python": platform.python_version(), **{name: _version(name) for name in names}, "vllm": vllm}


def _version(package: str) -> str | None:
    """None for a package that is used without being installed, as this one is from a copy of the repository."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """The processor's name; Python itself knows only its family."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def print_report(console: Console, figures: dict[str, Any]) -> None:
    """One line per contestant and batch size, batch by batch.

    `x plain` is the median over that of plain decoding at the same batch size, `per step` tokens per step, and `same`
    the share of samples that equal those of plain decoding.
    """
    table = Table(title="New tokens per second", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("contestant", no_wrap=True)
    for title in ("median", "min .. max", "x plain", "per step", "same", "start-up"):
        table.add_column(title, justify="right", no_wrap=True)
    rows = sorted(figures["rows"], key=lambda r: r["batch"])  # stable: contestants stay in order
    medians = {(r["contestant"], r["batch"]): r["tokens_per_s"]["median"] for r in rows if r["tokens_per_s"]}
    last = {r["batch"]: r for r in rows}
    for r in rows:
        rate, plain = r["tokens_per_s"], medians.get((PLAIN, r["batch"]))
        table.add_row(
            str(r["batch"]),
            r["contestant"],
            _number(rate and rate["median"], 1),
            f"{rate['min']:,.1f} .. {rate['max']:,.1f}" if rate else "",
            _number(rate["median"] / plain if rate and plain else None, 2),
            _number(r["tokens_per_step"], 2),
            "" if r["same_as_plain"] is None else f"{r['same_as_plain']:.0%}",
            "" if r["startup_s"] is None else f"{r['startup_s']:.1f} s",
            end_section=r is last[r["batch"]],
        )
    console.print(table)
    for r in rows:
        said = r.get("error") or r.get("note")
        if said is not None:
            console.print(f"{r['contestant']} at batch {r['batch']}: {said}", soft_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
