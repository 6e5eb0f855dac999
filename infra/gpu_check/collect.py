"""Puts what the parts have written so far into one JSON file. usage: collect.py PARTS_FOLDER JSON"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LOG_LINES = 40


def collect(folder: Path) -> dict[str, Any]:
    """`environment` and, for each part, exit code (124: stopped at its limit), seconds, results and end of its log."""
    result: dict[str, Any] = {"environment": json.loads((folder / "environment.json").read_text()), "parts": {}}
    for status in sorted(folder.glob("*.status"), key=lambda path: path.stat().st_mtime_ns):
        code, seconds = map(int, status.read_text().split())
        part: dict[str, Any] = {"exit_code": code, "seconds": seconds}
        written = status.with_suffix(".json")
        if written.exists():
            try:
                part["results"] = json.loads(written.read_text())
            except ValueError:
                part["results"] = None  # stopped while it wrote
        part["log"] = status.with_suffix(".log").read_text(errors="replace").splitlines()[-LOG_LINES:]
        result["parts"][status.stem] = part
    return result


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(collect(Path(sys.argv[1])), indent=1) + "\n")
