"""Conditional puts: an object is created unless one of its name exists, and the store itself decides."""

from __future__ import annotations

import contextlib
from typing import Any

from pipeline.clients import time_limit


def put_if_absent(fs: Any, name: str, data: bytes) -> bool:
    try:
        fs.pipe_file(name, data, mode="create", **time_limit(fs))
    except OSError as error:
        if not exists_already(error):
            raise
        return False
    return True


def refuses_second_put(fs: Any, name: str) -> bool:
    """Whether a store refuses to create an object that exists, found out by trying; nothing is left behind."""
    fs.pipe_file(name, b"first", **time_limit(fs))
    try:
        return not put_if_absent(fs, name, b"second")
    finally:
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(name)


def exists_already(error: OSError) -> bool:
    """Whether a conditional put was refused because the object exists. s3fs tells it by the cause's code alone."""
    response = getattr(error.__cause__, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    return isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412")
