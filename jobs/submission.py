"""What is submitted: an id that the output decides, and a folder with the code and the job file.

An id is ``NAME-HASH-ATTEMPT``: the output's last name, to be read by people; a hash of the output's whole path; and a
count, since Ray takes no id twice, not even of a job that has ended. Two submissions of one job at the same instant
find the same count free, so Ray refuses the second of them.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from pathlib import Path

import pipeline
from jobs.packages import PACKAGES
from pipeline import storage
from pipeline.config import JobConfig
from pipeline.config_io import dump_job, parse_job
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError

PUBLIC_MODULE = "sevenleague.py"
JOB_FILE = "job.yaml"
ENTRYPOINT = f"exec python -c 'from jobs.cli import entry; entry()' run {JOB_FILE}"
"""`exec`: signals reach the driver itself. Nothing of the job is in the command, which the dashboard shows to all."""

_ID = re.compile(r"(?P<key>[a-z0-9-]*-[0-9a-f]{12})-(?P<attempt>[1-9][0-9]*)")
_LONGEST_NAME = 32


def job_key(output: str) -> str:
    """The id of a job without its count.

    Worked example: `s3://bucket/runs/My Summaries/` gives `my-summaries-` and twelve digits.
    """
    path = storage.absolute(output).rstrip("/")
    name = re.sub(r"[^a-z0-9]+", "-", path.rsplit("/", 1)[-1].lower()).strip("-")[:_LONGEST_NAME]
    return f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def submission_id(key: str, attempt: int) -> str:
    return f"{key}-{attempt}"


def split_id(text: str) -> tuple[str, int] | None:
    """Key and count of an id; None for what is no id."""
    match = _ID.fullmatch(text)
    return (match["key"], int(match["attempt"])) if match else None


def for_cluster(config: JobConfig) -> JobConfig:
    """The job as it runs on the cluster: there another folder is the current one, and Ray is at hand."""
    data = config.model_dump()
    data["output"]["path"] = storage.absolute(config.output.path)
    data["input"]["path"] = [_input_path(path, config.input) for path in config.input.path]
    data["model"]["id"] = _absolute_if_here(config.model.id)
    for key in ("adapter", "model"):
        if data["decoding"].get(key) is not None:
            data["decoding"][key] = _absolute_if_here(data["decoding"][key])
    data["cluster"]["address"] = "auto"
    return parse_job(data)


def stage(folder: Path, config: JobConfig, wheel: str | None) -> None:
    """Fill a folder with the job file and the code: of a wheel, else the packages that run here. Raises ConfigError."""
    if wheel is None:
        _copy_packages(folder)
    else:
        _unpack_wheel(wheel, folder)
    (folder / JOB_FILE).write_text(dump_job(config))


def _input_path(path: str, config: InputConfig) -> str:
    return _absolute_if_here(path) if config.format == "datasets" else storage.absolute(path)


def _absolute_if_here(name: str) -> str:
    """A local path made absolute where it exists; else a name of the hub, which stays."""
    path = storage.absolute(name)
    return path if "://" not in name and storage.exists(path) else name


def _copy_packages(folder: Path) -> None:
    root = Path(pipeline.__path__[0]).parent
    for package in PACKAGES:
        shutil.copytree(root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copy(root / PUBLIC_MODULE, folder)


def _unpack_wheel(wheel: str, folder: Path) -> None:
    """Not installed, since pip would install what it depends on too, on every machine and for every job."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.split("/")[0] in (*PACKAGES, PUBLIC_MODULE)]
            archive.extractall(folder, names)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"--wheel must be a readable wheel, got {wheel!r}: {error}") from error
    missing = [package for package in PACKAGES if not (folder / package).is_dir()]
    if missing:
        raise ConfigError(f"--wheel must be a wheel of sevenleague, got {wheel!r} without {', '.join(missing)}")
