"""Tables of acceptance figures, for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from pipeline.records import AcceptanceStats
from pipeline.summary import Figures


def print_acceptance(console: Console, stats: AcceptanceStats) -> None:
    """Who made the tokens: each drafter's accepted drafts, and the one token that every step adds by itself."""
    table = Table(title="Acceptance by drafter", title_justify="left")
    table.add_column("drafter", no_wrap=True)
    for title in ("accepted tokens", "per step", "share of output"):
        table.add_column(title, justify="right")
    by_count = sorted(stats.accepted_by_drafter.items(), key=lambda item: (-item[1], item[0]))
    for name, count in [*by_count, ("(the model's own)", stats.num_steps)]:
        per_step = count / stats.num_steps if stats.num_steps else 0.0
        share = count / stats.completion_tokens if stats.completion_tokens else 0.0
        table.add_row(name, f"{count:,}", f"{per_step:.3f}", f"{share:.1%}")
    console.print(table)
    console.print(
        f"{stats.completion_tokens:,} tokens in {stats.num_steps:,} steps: {stats.mean_acceptance_length:.2f} tokens "
        f"per step, {stats.draft_acceptance_rate:.1%} of drafts accepted, mean window {stats.mean_window:.1f}",
        soft_wrap=True,
    )


def group_table(column: str, groups: Mapping[str, Figures]) -> Table:
    """Acceptance figures for each value of an output column."""
    table = Table(title=f"Acceptance by {column}", title_justify="left")
    table.add_column(column, no_wrap=True)
    for title in ("rows", "failed", "tokens", "steps", "tokens per step", "drafts accepted", "mean window"):
        table.add_column(title, justify="right")
    for value, figures in groups.items():
        stats = figures.stats
        table.add_row(
            value,
            f"{figures.rows:,}",
            f"{figures.failed:,}",
            f"{stats.completion_tokens:,}",
            f"{stats.num_steps:,}",
            f"{stats.mean_acceptance_length:.2f}",
            f"{stats.draft_acceptance_rate:.1%}",
            f"{stats.mean_window:.1f}",
        )
    return table
