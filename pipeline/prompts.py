"""From an input row to a prompt: a column, a messages list, or a Jinja template over columns.

What is wrong with a row is said in `Prompt.error`, never raised, so that it becomes an error row of the output:

=======================  ==========================================================================
``null_prompt``          no value in the prompt column
``empty_prompt``         an empty string or an empty messages list
``invalid_prompt``       neither a string nor a list
``invalid_messages``     a message without a role and a string content
``template_error``       the prompt template failed on this row, or met a null value
``invalid_sampling``     the row's own sampling parameters cannot be used (see `row_settings`)
``invalid_tools``        its tools are no list, or there is no chat template to describe them
``invalid_json``         the line is not a JSON object
``invalid_csv``          the line is not CSV, or has another number of fields than the header
``unreadable_row_group`` the Parquet pages of the row are corrupt
=======================  ==========================================================================
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.config import SamplingConfig
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError, RowError
from pipeline.readers import Row, read_rows
from pipeline.records import InputFormat, Shard
from pipeline.row_settings import Tools, sampling_of, setting_columns, tools_of

DEFAULT_PROMPT_COLUMNS = ("messages", "prompt", "text")
MAX_PROMPT_CHARS = 2**24
"""Most characters that a prompt template may write: several times the longest context of any model."""
Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one input row asks for. `row` is its number in its file; `uid` names it in the whole job.

    Without an error exactly one of `prompt` and `messages` is given; `messages` hold the keys role and content only.
    `sampling` are the row's own values of sampling parameters.
    """

    row: int
    uid: str
    prompt: str | None
    messages: Messages | None
    passthrough: Mapping[str, Any]
    error: RowError | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools | None = None

    def sampled_by(self, job: SamplingConfig) -> SamplingConfig:
        """How this row is sampled, in a job that samples its rows so."""
        return job.model_copy(update=dict(self.sampling)) if self.sampling else job


def read_prompts(shard: Shard, config: InputConfig, columns: Sequence[str]) -> Iterator[Prompt]:
    """The prompts of a shard, one per row, in file order; `columns` are copied to `passthrough`."""
    named = (*prompt_columns(config), *id_columns(config, shard.format), *setting_columns(config), *columns)
    wanted = dict.fromkeys(named)
    for row in read_rows(shard, config, list(wanted)):
        passthrough = {column: row.values.get(column) for column in columns}
        read_value = functools.partial(_value, row, config)
        yield _prompt(row.number, uid_of(shard, config, row), read_value, row.values, passthrough, config)


def prompt_columns(config: InputConfig) -> tuple[str, ...]:
    """The columns that a prompt is made of; by default the first of these that is not null in a row."""
    if config.prompt_template is not None:
        return template_columns(config.prompt_template)
    return DEFAULT_PROMPT_COLUMNS if config.prompt_column is None else (config.prompt_column,)


def id_columns(config: InputConfig, kind: InputFormat) -> tuple[str, ...]:
    """The column that row ids come from, none when they are made of file and row number."""
    if config.id_column is not None:
        return (config.id_column,)
    return ("custom_id",) if kind == "openai_batch" else ()


