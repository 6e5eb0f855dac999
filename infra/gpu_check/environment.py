"""What the check runs on, as JSON, or one sentence about what is missing. usage: environment.py JSON cuda|cpu"""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from importlib import metadata
from pathlib import Path

NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "pydantic": "pydantic",
    "pyarrow": "pyarrow",
    "yaml": "pyyaml",
    "fsspec": "fsspec",
    "filelock": "filelock",
    "jinja2": "jinja2",
    "click": "click",
    "rich": "rich",
}
"""Module -> package. pytest is needed by the tests alone, which say so themselves."""
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}


def problem(device: str) -> str | None:
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"this Python ({sys.executable}) must have {', '.join(missing)}"
    for package, oldest in OLDEST.items():
        version = metadata.version(package)
        if tuple(int(part) for part in version.split(".")[:2]) < oldest:
            return f"{package} must be {'.'.join(map(str, oldest))} or newer, got {version}"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "there must be a CUDA device (or DEVICE=cpu for a rehearsal)"
    return None


def main(path: str, device: str) -> int:
    sentence = problem(device)
    if sentence is not None:
        print(sentence, file=sys.stderr)
        return 2
    import torch

    facts = {
        "python": platform.python_version(),
        "versions": {package: metadata.version(package) for package in NEEDED.values()},
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "capability": torch.cuda.get_device_capability() if device == "cuda" else None,
    }
    Path(path).write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
