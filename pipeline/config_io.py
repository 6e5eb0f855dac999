"""Job files in and out: YAML and overrides -> JobConfig, with every mistake told in one plain sentence.

Training files (`train_config`) are read by the same functions, which take the outermost section as `root`.

The sentences name the dotted key, the rule and the value: ``sampling.top_p must be in (0, 1], got 1.7``. They are built
from the constraints that the fields of `config` declare, so a new field needs no text here.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import annotated_types
import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline import storage
from pipeline.config import JobConfig
from pipeline.errors import ConfigError, SevenLeagueError

Root = TypeVar("Root", bound=BaseModel)

_SHORTHANDS = {"model": "id", "input": "path", "output": "path", "decoding": "strategy"}
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a string",
    "tuple": "a list",
    "model": "a mapping of keys",
    "dict": "a mapping of keys",
}


def load_job(path: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The job of a YAML file (any fsspec path). Raises ConfigError; see `parse_job` for overrides."""
    return parse_job(read_mapping(path, "job file"), overrides)


def parse_job(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """The job of plain data. An override `a.b=c` replaces the value at `a.b`; `c` is YAML. Raises ConfigError.

    An override of `decoding.strategy` by another strategy drops the parameters that the data has for the old one.
    """
    merged = _copied(data)
    _switch_strategy(merged, overrides)
    return parse_section(JobConfig, merged, overrides)


def read_mapping(path: str, what: str) -> Mapping[str, Any]:
    """The plain data of a YAML file (any fsspec path), which a mistake calls `what`. Raises ConfigError."""
    try:
        text = storage.read_bytes(path).decode()
    except (OSError, ValueError, SevenLeagueError) as error:
        raise ConfigError(f"the {what} must be a readable text file, got {path!r}: {_reason(error)}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the {what} must be valid YAML, got {path!r}: {' '.join(str(error).split())}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"the {what} must be a mapping of keys, got {_kind(data)} in {path!r}")
    return data


def parse_section(root: type[Root], data: Mapping[str, Any], overrides: Sequence[str] = ()) -> Root:
    """Plain data with its overrides as the section `root`, which the keys of a mistake begin at. Raises ConfigError."""
    merged = _copied(data)
    for override in overrides:
        _apply(merged, override)
    try:
        return root.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_sentence(root, error.errors(include_url=False)[0])) from error


def dump_job(config: JobConfig) -> str:
    """The resolved job as YAML: every key with its value, defaults included; `parse_job` of it gives `config` again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"an override must be key=value, got {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of an override must be valid YAML, got {override!r}") from error
    section = data
    for depth, name in enumerate(names[:-1]):
        inner = section.get(name)
        if depth == 0 and name in _SHORTHANDS and isinstance(inner, str | list):
            inner = {_SHORTHANDS[name]: inner}
        section[name] = inner if isinstance(inner, dict) else {}
        section = section[name]
    section[names[-1]] = value


def _switch_strategy(data: dict[str, Any], overrides: Sequence[str]) -> None:
    pairs = [override.partition("=") for override in overrides]
    chosen = [text for key, _, text in pairs if key == "decoding.strategy"]
    decoding = data.get("decoding")
    if chosen and isinstance(decoding, dict) and decoding.get("strategy") != chosen[-1]:
        data["decoding"] = {}


def _sentence(root: type[BaseModel], error: ErrorDetails) -> str:
    """One sentence for one pydantic error."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    section, names, annotation = _locate(root, error["loc"])
    key = ".".join(names)
    if kind == "extra_forbidden":
        return _unknown_key(root, section, names)
    if kind == "missing":
        return f"{key} must be given"
    if kind == "value_error":
        message = str(context["error"])
        return f"{key} {message}" if message.startswith("must ") else ".".join([*names, message])
    if kind.startswith("union_tag"):
        known = context.get("expected_tags") or _strategies()
        tag = f"got {value['strategy']!r}" if kind == "union_tag_invalid" else "got nothing"
        return f"{key}.strategy must be one of {str(known).replace(chr(39), '')}, {tag}"
    if kind == "literal_error":
        return f"{key} must be one of {', '.join(_choices(annotation))}, got {value!r}"
    if kind == "string_too_short":
        return f"{key} must not be empty, got {value!r}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"{key} must be {_interval(section, names[-1])}, got {value!r}"
    return f"{key} must be {_KINDS.get(kind.split('_')[0], 'valid')}, got {value!r}"


def _locate(root: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[type[BaseModel], list[str], Any]:
    """The section an error is in, its dotted key, and the key's type. The tag of the union is no part of the key."""
    section: type[BaseModel] = root
    names: list[str] = []
    annotation: Any = root
    for item in loc:
        models = dict(_models(annotation))
        if isinstance(item, int):
            continue  # an entry of a list: the key of the list says enough
        if len(models) > 1 and item in models:
            annotation = models[item]
            continue
        names.append(item)
        if models:
            section = next(iter(models.values()))
            field = section.model_fields.get(item)
            annotation = None if field is None else field.annotation
    return section, names, annotation


def _models(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections that a type names, by the tag of the union (or "")."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        strategy = annotation.model_fields.get("strategy")
        yield ("" if strategy is None else str(strategy.default)), annotation
    else:
        for part in typing.get_args(annotation):
            yield from _models(part)


def _strategies() -> str:
    return ", ".join(tag for tag, _ in _models(JobConfig.model_fields["decoding"].annotation))


def _unknown_key(root: type[BaseModel], section: type[BaseModel], names: list[str]) -> str:
    """Suggest the nearest key of the same section, else the same or nearest name anywhere."""
    parent, wrong = names[:-1], names[-1]
    near = difflib.get_close_matches(wrong, section.model_fields, n=1)
    if near:
        suggestion = ".".join([*parent, near[0]])
    else:
        by_name = {key.rsplit(".", 1)[-1]: key for key in _all_keys(root, "")}
        far = difflib.get_close_matches(wrong, by_name, n=1)
        suggestion = by_name[far[0]] if far else ""
    known = f"did you mean {suggestion!r}?" if suggestion else f"known keys: {', '.join(section.model_fields)}"
    return f"{'.'.join(names)} must be a known key ({known})"


def _all_keys(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for _, inner in _models(field.annotation):
            yield from _all_keys(inner, f"{prefix}{name}.")


def _interval(section: type[BaseModel], name: str) -> str:
    """The range of a number, as text: `in (0, 1]`, `at least 1`.

    Worked example: `Field(gt=0, le=1)` gives `in (0, 1]`; `Field(ge=1)` gives `at least 1`.
    """
    low = high = None
    for rule in section.model_fields[name].metadata:
        if isinstance(rule, annotated_types.Gt | annotated_types.Ge):
            low = rule
        elif isinstance(rule, annotated_types.Lt | annotated_types.Le):
            high = rule
    if low is not None and high is not None:
        left = f"({low.gt:g}" if isinstance(low, annotated_types.Gt) else f"[{low.ge:g}"
        right = f"{_number(high.lt)})" if isinstance(high, annotated_types.Lt) else f"{_number(high.le)}]"
        return f"in {left}, {right}"
    if isinstance(low, annotated_types.Gt):
        return f"greater than {low.gt:g}"
    assert isinstance(low, annotated_types.Ge), (section, name)
    return f"at least {low.ge:g}"


def _number(value: Any) -> str:
    """A bound as people write it; powers of two beyond a million stay powers."""
    if isinstance(value, int) and value > 10**6 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}"


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(choice) for choice in typing.get_args(annotation)]
    return [choice for part in typing.get_args(annotation) for choice in _choices(part)]


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list) else type(value).__name__


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
