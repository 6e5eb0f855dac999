"""What `make chaos` adds to the workers of its jobs, and to nothing else: the folder is on PYTHONPATH of its own runs.

The file that CHAOS_HOOK names is JSON: `step_s` is how long a step of the engine takes at least, so that faults meet
jobs in the midst of their work although the model is tiny; a row whose id contains `kills` ends its process by SIGKILL
when a step decodes it, one that contains `raises` lets the step raise. What workers do is appended to the file
`events`: an attempt at a shard begins and ends, a row's first token is decoded in a process.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _settings() -> dict[str, Any]:
    with open(os.environ["CHAOS_HOOK"], encoding="utf-8") as file:
        settings: dict[str, Any] = json.load(file)
    return settings


def _tell(**event: Any) -> None:
    line = json.dumps({**event, "at": time.time(), "pid": os.getpid()}) + "\n"
    with open(_settings()["events"], "a", encoding="utf-8") as file:
        file.write(line)  # one write of a short line is whole among those of other processes


def _patch_engine(module: ModuleType) -> None:
    """Steps that last, and rows that kill or raise as long as the engine has them."""
    settings = _settings()
    engine: Any = module.Engine
    submit, cancel, step = engine.submit, engine.cancel, engine.step

    def poisons(self: Any) -> set[str]:
        found: set[str] = self.__dict__.setdefault("_chaos_poisons", set())
        return found

    def decoded(self: Any) -> set[str]:
        found: set[str] = self.__dict__.setdefault("_chaos_decoded", set())
        return found

    @functools.wraps(submit)
    def patched_submit(self: Any, request: Any) -> Any:
        if any(settings[key] and settings[key] in request.uid for key in ("kills", "raises")):
            poisons(self).add(request.uid)
        return submit(self, request)

    @functools.wraps(cancel)
    def patched_cancel(self: Any, uid: str) -> Any:
        poisons(self).discard(uid)
        decoded(self).discard(uid)
        return cancel(self, uid)

    @functools.wraps(step)
    def patched_step(self: Any) -> Any:
        began = time.perf_counter()
        for uid in poisons(self):
            if settings["kills"] and settings["kills"] in uid:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"chaos: no model can read {uid}")
        results = step(self)
        for uid in {sequence.request.uid for sequence in self.scheduler.running} - decoded(self):
            decoded(self).add(uid)
            _tell(event="decoded", row=uid)
        time.sleep(max(0.0, settings["step_s"] - (time.perf_counter() - began)))
        return results

    engine.submit, engine.cancel, engine.step = patched_submit, patched_cancel, patched_step


def _patch_actor(module: ModuleType) -> None:
    """Attempts at shards, as the workers see them."""
    worker: Any = module.GenerationWorker
    generate = worker.generate

    def tell(event: str, task: Any) -> None:
        _tell(event=event, run=task.run_id, shard=task.shard.index, attempt=task.attempt)

    @functools.wraps(generate)
    def patched(self: Any, task: Any, *arguments: Any, **named: Any) -> Any:
        tell("began", task)
        try:
            receipt = generate(self, task, *arguments, **named)
        except BaseException:
            tell("raised", task)
            raise
        tell("written", task)
        return receipt

    worker.generate = patched


_PATCHES: dict[str, Callable[[ModuleType], None]] = {"workers.engine": _patch_engine, "workers.actor": _patch_actor}


class _Loader(importlib.abc.Loader):
    """Loads a module as it is, and patches it then."""

    def __init__(self, loader: importlib.abc.Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _PATCHES[name])
        return spec


if "CHAOS_HOOK" in os.environ:
    sys.meta_path.insert(0, _Finder())
