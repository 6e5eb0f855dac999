"""What must hold of the input before a job starts: columns exist, have the right types, and ids are unique.

Parquet files and datasets declare their columns; of a JSONL file the first hundred rows stand for the rest, whose rows
become error rows where they differ.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from pipeline.config import JobConfig
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError
from pipeline.prompts import DEFAULT_PROMPT_COLUMNS, id_columns, prompt_columns, uid_of
from pipeline.readers import read_rows
from pipeline.records import Shard
from pipeline.schema import OUTPUT_COLUMNS, settings_schema

Columns = Mapping[str, pa.DataType | None]
"""Columns of a file by name; None where the rows seen so far do not settle the type."""


def check_job(config: JobConfig) -> None:
    """What can be said without looking at the input."""
    source = config.input
    if source.prompt_template is not None:
        if source.prompt_column is not None:
            raise ConfigError(
                f"input.prompt_template must be the only source of prompts, got input.prompt_column "
                f"{source.prompt_column!r} too"
            )
        if not prompt_columns(source):
            raise ConfigError(f"input.prompt_template must use a column of the input, got {source.prompt_template!r}")
    own = OUTPUT_COLUMNS | {field.name for field in settings_schema(source)}
    taken = [name for name in config.output.columns if name in own]
    if taken:
        raise ConfigError(f"output.columns must not name columns that every output has, got {taken[0]!r}")


def check_columns(config: JobConfig, columns: Columns, path: str) -> None:
    """The columns that the job names, in one file."""
    _check_prompt_columns(config, columns, path)
    if config.input.id_column is not None:
        _require(config.input.id_column, "input.id_column", columns, path)
        kind = columns[config.input.id_column]
        if kind is not None and not (is_text(kind) or pa.types.is_integer(kind)):
            raise ConfigError(
                f"input.id_column must be a string or integer column, got {kind} for column "
                f"{config.input.id_column!r} in file {path!r}"
            )
    _check_setting_columns(config.input, columns, path)
    for name in config.output.columns:
        _require(name, "output.columns", columns, path)


def _check_setting_columns(source: InputConfig, columns: Columns, path: str) -> None:
    """Types alone: values are checked row by row."""
    rules: list[tuple[str, str, Callable[[pa.DataType], bool]]] = [
        ("sampling_column", "a struct column or text", pa.types.is_struct),
        ("seed_column", "an integer column or text", pa.types.is_integer),
        ("tools_column", "a list column or text", pa.types.is_list),
    ]
    for key, rule, fits in rules:
        name = getattr(source, key)
        if name is None:
            continue
        _require(name, f"input.{key}", columns, path)
        kind = columns[name]
        if kind is not None and not (fits(kind) or is_text(kind) or pa.types.is_null(kind)):
            raise ConfigError(f"input.{key} must be {rule}, got {kind} for column {name!r} in file {path!r}")


def _check_prompt_columns(config: JobConfig, columns: Columns, path: str) -> None:
    if config.input.prompt_template is not None:
        for name in prompt_columns(config.input):
            _require(name, "input.prompt_template", columns, path)
        return
    if config.input.prompt_column is not None:
        _require(config.input.prompt_column, "input.prompt_column", columns, path)
        candidates = [config.input.prompt_column]
    else:
        candidates = [name for name in DEFAULT_PROMPT_COLUMNS if name in columns]
        if not candidates:
            raise ConfigError(
                f"input.prompt_column must be given unless a column is called {', '.join(DEFAULT_PROMPT_COLUMNS[:-1])} "
                f"or {DEFAULT_PROMPT_COLUMNS[-1]}, got columns {', '.join(columns)} in file {path!r}"
            )
    for name in candidates:
        kind = columns[name]
        if kind is not None and not is_text(kind) and not is_messages(kind):
            where = f"for column {name!r} in file {path!r}"
            raise ConfigError(f"input.prompt_column must be a string or a messages list, got {kind} {where}")


def _require(name: str, key: str, columns: Columns, path: str) -> None:
    if name in columns:
        return
    near = difflib.get_close_matches(name, list(columns), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"its columns: {', '.join(columns)}"
    raise ConfigError(f"{key} must name columns of the input, got {name!r} for file {path!r} ({hint})")


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_messages(kind: pa.DataType) -> bool:
    """A list of structs that have a role and a content, both text; further fields are allowed and left out later."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    if not any(is_list(kind) for is_list in lists) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return {"role", "content"} <= fields.keys() and is_text(fields["role"]) and is_text(fields["content"])


