"""Keys of job and training files that a page names must be in the models."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from pydantic import BaseModel

from infra.docs.pages import Page
from pipeline.config import JobConfig
from pipeline.config_io import parse_job
from pipeline.errors import ConfigError
from pipeline.train_config import TrainConfig

ROOTS: tuple[type[BaseModel], ...] = (JobConfig, TrainConfig)
REQUIRED = {"model", "input", "output"}
_DOTTED = re.compile(r"([a-z]\w*(?:\.[a-z]\w*)+)(?::.*)?")
_FILES = {"safetensors", "yaml", "json", "py", "md", "parquet", "jsonl", "html", "txt", "csv"}


def wrong_keys(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        for block in page.blocks():
            if block.language in ("", "yaml"):
                for sentence in _wrong_in_snippet(block.text):
                    yield f"{block.where}: {sentence}"
        for where, code in page.inline_code():
            for sentence in [*_wrong_in_dotted(code), *_wrong_in_snippet(code)]:
                yield f"{where}: {sentence}"


def wrong_override(text: str, root: type[BaseModel]) -> str | None:
    """What is wrong with a `--set KEY=VALUE`, if anything."""
    key = text.partition("=")[0].strip()
    return None if key in known_keys(root) or key == "KEY" else f"--set names {key!r}, which is no key"


@cache
def known_keys(root: type[BaseModel]) -> frozenset[str]:
    """Dotted keys of a file, sections included."""
    return frozenset(_keys(root, ""))


def _keys(annotation: Any, prefix: str) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield prefix + name
            yield from _keys(field.annotation, f"{prefix}{name}.")
    else:
        for part in typing.get_args(annotation):
            yield from _keys(part, prefix)


def _wrong_in_dotted(code: str) -> Iterator[str]:
    """`section.key` or `section.key: value` within text."""
    match = _DOTTED.fullmatch(code.strip())
    if match is None:
        return
    key = match[1]
    section, last = key.split(".")[0], key.rsplit(".", 1)[1]
    of_section = [root for root in ROOTS if section in root.model_fields]
    if of_section and last not in _FILES and not any(key in known_keys(root) for root in of_section):
        yield f"{key!r} is no key of a job or training file"


def _wrong_in_snippet(text: str) -> Iterator[str]:
    """A piece of YAML whose outermost keys are sections. A whole job must also be valid."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        return
    if not isinstance(data, Mapping):
        return
    data = _without_gaps(data)
    roots = [root for root in ROOTS if data and set(map(str, data)) <= set(root.model_fields)]
    if not roots:
        return
    wrong = [_unknown(data, root) for root in roots]
    if all(wrong):
        yield from (f"{key!r} is no key of a job or training file" for key in min(wrong, key=len))
    elif set(data) >= REQUIRED:
        try:
            parse_job(data)
        except ConfigError as error:
            yield str(error)


def _unknown(data: Mapping[str, Any], root: type[BaseModel], prefix: str = "") -> list[str]:
    known = known_keys(root)
    found: list[str] = []
    for name, value in data.items():
        key = f"{prefix}{name}"
        if key not in known:
            found.append(key)
        elif isinstance(value, Mapping) and any(other.startswith(key + ".") for other in known):
            found += _unknown(value, root, key + ".")
    return found


def _without_gaps(value: Any) -> Any:
    """`..` stands for what a page leaves out."""
    if isinstance(value, Mapping):
        return {key: _without_gaps(item) for key, item in value.items() if key != ".."}
    return value
