"""What a row asks for itself beside its prompt: sampling parameters, a seed, tools for the chat template.

A value that cannot be used raises RowError (`invalid_sampling`, `invalid_tools`), which names the column, the rule and
the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.config import SamplingConfig
from pipeline.config_io import parse_section
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError, RowError

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed")
"""What a row may decide. The rest (how many samples, coupling, penalties, ..) is one for all rows of a job."""

Tools = tuple[Mapping[str, Any], ...]


def setting_columns(config: InputConfig) -> tuple[str, ...]:
    """The columns that the settings of a row come from."""
    named = (config.sampling_column, config.seed_column, config.tools_column)
    return tuple(column for column in named if column is not None)


def sampling_of(values: Mapping[str, Any], config: InputConfig) -> dict[str, Any]:
    """The sampling parameters that a row overrides, checked. Null keys do not count.

    Worked example: `{"temperature": 0, "top_p": None}` gives `{"temperature": 0.0}`.
    """
    overrides: dict[str, Any] = {}
    if config.seed_column is not None and values.get(config.seed_column) is not None:
        overrides |= _checked({"seed": values[config.seed_column]}, {"seed": config.seed_column})
    if config.sampling_column is not None and values.get(config.sampling_column) is not None:
        column = config.sampling_column
        given = _parsed(values[column], column, "invalid_sampling")
        if not isinstance(given, Mapping):
            raise RowError("invalid_sampling", f"{column} must be a mapping of keys, got {given!r}")
        given = {key: value for key, value in given.items() if value is not None}
        for key in given:
            if key not in SAMPLING_KEYS:
                raise RowError("invalid_sampling", f"{column} must hold {', '.join(SAMPLING_KEYS)} only, got {key!r}")
        overrides |= _checked(given, {key: f"{column}.{key}" for key in given})
    return overrides


def tools_of(values: Mapping[str, Any], config: InputConfig) -> Tools | None:
    """The tools of a row, each a mapping as chat templates take them; None where it has none."""
    column = config.tools_column
    if column is None or values.get(column) is None:
        return None
    given = _parsed(values[column], column, "invalid_tools")
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise RowError("invalid_tools", f"{column} must be a list of mappings, got {given!r}")
    return tuple(_without_nulls(tool) if isinstance(values[column], list) else tool for tool in given) or None


def _parsed(value: Any, column: str, error_type: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(error_type, f"{column} must be JSON where it is text, got {value!r}: {error}") from error


def _checked(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Values as `SamplingConfig` takes them; a mistake is told under the name of its column."""
    overrides = {}
    for key, value in given.items():
        try:
            overrides[key] = getattr(parse_section(SamplingConfig, {key: value}), key)
        except ConfigError as error:
            raise RowError("invalid_sampling", names[key] + str(error).removeprefix(key)) from error
    return overrides


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct of a column all keys that any of them has."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
