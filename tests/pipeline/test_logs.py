"""What a process of ours writes to stderr: quiet text or lines of JSON, each with its trace, none with credentials."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from pipeline import logs
from pipeline.logs import current_trace, tracing

logger = logging.getLogger("pipeline.test_logs")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, hook = logging.getLogger(), sys.excepthook
    handlers = list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in logs.OWN_LOGGERS}
    yield
    root.handlers, sys.excepthook = handlers, hook
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_text_shows_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    logs.configure("text")  # replaces it
    logger.info("a step of a shard")
    logger.warning("shard %d goes back", 3)
    with tracing("00003-ab12cd34-1"):
        logger.warning("no access to s3://me:pa55word@bucket/x")
    assert capsys.readouterr().err == ("shard 3 goes back\n[00003-ab12cd34-1] no access to s3://***@bucket/x\n")


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", 'a"secret"with\\quotes')
    logs.configure("json")
    logger.info("two\nlines")
    with tracing("00003-ab12cd34-1"):
        try:
            raise ValueError('a"secret"with\\quotes')
        except ValueError:
            logger.exception("the key is %s", 'a"secret"with\\quotes')
    logging.getLogger("some.library").info("of no interest")
    logging.getLogger("some.library").warning("of interest")
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert set(first) == {"time", "level", "logger", "trace", "message"}
    assert first["time"].endswith("+00:00")
    assert (first["level"], first["logger"], first["trace"]) == ("info", "pipeline.test_logs", None)
    assert first["message"] == "two\nlines"
    assert (second["trace"], second["message"]) == ("00003-ab12cd34-1", "the key is ***")
    assert second["exception"].endswith("ValueError: ***")
    assert third["message"] == "of interest"


def test_a_trace_is_of_one_thread() -> None:
    seen = []
    with tracing("outer"):
        with tracing("inner"):
            thread = threading.Thread(target=lambda: seen.append(current_trace()))
            thread.start()
            thread.join()
            seen.append(current_trace())
        seen.append(current_trace())
    assert [*seen, current_trace()] == ["", "inner", "outer", ""]


def test_an_uncaught_error_shows_no_credentials() -> None:
    code = "from pipeline import logs; logs.configure('text'); open('/no/s3://me:pa55word@bucket')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "No such file or directory: '/no/s3://***@bucket'" in done.stderr
    assert "pa55word" not in done.stderr
