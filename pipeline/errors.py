"""The four ways in which a job can fail, and what the driver does about each.

=================  ==========================================  =====================================
class              meaning                                     reaction
=================  ==========================================  =====================================
``ConfigError``    the user asked for something impossible     stop at once, one sentence, exit code 2
``PermanentError`` no retry can help (corrupt part, bad plan)  stop at once, plain message
``TransientError`` the next attempt may succeed                requeue the shard
``RowError``       one input row cannot be served              an output row with the error, job goes on
=================  ==========================================  =====================================
"""

from __future__ import annotations


class SevenLeagueError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(SevenLeagueError):
    """A mistake in what the user asked for. The message is one sentence that names key, rule and value."""


class PermanentError(SevenLeagueError):
    """A failure that another attempt would repeat."""


class TransientError(SevenLeagueError):
    """A failure that another attempt may not meet: lost connection, dead worker, full disk."""


class Withdrawn(TransientError):
    """A worker gave a task back undone: it was told to end, or to drop the task. The shard has done nothing wrong."""


class ConnectionLost(TransientError):
    """The cluster that the job runs on is out of reach. What is committed stays."""


class RowError(SevenLeagueError):
    """One row that cannot be served.

    ``error_type`` goes to the output column of that name (``prompt_too_long``, ``empty_prompt``, ..); the message
    goes to the column ``error``.
    """

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str]]:
        return (RowError, (self.error_type, str(self)))
