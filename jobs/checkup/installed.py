"""Versions: Python, and the packages that a job needs or can use."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Iterator
from functools import cache, partial
from importlib import metadata

from jobs.checkup.findings import Finding, guarded

AREA = "version"
NEEDED = ("ray", "torch", "transformers", "pyarrow", "fsspec", "datasets")
CLIENTS = {"s3fs": ("s3://", "s3"), "gcsfs": ("gs://", "gcs")}
"""Clients of stores: the paths that need them, and the extra that brings them."""
REINSTALL = "install again: make install, or pip install -e . in the environment that runs the jobs"


def findings() -> Iterator[Finding]:
    yield Finding(AREA, "python", "ok", platform.python_version())
    yield from guarded(AREA, "sevenleague", REINSTALL, _own)
    for package in NEEDED:
        yield from guarded(AREA, package, REINSTALL, partial(_needed, package))
    for package, (paths, extra) in CLIENTS.items():
        yield _client(package, paths, extra)


def _own() -> Iterator[Finding]:
    yield Finding(AREA, "sevenleague", "ok", metadata.version("sevenleague"))


def _needed(package: str) -> Iterator[Finding]:
    """Imported, since a package whose libraries are missing is installed and useless."""
    importlib.import_module(package)
    version, least = metadata.version(package), _least_versions().get(package, "0")
    if _numbers(version) < _numbers(least):
        yield Finding(AREA, package, "fail", version, f"use {package} {least} or newer")
    else:
        yield Finding(AREA, package, "ok", version)


def _client(package: str, paths: str, extra: str) -> Finding:
    try:
        return Finding(AREA, package, "ok", metadata.version(package))
    except metadata.PackageNotFoundError:
        return Finding(AREA, package, "ok", f"not installed; {paths} paths need it: pip install -e '.[{extra}]'")


@cache
def _least_versions() -> dict[str, str]:
    """Package -> least version, as this distribution asks for them; empty where it is not installed as one."""
    try:
        requirements = metadata.requires("sevenleague") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w-]+)(?:\[[\w,]+\])?\s*>=\s*([\d.]+)", text) for text in requirements if ";" not in text)
    return {match[1]: match[2] for match in found if match is not None}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
