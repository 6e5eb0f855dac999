"""A line of an OpenAI batch file as a row of the input, and what of its body a job does not obey."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.data_config import BODY_COLUMN, InputConfig
from pipeline.row_settings import SAMPLING_KEYS, setting_columns

_LIMITS = ("max_tokens", "max_completion_tokens")
"""Two names of one parameter; the later one is the newer."""
_NO_MATTER = {"custom_id", BODY_COLUMN, "model", "messages", "prompt", "user", "metadata", "store", "stream"}
"""Fields that do not change which tokens a row gets in a job, which has one model for all rows."""


def flat_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the body beside `custom_id`, and as one column the sampling parameters that a row may decide.

    Worked example: a body {"prompt": "Hi", "top_p": 0.5, "max_completion_tokens": 9} gives these columns, `custom_id`,
    and `body`: {"top_p": 0.5, "max_tokens": 9}.
    """
    given = request.get("body")
    body = given if isinstance(given, dict) else {}
    sampling = {key: body[key] for key in SAMPLING_KEYS if key in body}
    limits = [body[name] for name in _LIMITS if body.get(name) is not None]
    if limits:
        sampling["max_tokens"] = limits[-1]
    return {**body, "custom_id": request.get("custom_id"), BODY_COLUMN: sampling}


def not_obeyed(columns: Iterable[str], config: InputConfig) -> list[str]:
    """The parameters among the columns of such a file that have no effect in a job."""
    obeyed = {*_NO_MATTER, *setting_columns(config)}
    if config.sampling_column == BODY_COLUMN:
        obeyed |= {*SAMPLING_KEYS, *_LIMITS}
    return [name for name in columns if name not in obeyed]