def uid_of(shard: Shard, config: InputConfig, row: Row) -> str:
    """The id of a row. Rows that could not be read have no id of their own: file and row number stand in."""
    for column in id_columns(config, shard.format):
        if row.values.get(column) is not None:
            return str(row.values[column])
    return f"{shard.label}:{row.number}"


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template uses, sorted. Raises ConfigError for a template that does not parse."""
    try:
        names = jinja2.meta.find_undeclared_variables(_environment().parse(template))
    except jinja2.TemplateSyntaxError as error:
        where = f"{error.message} (line {error.lineno})"
        raise ConfigError(f"input.prompt_template must be a Jinja template, got {template!r}: {where}") from error
    return tuple(sorted(names - set(_environment().globals)))


def make_prompt(row: int, uid: str, value: object, settings: Mapping[str, Any], config: InputConfig) -> Prompt:
    """A prompt of a string or a messages list that came from somewhere else than a file of the input.

    `settings` are what the row has in the columns of its settings.
    """
    return _prompt(row, uid, lambda: _checked(value, "prompt"), settings, {}, config)


def stored_prompt(row: Mapping[str, Any]) -> Prompt:
    """The prompt of an output row, as it was given to the renderer; all columns of `stored_columns` must be there."""
    messages = None if row["messages"] is None else tuple(row["messages"])
    own = {key: value for key, value in (row.get("sampling") or {}).items() if value is not None}
    if "stop" in own:
        own["stop"] = tuple(own["stop"])
    tools = tuple(json.loads(row["tools"])) if row.get("tools") else None
    return Prompt(0, row["id"], row["prompt"], messages, {}, None, {**own, "seed": row["seed"]}, tools)


def stored_columns(config: InputConfig) -> tuple[str, ...]:
    """The columns of an output that say what its rows asked for."""
    own = ["sampling"] * (config.sampling_column is not None) + ["tools"] * (config.tools_column is not None)
    return ("id", "prompt", "messages", "seed", *own)


def _prompt(
    row: int,
    uid: str,
    read_value: Callable[[], str | list[Any]],
    settings: Mapping[str, Any],
    passthrough: Mapping[str, Any],
    config: InputConfig,
) -> Prompt:
    """`read_value` raises RowError where the row has no prompt."""
    text: str | None = None
    messages: Messages | None = None
    sampling: dict[str, Any] = {}
    tools: Tools | None = None
    error: RowError | None = None
    try:
        value = read_value()
        text = value if isinstance(value, str) else None
        messages = None if isinstance(value, str) else _messages(value)
        text, messages = _with_system(text, messages, config.system_prompt)
        sampling = sampling_of(settings, config)
        tools = tools_of(settings, config)
    except RowError as raised:
        error = raised
    return Prompt(row, uid, text, messages, passthrough, error, sampling, tools)


def _value(row: Row, config: InputConfig) -> str | list[Any]:
    """The prompt as the row gives it: a string that is not empty, or what may be a messages list."""
    if row.error is not None:
        raise row.error
    if config.prompt_template is not None:
        value: Any = _rendered(config.prompt_template, row.values)
    else:
        given = (row.values.get(column) for column in prompt_columns(config))
        value = next((value for value in given if value is not None), None)
    return _checked(value, f"column {' / '.join(prompt_columns(config))}")


def _checked(value: Any, where: str) -> str | list[Any]:
    if value is None:
        raise RowError("null_prompt", f"the prompt is null in {where}")
    if not isinstance(value, str | list):
        raise RowError("invalid_prompt", f"a prompt must be a string or a messages list, got {value!r}")
    if not value:
        raise RowError("empty_prompt", "the prompt is empty")
    return value


def _messages(value: Sequence[Any]) -> Messages:
    for i, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise RowError("invalid_messages", f"message {i} must have a role and a content, got {message!r}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RowError("invalid_messages", f"{key} of message {i} must be a string, got {message.get(key)!r}")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _with_system(text: str | None, messages: Messages | None, system: str | None) -> tuple[str | None, Messages | None]:
    """Put the system prompt first; a plain string becomes the user's message then."""
    if system is None or (messages is not None and messages[0]["role"] == "system"):
        return text, messages
    rest: Messages = messages if messages is not None else ({"role": "user", "content": text or ""},)
    return None, ({"role": "system", "content": system}, *rest)


def _rendered(template: str, values: Mapping[str, Any]) -> str:
    try:
        return _bounded(_compiled(template).generate(values))
    except Exception as error:  # a template can fail in any way on the values of a row
        raise RowError("template_error", f"the prompt template failed: {error}") from error


def _bounded(pieces: Iterator[str]) -> str:
    """The pieces of a text as one; stops a loop that writes more than any prompt can hold."""
    kept = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_PROMPT_CHARS:
            raise ValueError(f"it writes more than {MAX_PROMPT_CHARS:,} characters")
        kept.append(piece)
    return "".join(kept)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates reach the values of a row and nothing else: no attributes of Python's own, no changes to the values.

    The sandbox of Jinja bounds `range`. `*` and `**` are bounded here, since they alone make much of little at once.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [value if isinstance(value, int | float) else len(value) for value in (left, right)]
        repeats = sizes != [left, right]
        if operator == "**" or (repeats and sizes[0] * sizes[1] > MAX_PROMPT_CHARS):
            raise SecurityError(f"{operator} would make more than a prompt can hold")
        return super().call_binop(context, operator, left, right)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> _Sandbox:
    return _Sandbox(undefined=jinja2.StrictUndefined, finalize=_not_null, keep_trailing_newline=True)


def _not_null(value: Any) -> Any:
    """A null column would silently become the word None."""
    if value is None:
        raise jinja2.UndefinedError("a value is null")
    return value
