"""A picture of a benchmark: throughput over batch size, one line per contestant."""

from __future__ import annotations

import importlib.util
from typing import Any

from pipeline.errors import ConfigError


def check_chart(path: str) -> None:
    """Raises ConfigError when a chart cannot be drawn, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--chart needs the Python package matplotlib: pip install 'sevenleague[bench]'")
    if not path.endswith(".png"):
        raise ConfigError(f"--chart must name a .png file, got {path!r}")


def draw_chart(path: str, figures: dict[str, Any]) -> None:
    """Medians as lines, with bars from the slowest to the fastest round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in figures["rows"] if row["tokens_per_s"]]
    for name in dict.fromkeys(row["contestant"] for row in rows):
        mine = sorted((row for row in rows if row["contestant"] == name), key=lambda row: row["batch"])
        rates = [row["tokens_per_s"] for row in mine]
        medians = [rate["median"] for rate in rates]
        below = [rate["median"] - rate["min"] for rate in rates]
        above = [rate["max"] - rate["median"] for rate in rates]
        batches = [row["batch"] for row in mine]
        axes.errorbar(batches, medians, yerr=[below, above], marker="o", capsize=3, label=name)
    ticks = sorted({row["batch"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch: sequences in flight")
    axes.set_ylabel("new tokens per second")
    settings = figures["settings"]
    axes.set_title(f"{settings['model']}, {settings['dtype']}, {figures['machine']['cpus']} CPUs")
    axes.grid(alpha=0.3)
    if rows:
        axes.legend()
    figure.savefig(path, dpi=150)
