"""The commits of a job: one small object per shard, and one object that repeats them all so that few need be read.

A commit is `_commits/00042.json`, created if absent, so a shard is committed once. When failed rows of it are done
again, the new part is committed as `_commits/00042.3.json`; the number is its generation, and the highest stands.

What is committed is what a listing of `_commits` names. `_commits.jsonl.gz` only saves reading: it holds the content of
standing commits as of some time ago. Whatever it lacks is read one by one, what it holds beyond the listing is ignored,
and a damaged one is as good as none. So it can be written at any time, by any driver, and lost.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import re
import threading
import zlib
from collections.abc import Iterable, Mapping

from pipeline import storage
from pipeline.errors import TransientError
from pipeline.part_names import checked_part_name
from pipeline.records import AcceptanceStats, OccupancyClass, PartReceipt

COMPACT_EVERY = 500
"""Commits after which the log is written anew; for large jobs a tenth of what it holds, if that is more."""

_FOLDER = "_commits"
_LOG = "_commits.jsonl.gz"
_NAME = re.compile(r"(\d+)(?:\.([1-9]\d*))?\.json")
logger = logging.getLogger(__name__)


class CommitLog:
    """The commits of the job at an output. Several threads may commit at once."""

    def __init__(self, output: str) -> None:
        self._output = output
        self._new: dict[str, bytes] = {}
        self._num_logged = 0
        self._is_complete = False
        self._noting = threading.Lock()
        self._compacting = threading.Lock()

    def committed(self) -> dict[int, PartReceipt]:
        """Standing receipts by shard index, in order: one listing, the log, and the commits that are newer than it."""
        receipts = [decoded(data) for data in self._standing({}).values()]
        return {receipt.shard_index: receipt for receipt in sorted(receipts, key=lambda receipt: receipt.shard_index)}

    def commit(self, receipt: PartReceipt) -> PartReceipt:
        """Make a part the shard's one; returns the receipt that stands, which is another's when that was first.

        The loser's part is deleted. A put that was repeated after its answer got lost finds its own receipt, told by
        the part's name, which is unique to the attempt.
        """
        name, data, standing = commit_name(receipt.shard_index, receipt.generation), encoded(receipt), receipt
        if not storage.create_if_absent(self._path(_FOLDER, name), data):
            data = storage.read_bytes(self._path(_FOLDER, name))
            standing = decoded(data)
            if standing.path != receipt.path:
                storage.delete(self._path(receipt.path))
        with self._noting:
            self._new[name] = data
            is_due = len(self._new) >= max(COMPACT_EVERY, self._num_logged // 10)
        if is_due:
            self.compact()
        return standing

    def compact(self) -> None:
        """Write the log anew. It only saves time later, so a fault of the store is no reason to stop."""
        if not self._compacting.acquire(blocking=False):
            return
        try:
            self._compact()
        except (TransientError, OSError) as error:
            logger.warning("the commit log could not be written: %s", error)
        finally:
            self._compacting.release()

    def _compact(self) -> None:
        with self._noting:
            new = dict(self._new)
        if self._is_complete and not new:
            return
        before = self._logged() if self._is_complete else self._standing(new)
        standing = _highest({**before, **new})
        if standing:
            storage.write_bytes(self._path(_LOG), _log_bytes(standing))
        with self._noting:
            for name in new:
                del self._new[name]
            self._num_logged, self._is_complete = len(standing), True

    def _standing(self, known: Mapping[str, bytes]) -> dict[str, bytes]:
        """Content of the commits that stand, by name; what is known is not read again."""
        sizes = storage.list_sizes(self._path(_FOLDER))
        standing = _highest({name: b"" for name in sizes if _NAME.fullmatch(name)})
        candidates = {**self._logged(), **known}
        found = {name: data for name, data in candidates.items() if name in standing and len(data) == sizes[name]}
        missing = {self._path(_FOLDER, name): name for name in standing if name not in found}
        return found | {missing[path]: data for path, data in storage.read_many(list(missing)).items()}

    def _logged(self) -> dict[str, bytes]:
        """What the log holds, by the name of the commit; nothing when it is damaged or not there."""
        try:
            lines = gzip.decompress(storage.read_bytes(self._path(_LOG))).splitlines()
            return {name: text.encode() for name, text in map(json.loads, lines)}
        except FileNotFoundError:
            return {}
        except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, TypeError, AttributeError) as error:
            logger.warning("the commit log of %s is damaged, all commits are read instead: %s", self._output, error)
            return {}

    def _path(self, *names: str) -> str:
        return storage.join(self._output, *names)


def commit_name(shard_index: int, generation: int) -> str:
    return f"{shard_index:05d}.{generation}.json" if generation else f"{shard_index:05d}.json"


def encoded(receipt: PartReceipt) -> bytes:
    return json.dumps(dataclasses.asdict(receipt), indent=1, ensure_ascii=False).encode()


def decoded(data: bytes) -> PartReceipt:
    fields = json.loads(data)
    checked_part_name(fields["path"])
    stats = fields["stats"]
    for name in ("acceptance_histogram", "window_histogram"):
        stats[name] = tuple(stats[name])
    occupancy = tuple(OccupancyClass(**counts) for counts in fields.pop("occupancy", ()))
    return PartReceipt(**{**fields, "stats": AcceptanceStats(**stats), "occupancy": occupancy})


def _highest(commits: Mapping[str, bytes]) -> dict[str, bytes]:
    """Of each shard the commit of its highest generation."""
    best: dict[str, tuple[int, str]] = {}
    for name in commits:
        match = _NAME.fullmatch(name)
        assert match is not None, name
        index, generation = match[1], int(match[2] or 0)
        if index not in best or best[index][0] < generation:
            best[index] = (generation, name)
    return {name: commits[name] for _, name in sorted(best.values(), key=lambda pair: pair[1])}


def _log_bytes(commits: Mapping[str, bytes]) -> bytes:
    """A line for each commit. The checksum of the compression tells whether all of it is there and right."""
    lines: Iterable[str] = (json.dumps([name, data.decode()]) for name, data in commits.items())
    return gzip.compress("\n".join(lines).encode(), compresslevel=1, mtime=0)
