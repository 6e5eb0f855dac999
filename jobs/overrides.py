"""The options of commands that read a job file: the common overrides and `--set`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import click

OVERRIDES: dict[str, tuple[str, Any, str]] = {
    "model": ("model.id", str, "Hub id, folder, URL, GGUF file or builtin name."),
    "input": ("input.path", str, "File, glob, folder, URL or datasets name; may be given more than once."),
    "output": ("output.path", str, "Folder or URL; one folder holds one job."),
    "max-tokens": ("sampling.max_tokens", int, "Most new tokens of a sample."),
    "temperature": ("sampling.temperature", float, "0 is greedy."),
    "top-p": ("sampling.top_p", float, "Keep the likeliest tokens that make up this probability."),
    "top-k": ("sampling.top_k", int, "Keep this many likeliest tokens; 0 is off."),
    "n": ("sampling.n", int, "Samples of each prompt."),
    "seed": ("sampling.seed", int, "Seed of all samples."),
    "workers": ("cluster.workers", int, "Model replicas."),
    "log-format": ("cluster.log_format", click.Choice(["text", "json"]), "Log of driver and workers, on stderr."),
    "limit": ("input.limit", int, "Use only the first rows."),
}


def override_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the common overrides and `--set`; the command gets all of them as one list `overrides`.

    An own option is applied after every `--set`, so it wins over a `--set` of the same key.
    """

    @functools.wraps(command)
    def with_overrides(set_values: tuple[str, ...], **values: Any) -> None:
        overrides = list(set_values)
        for name, (key, _, _) in OVERRIDES.items():
            value = values.pop(name.replace("-", "_"))
            if value not in (None, ()):
                overrides.append(f"{key}={json.dumps(value)}")  # JSON is YAML, and it never reads "1e3" as a number
        command(overrides=overrides, **values)

    for name, (key, kind, text) in reversed(OVERRIDES.items()):
        option = click.option(f"--{name}", type=kind, multiple=name == "input", help=f"{text} [{key}]")
        with_overrides = option(with_overrides)
    return click.option(
        "--set", "set_values", multiple=True, metavar="KEY=VALUE", help="Set any key of the job file, as YAML."
    )(with_overrides)
