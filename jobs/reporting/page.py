"""The page: a template with autoescape, and everything else put into it as text, so that it loads nothing.

Data reaches scripts in two ways, neither of which an HTML parser can take for markup: JSON without `<`, `>` and `&`,
and base64. Should markup slip through all the same, the page's own policy lets no script run but its three, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from jobs.durations import duration

_ASSETS = resources.files("jobs.reporting") / "assets"
_SCRIPTS = ("echarts.min.js", "charts.js", "browser.js")


def render(figures: dict[str, Any], samples: str, **values: Any) -> str:
    """The whole page: `figures` for the charts, `samples` packed, `values` for the template."""
    scripts = {name: _asset(name) for name in _SCRIPTS}
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in scripts.values())
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"num": number, "pct": percent, "dur": duration, "time": clock_time, "money": money}
    template = environment.from_string(_asset("report.html.j2"))
    return template.render(
        **values,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}; "
        "base-uri 'none'; form-action 'none'",
        style=Markup(_asset("report.css")),
        scripts=[Markup(text) for text in scripts.values()],
        figures=Markup(safe_json(figures)),
        samples=Markup(samples),
    )


def safe_json(value: Any) -> str:
    """JSON that can stand in a script element, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def money(value: float) -> str:
    """Dollars with as many digits as tell something: $0.0021, $12.34."""
    return f"${value:,.2f}" if value >= 1 else f"${value:.2g}"


def clock_time(moment: float) -> str:
    """In UTC: machines and readers may be anywhere."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
