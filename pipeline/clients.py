"""The file system that serves a path, and the limits of its client: nothing waits for ever, little is repeated twice.

A request to S3 that meets a fault is repeated by its client at once or after a moment, three attempts in all; what
fails then is repeated by `faults`, as a whole and with more patience. The layer between the two, of s3fs, is switched
off: three layers of retries would multiply. Retries and time-outs that the user sets (in `FSSPEC_S3`,
`AWS_MAX_ATTEMPTS`, `AWS_RETRY_MODE` or the AWS profile) stay as they are set.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from pipeline.errors import ConfigError

CONNECT_S = 10.0
SILENCE_S = 30.0
"""A connection on which nothing comes for so long is given up."""
OPERATION_S = 300.0
"""No operation lasts longer, however slowly its bytes come; listings of large folders are let alone."""

_RETRIES = {"mode": "standard", "total_max_attempts": 3}


def resolve(path: str) -> tuple[Any, str]:
    """The file system of a path and its name there. Listings are never cached: other processes write too."""
    is_s3 = path.startswith(("s3://", "s3a://"))
    options = {"config_kwargs": _s3_limits()} if is_s3 else {}
    try:
        fs, name = fsspec.core.url_to_fs(path, use_listings_cache=False, **options)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"a path must be of a store that is installed here, got {path!r}: {error}") from error
    if is_s3:
        fs.retries = 1
    return fs, name


def time_limit(fs: Any) -> dict[str, float]:
    """The argument that ends an operation of a file system in time, where it knows one."""
    return {"timeout": OPERATION_S} if isinstance(fs, AsyncFileSystem) else {}


def _s3_limits() -> dict[str, Any]:
    """Settings of the S3 client, those of the user foremost."""
    limits: dict[str, Any] = {"connect_timeout": CONNECT_S, "read_timeout": SILENCE_S}
    variables = ("AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CONFIG_FILE")
    if not _user_sets_retries(tuple(os.environ.get(name) for name in variables)):
        limits["retries"] = _RETRIES
    return {**limits, **fsspec.config.conf.get("s3", {}).get("config_kwargs", {})}


@functools.cache
def _user_sets_retries(variables: tuple[str | None, ...]) -> bool:
    """Whether variables or the profile that they name say how often to try; asked once for the same variables."""
    if variables[0] or variables[1]:
        return True
    import botocore.exceptions  # here, since not every installation has S3
    import botocore.session

    try:
        profile = botocore.session.Session().get_scoped_config()
    except botocore.exceptions.BotoCoreError:
        return True  # the client will say itself what is wrong with the profile
    return "max_attempts" in profile or "retry_mode" in profile