def check_ids(config: JobConfig, spans: Sequence[Shard]) -> None:
    """Raise ConfigError for a null id, or naming two rows of one id. `spans` are shards that cover the planned rows.

    Only the id column is read. Eight bytes per row are kept, a hash; the few ids whose hashes meet are read again.
    """
    spans = [span for span in spans if id_columns(config.input, span.format)]
    num_rows = sum(span.num_rows for span in spans)
    hashes = np.fromiter((_hash(uid) for uid, _ in _ids(config, spans)), dtype=np.uint64, count=num_rows)
    hashes.sort()  # in place: there may be as many as memory bears
    twice = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not twice:
        return
    places: dict[str, str] = {}
    for uid, place in _ids(config, spans):
        if _hash(uid) in twice and places.setdefault(uid, place) != place:
            raise ConfigError(f"input.id_column must hold unique ids, got {uid!r} twice: {places[uid]} and {place}")


def _ids(config: JobConfig, spans: Iterable[Shard]) -> Iterator[tuple[str, str]]:
    """(id, where it is) of every row."""
    for span in spans:
        (column,) = id_columns(config.input, span.format)
        for row in read_rows(span, config.input, [column]):
            place = f"row {row.number} of {span.path}"
            if row.error is None and row.values.get(column) is None:
                raise ConfigError(
                    f"input.id_column must hold an id in every row, got null for column {column!r} in {place}"
                )
            yield uid_of(span, config.input, row), place


def _hash(uid: str) -> int:
    return int.from_bytes(blake2b(uid.encode(), digest_size=8).digest(), "little")


def passthrough_schema(config: JobConfig, files: Sequence[tuple[Shard, Columns]]) -> pa.Schema:
    """The Arrow types of `output.columns`, the same in all files, from (span, columns) of each.

    Values of JSONL files are read for it, all of them. Raises ConfigError where types cannot be brought together.
    """
    names = config.output.columns
    schema = pa.schema([(name, pa.null()) for name in names])
    for span, columns in files if names else ():
        if span.format in ("jsonl", "openai_batch"):
            found = _inferred(config, span)
        else:
            found = iter([pa.schema([(name, columns[name]) for name in names])])
        for other in found:
            schema = _unified(schema, other, span.path)
    return pa.schema([(field.name, pa.string() if pa.types.is_null(field.type) else field.type) for field in schema])


def _inferred(config: JobConfig, span: Shard, rows_at_once: int = 1000) -> Iterator[pa.Schema]:
    names = config.output.columns
    rows = []
    for row in read_rows(span, config.input, names):
        rows.append(row.values)
        if len(rows) == rows_at_once:
            yield _schema_of(rows, names, span.path)
            rows = []
    yield _schema_of(rows, names, span.path)


def _schema_of(rows: Sequence[Mapping[str, object]], names: Sequence[str], path: str) -> pa.Schema:
    kinds = {name: column_type([row.get(name) for row in rows]) for name in names}
    for name, kind in kinds.items():
        if kind is None:
            raise ConfigError(
                f"output.columns must hold values of one type, got several for column {name!r} in file {path!r}"
            )
    return pa.schema(list(kinds.items()))


def column_type(values: Sequence[object]) -> pa.DataType | None:
    """The Arrow type of plain values; None when they have none in common."""
    try:
        return pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeError):
        return None


def _unified(schema: pa.Schema, other: pa.Schema, path: str) -> pa.Schema:
    try:
        return pa.unify_schemas([schema, other.remove_metadata()], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        for field in other:
            before = schema.field(field.name).type
            if field.type != before and not pa.types.is_null(before):
                raise ConfigError(
                    f"output.columns must hold values of one type, got {before} and {field.type} for column "
                    f"{field.name!r} in file {path!r}"
                ) from error
        raise
