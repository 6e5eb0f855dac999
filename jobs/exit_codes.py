"""What the process says when it ends."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    USER_ERROR = 2
    FAILED_ROWS = 3
    INTERRUPTED = 4
