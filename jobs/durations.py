"""Durations as the commands and the report write them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`850 ms`, `12.3 s`, `4 min 05 s`, `3 h 07 min`."""
    if round(1000 * seconds) < 1000:
        return f"{1000 * seconds:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"
