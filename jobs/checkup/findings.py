"""What one check found, and how a check that breaks still becomes a line of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from pipeline.errors import SevenLeagueError
from pipeline.redaction import redacted

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`advice` says what to do; it is empty where nothing is to be done."""

    area: str
    name: str
    state: State
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def guarded(
    area: str, name: str, advice: str, check: Callable[[], Iterable[Finding]], state: State = "fail"
) -> Iterator[Finding]:
    """What a check finds, and one more line with the reason, in that state, where the check itself ends in an error.

    It runs on machines where anything may be broken, so every error is caught.
    """
    try:
        yield from check()
    except Exception as error:
        yield Finding(area, name, state, reason_of(error), advice)


def reason_of(error: Exception) -> str:
    """One line about an error, without credentials; sentences of ours stand alone."""
    text = " ".join(str(error).split())
    if isinstance(error, SevenLeagueError):
        return redacted(text)
    return redacted(f"{type(error).__name__}: {text}" if text else type(error).__name__)[:300]


def gigabytes(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
