"""The options of `sevenleague bench`. Loads without torch, so that `--help` is quick."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. `peer_pythons` maps the name of a peer to an interpreter that has it."""

    model: str
    prompts: str
    limit: int
    spread: bool
    max_prompt_chars: int | None
    max_tokens: int
    ignore_eos: bool
    temperature: float
    top_p: float
    coupling: str
    n: int
    seed: int
    batches: tuple[int, ...]
    contestants: tuple[str, ...]
    rounds: int
    dtype: str
    threads: int
    overrides: tuple[str, ...]
    peer_pythons: Mapping[str, str]
    json_path: str | None
    chart_path: str | None


def bench_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `BenchOptions` to a click command, which gets them under the names of its fields."""
    at_least_1 = click.IntRange(min=1)
    dtypes = click.Choice(["auto", "float64", "float32", "bfloat16", "float16"])
    options = [
        click.option("--model", required=True, help="Hub id, folder, URL, GGUF file or builtin name."),
        click.option("--prompts", required=True, help="Prompts, in any form that a job's input may have."),
        click.option("--limit", type=at_least_1, default=64, show_default=True, help="How many prompts."),
        click.option("--spread", is_flag=True, help="Take them evenly over the file, not the first ones."),
        click.option("--max-prompt-chars", type=at_least_1, help="Leave out prompts whose user text is longer."),
        click.option("--max-tokens", type=at_least_1, default=128, show_default=True, help="New tokens of a sample."),
        click.option(
            "--ignore-eos/--no-ignore-eos",
            default=True,
            show_default=True,
            help="Go on after the end token, so that everyone makes the same number of tokens.",
        ),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest tokens."),
        click.option(
            "--coupling",
            type=click.Choice(["gumbel", "inverse_cdf"]),
            default="gumbel",
            show_default=True,
            help="How noise picks our tokens; adapters need inverse_cdf.",
        ),
        click.option("--n", type=at_least_1, default=1, show_default=True, help="Samples of each prompt."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of all samples."),
        click.option("--batch", "batches", type=_Numbers(), default="1,8", show_default=True, help="Batch sizes."),
        click.option(
            "--contestants",
            type=_Names(),
            default="autoregressive,auto",
            show_default=True,
            help="Decoding strategies and the peers hf-generate, hf-generate-batch, hf-prompt-lookup, vllm, "
            "vllm-ngram.",
        ),
        click.option("--rounds", type=at_least_1, default=3, show_default=True, help="Turns of each contestant."),
        click.option("--dtype", type=dtypes, default="auto", show_default=True, help="auto: the checkpoint's own."),
        click.option("--threads", type=at_least_1, default=_cpus, show_default="all CPUs", help="CPU threads of each."),
        click.option(
            "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="decoding.*, engine.*, input.* or model.*"
        ),
        click.option(
            "--peer-python",
            "peer_pythons",
            type=_Assignment(),
            multiple=True,
            metavar="vllm=PATH",
            help="Interpreter that has the peer.",
        ),
        click.option("--json", "json_path", metavar="FILE", help="Write the figures here."),
        click.option("--chart", "chart_path", metavar="FILE.png", help="Draw throughput over batch size."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def make_options(peer_pythons: tuple[tuple[str, str], ...], **values: Any) -> BenchOptions:
    """Options from what click has parsed."""
    return BenchOptions(peer_pythons=dict(peer_pythons), **values)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Numbers(click.ParamType[Any]):
    name = "N,N,.."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and int(part) >= 1 for part in parts):
            self.fail(f"{value!r} must be numbers of at least 1 with commas between.", param, ctx)
        return tuple(dict.fromkeys(map(int, parts)))


class _Names(click.ParamType[Any]):
    name = "NAME,NAME,.."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))


class _Assignment(click.ParamType[Any]):
    name = "NAME=PATH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, path = str(value).partition("=")
        if not (name and equals and path):
            self.fail(f"{value!r} must be NAME=PATH.", param, ctx)
        return name, path
