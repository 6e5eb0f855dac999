"""What a job talks to: the store of its output, a Ray cluster, the model."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jobs.checkup.findings import Finding, gigabytes, guarded
from pipeline import storage
from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.redaction import redacted, without_credentials

AREA = "reach"
DEMO_MODEL = "builtin:smollm2-135m"
JOIN_TIMEOUT_S = 60
JOIN = """
import json, logging, sys
import ray
ray.init(address=sys.argv[1], logging_level=logging.CRITICAL, log_to_driver=False)
print(json.dumps(ray.cluster_resources()))
"""


def findings(output: str | None, model: str | None, address: str | None) -> Iterator[Finding]:
    if output is None:
        yield Finding(AREA, "output", "ok", "not checked; name a folder or URL with --output")
    else:
        advice = "check credentials, endpoint and rights (docs/object_stores.md)"
        yield from guarded(AREA, "output", advice, lambda: _store(output))
    if address is None:
        yield Finding(AREA, "Ray", "ok", "a job starts its own here; name a cluster with --address")
    else:
        advice = "check that the cluster runs and the address is right (docs/cluster.md)"
        yield from guarded(AREA, "Ray", advice, lambda: [_cluster(address)])
    if model is None:
        advice = f"jobs with {DEMO_MODEL} need it: make install"
        yield from guarded(AREA, "model", advice, lambda: _model(DEMO_MODEL, weights=False), "warn")
    else:
        advice = "check the name, or the rights and the network behind it (docs/troubleshooting.md)"
        yield from guarded(AREA, "model", advice, lambda: _model(model, weights=True))


def _store(output: str) -> Iterator[Finding]:
    """Objects are made, read and removed; folders that this made on a local disk are removed again."""
    folder, shown = storage.absolute(output), without_credentials(output)
    local = "://" not in folder
    path = Path(folder)
    missing = [part for part in (path, *path.parents) if not part.exists()] if local else []
    try:
        began = time.perf_counter()
        storage.check_writable(folder)
        took = time.perf_counter() - began
        conditional = storage.has_conditional_put(folder)
    finally:
        for part in missing:
            with contextlib.suppress(OSError):
                part.rmdir()
    yield Finding(AREA, "output", "ok", f"{shown}: written, read and removed in {took:.2f} s")
    if conditional:
        yield Finding(AREA, "conditional put", "ok", "an object that exists is not replaced")
    else:
        advice = "run only one driver at a time on an output there"
        yield Finding(AREA, "conditional put", "warn", "the store replaces objects that exist", advice)


def _cluster(address: str) -> Finding:
    shown = without_credentials(address)
    if address.startswith(("http://", "https://")):
        from jobs.ray_jobs import RayJobs

        RayJobs(address)
        return Finding(AREA, "Ray", "ok", f"{shown}: takes jobs (sevenleague submit)")
    if address != "auto":
        from jobs.ray_session import check_reachable
        from jobs.ray_token import check_token_mode

        try:
            check_reachable(address)
        except (OSError, ValueError) as error:
            raise ConfigError(f"nothing answers at {shown}: {error}") from error
        check_token_mode(address)
    resources = _resources(address)
    found = ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
    return Finding(AREA, "Ray", "ok", f"{shown}: joined, {found}")


def _resources(address: str) -> dict[str, float]:
    """What a cluster has, asked for by a process of its own: Ray ends a process that it cannot connect."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", JOIN, address], capture_output=True, text=True, timeout=JOIN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the cluster at {address} was not joined within {JOIN_TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ConfigError(f"the cluster at {address} was not joined: {redacted(lines[-1] if lines else 'no reason')}")
    resources: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return resources


def _model(name: str, *, weights: bool) -> Iterator[Finding]:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from workers.model_loading import check_model, load_model

    config = ModelConfig(id=name)
    check_model(config)
    yield Finding(AREA, "model", "ok", f"{name}: configuration and tokenizer load, and it can be served")
    if weights:
        began = time.perf_counter()
        loaded = load_model(config)
        took = time.perf_counter() - began
        size = sum(tensor.numel() * tensor.element_size() for tensor in loaded.model.parameters())
        found = f"{gigabytes(size)} on {loaded.model.device} in {took:.1f} s, context {loaded.max_context:,}"
        yield Finding(AREA, "weights", "ok", found)
