"""`sevenleague push`, and the push at the end of a job or an export, which spoils neither when it fails."""

from __future__ import annotations

import logging

from rich.console import Console

from pipeline import hub, storage
from pipeline.config import JobConfig
from pipeline.data_config import PushConfig
from pipeline.errors import PermanentError, SevenLeagueError
from pipeline.redaction import redacted, without_credentials
from pipeline.summary import JobSummary

logger = logging.getLogger(__name__)


def check_push(config: JobConfig) -> None:
    """Raises ConfigError where a job is to be pushed at its end and could not be, before anything is decoded."""
    if config.output.push_to_hub is not None:
        hub.check_token()


def push_finished(config: JobConfig, summary: JobSummary) -> None:
    """Push the output of a job that is done, where `output.push_to_hub` asks for it."""
    if config.output.push_to_hub is not None and summary.state == "done":
        push_if_possible(config.output.path, config.output.push_to_hub)


def push_if_possible(folder: str, target: PushConfig) -> bool:
    """Push; a failure is told on the log, with the command that pushes again, and is no error: the data is whole."""
    try:
        address = hub.push(storage.absolute(folder), target)
    except Exception as error:  # of the hub, its client, the network or the store: the data stays what it is
        again = hub.push_again(without_credentials(folder), target)
        logger.warning(
            "the data is whole in %s, but was not pushed to %s: %s; push it with `%s`",
            without_credentials(folder),
            target.repo,
            _reason(error),
            again,
        )
        return False
    logger.info("pushed to %s", address)
    return True


def command(folder: str, repo: str, private: bool, revision: str) -> None:
    """The CLI command. Raises PermanentError where the hub refuses or cannot be reached."""
    target = hub.parse_target(repo, private, revision)
    hub.check_token()
    try:
        address = hub.push(storage.absolute(folder), target)
    except SevenLeagueError:
        raise
    except Exception as error:
        sentence = (
            f"{without_credentials(folder)} was not pushed to {repo}: {_reason(error)}; the same command tries again"
        )
        raise PermanentError(sentence) from error
    Console(highlight=False).print(f"pushed to {address}", soft_wrap=True, markup=False)


def _reason(error: Exception) -> str:
    return redacted(str(error)).strip().partition("\n")[0] or type(error).__name__
