"""Pages that are made of the code: the reference of the job file from its model, the gallery from configs/."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.cluster_config import WorkerRange
from pipeline.config import JobConfig

HEAD = "| key | type | default | rule | meaning |\n|---|---|---|---|---|"
_RULES = {"gt": ("above", ">"), "ge": ("at least", ">="), "lt": ("below", "<"), "le": ("at most", "<=")}


def job_file_page() -> str:
    """Every key of a job file, with type, default, rule and description, from the model in `pipeline/config.py`."""
    parts = [
        "# Job file: every key\n",
        "Made from the model in `pipeline/config.py` when this site is built; examples and longer explanations are in "
        "the [README](index.md#job-file). A key that is not listed is refused, and so is a value that breaks its "
        "rule.\n",
    ]
    for name, field in JobConfig.model_fields.items():
        parts.append(f"## {name}\n")
        sections = list(_sections(field.annotation))
        if len(sections) == 1:
            parts += _section(sections[0], f"{name}.")
        else:
            parts.append(
                f"`{name}.strategy` says which of these sections it is; the default is "
                f"`{field.default.strategy}`. The keys of one strategy are refused under another.\n"
            )
            for section in sections:
                parts.append(f"### {name}.strategy: {section.model_fields['strategy'].default}\n")
                parts += _section(section, f"{name}.")
    return "\n".join(parts)


def gallery_page(folder: Path) -> str:
    """Every file of configs/ with its text."""
    parts = [
        "# Job and training files\n",
        "The files of `configs/`. Tests load all of them and plan those with input.\n",
    ]
    for file in sorted(folder.rglob("*.yaml")):
        name = str(file.relative_to(folder.parent))
        parts.append(f"## {name}\n\n```yaml\n{file.read_text().rstrip()}\n```\n")
    return "\n".join(parts)


def _section(section: type[BaseModel], prefix: str) -> Iterator[str]:
    yield " ".join((section.__doc__ or "").split()) + "\n"
    yield HEAD
    for name, field in section.model_fields.items():
        inner = list(_sections(field.annotation))
        if inner:
            yield _row(prefix + name, "section", field)
            for key, value in inner[0].model_fields.items():
                yield _row(f"{prefix}{name}.{key}", _type_name(value.annotation), value)
        elif name != "strategy":
            yield _row(prefix + name, _type_name(field.annotation), field)
    yield ""


def _row(key: str, kind: str, field: FieldInfo) -> str:
    cells = (f"`{key}`", kind, default_of(field), _rule(field), (field.description or "").replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def default_of(field: FieldInfo) -> str:
    """A default as a job file would hold it: `0.0`, `null`, `[token_ids]`."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    value = list(value) if isinstance(value, tuple) else value
    return "`" + yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip() + "`"


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in typing.get_args(annotation):
            yield from _sections(part)


def _type_name(annotation: Any) -> str:
    """Worked examples: `int | None` is "integer or null", `tuple[str, ...]` is "list of strings"."""
    names = {int: "integer", float: "number", bool: "true or false", str: "string", type(None): "null"}
    if annotation in names:
        return names[annotation]
    if annotation is WorkerRange:
        return "{min, max}"
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if origin is tuple:
        inner = _type_name(parts[0])
        return f"list of {inner if '`' in inner else inner + 's'}"
    if origin is dict:
        return f"mapping of {_type_name(parts[0])} to {_type_name(parts[1])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_type_name, parts))
    return getattr(annotation, "__name__", str(annotation))


def _rule(field: FieldInfo) -> str:
    """The constraints that a field declares, in words."""
    found: list[str] = []
    for rule in field.metadata:
        for name, (words, _) in _RULES.items():
            bound = getattr(rule, name, None)
            if bound is not None:
                found.append(f"{words} {_number(bound)}")
        if isinstance(rule, annotated_types.MinLen):
            found.append("not empty")
        pattern = getattr(rule, "pattern", None)
        if pattern:
            found.append("user/name" if "/" in pattern else f"matches `{pattern}`")
    return ", ".join(found)


def _number(value: Any) -> str:
    power = value.bit_length() - 1 if isinstance(value, int) and value > 10**6 else 0
    return f"2^{power}" if power and value == 2**power else f"{value:g}"


def anchor_of(config_file: str) -> str:
    """The heading of a file in the gallery, as mkdocs names it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", config_file).strip().lower())
