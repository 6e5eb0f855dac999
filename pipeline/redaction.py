"""Credentials taken out of what is stored, logged or shown: the one place that knows what a credential looks like.

`without_credentials` makes one path fit to be shown. `redacted` does so for any text: a log line, a traceback, an error
message of a store's client, which may quote addresses, headers and even settings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

MASK = "***"
_SHORTEST_SECRET = 6
"""A shorter value of a variable is left in place: `1` or `false` would take half of every text with it."""
_SECRET_WORDS = (
    r"access_?key|access_?key_?id|secret|secret_?key|secret_?access_?key|token|password|passwd|api_?key|account_?key|"
    r"private_?key|credentials?|connection_?string|key"
)
_SECRET_NAME = re.compile(rf"(?:^|_)(?:{_SECRET_WORDS})$", re.IGNORECASE)
"""The last words of the name of a variable or a setting whose value is a secret."""
_USER_INFO = re.compile(r"://[^/@\s'\"]+@")
_BARE_USER_INFO = re.compile(r"(?<![^\s'\"(=])[^/@:\s'\"]+:[^/@\s'\"]+@(?=[A-Za-z])")
"""`user:password@bucket` without its scheme, as clients of stores quote it."""
_HTTP_QUERY = re.compile(r"(https?://[^?\s'\"<>]*)\?[^\s'\"<>]+")
_SETTING = re.compile(
    r"(?P<name>\b(?:[\w-]*[_-])?(?:secret|token|password|passwd|api_?key|access_?key|account_?key|signature|sig)"
    r"['\"]?\s*(?:=|(?<!(?<![\w-])token):)\s*)(?P<quote>['\"]?)[^\s'\"&,;)}\]]+(?P=quote)",
    re.IGNORECASE,
)
"""`token=..` or `"secret": ".."`; not the plain words `unexpected token: ..`."""
_AUTHORIZATION = re.compile(r"(authorization['\"]?\s*[=:]\s*['\"]?(?:\w[\w-]*\s+)?)[^\s'\"]+", re.IGNORECASE)
_KNOWN_FORMS = re.compile(r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,})\b")
"""Keys of AWS, the Hugging Face hub and GitHub, wherever they stand."""


def without_credentials(path: str) -> str:
    """A path fit to be stored or shown: `user:password@` and the query of an http address are replaced."""
    path = re.sub(r"://[^/@]+@", f"://{MASK}@", path)
    return re.sub(r"^(https?://[^?]*)\?.*", rf"\1?{MASK}", path)


def redacted(text: str) -> str:
    """Any text without the credentials in it: those of addresses and headers, `token=..`, the keys of well-known forms,
    and the values of this process's secret variables.
    """
    for value in _secret_values(os.environ):
        text = text.replace(value, MASK)
    text = _USER_INFO.sub(f"://{MASK}@", text)
    text = _BARE_USER_INFO.sub(f"{MASK}@", text)
    text = _HTTP_QUERY.sub(rf"\1?{MASK}", text)
    text = _AUTHORIZATION.sub(rf"\1{MASK}", text)
    text = _SETTING.sub(rf"\g<name>\g<quote>{MASK}\g<quote>", text)
    return _KNOWN_FORMS.sub(MASK, text)


def _secret_values(environment: Mapping[str, str]) -> list[str]:
    """Values that must not be shown, longest first, so that none is left in part; also as they stand in an address.

    `FSSPEC_S3='{"key": .., "secret": ..}'` holds several as JSON.
    """
    values = set()
    for name, value in environment.items():
        if _SECRET_NAME.search(name):
            values.add(value)
        elif name.startswith("FSSPEC_"):
            values |= set(_secrets_of_json(value))
    long = {value for value in values if len(value) >= _SHORTEST_SECRET}
    return sorted(long | {quote(value, safe="") for value in long}, key=len, reverse=True)


def _secrets_of_json(text: str) -> Iterator[str]:
    try:
        yield from _secrets_of(json.loads(text))
    except ValueError:
        return


def _secrets_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str) and _SECRET_NAME.search(name):
                yield item
            else:
                yield from _secrets_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from _secrets_of(item)
