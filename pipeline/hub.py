"""A folder of data as one commit to a dataset repository of the Hugging Face hub.

The token is `HF_TOKEN` of the environment and is given to the hub's client alone; `HF_ENDPOINT` names another hub. To
push again is harmless: files that are there already are neither sent nor committed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.data_config import REPOSITORY, PushConfig
from pipeline.errors import ConfigError

_DATASET = "dataset"
_CLOSING = ("README.md", "metrics.json", "_manifest.json")


def check_token() -> str:
    """The token to push with. Raises ConfigError where there is none."""
    token = os.environ.get("HF_TOKEN", "")
    if not token:
        raise ConfigError("HF_TOKEN must be set in the environment to push to the hub, got nothing")
    return token


def push(folder: str, target: PushConfig) -> str:
    """Make the repository hold the finished output or exported data set in a folder; returns the commit's address.

    Its files under `data/` become exactly those of the folder. Whatever the hub or the network says is raised.
    """
    # 33 MB of memory, so an export that is not pushed does without.
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi

    names = list(_files(folder))
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=check_token())
    api.create_repo(target.repo, repo_type=_DATASET, private=target.private, exist_ok=True)
    if target.revision != "main":
        api.create_branch(target.repo, repo_type=_DATASET, branch=target.revision, exist_ok=True)
    there = api.list_repo_files(target.repo, repo_type=_DATASET, revision=target.revision)
    gone = [name for name in there if name.startswith("data/") and name not in names]
    additions = []
    for name in names:
        addition = CommitOperationAdd(name, _content(storage.join(folder, name)))
        # Sent one by one, so that no more than one file of an object store is in memory.
        api.preupload_lfs_files(target.repo, [addition], repo_type=_DATASET, revision=target.revision)
        additions.append(addition)
    operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [*additions]
    operations += [CommitOperationDelete(name) for name in gone]
    message = f"{len(names)} files of sevenleague"
    commit = api.create_commit(
        target.repo, operations, commit_message=message, repo_type=_DATASET, revision=target.revision
    )
    return str(commit.commit_url)


def push_again(folder: str, target: PushConfig) -> str:
    """The command that pushes once more."""
    options = ("" if target.private else " --public") + f" --revision {target.revision}" * (target.revision != "main")
    return f"sevenleague push {folder} {target.repo}{options}"


def parse_target(repo: str, private: bool, revision: str) -> PushConfig:
    """Raises ConfigError for what cannot be a repository."""
    if REPOSITORY.fullmatch(repo) is None:
        raise ConfigError(f"the repository must be USER/NAME, got {repo!r}")
    return PushConfig(repo=repo, private=private, revision=revision)


def _files(folder: str) -> Iterator[str]:
    """Names of what is pushed: of a finished output what its manifest names, of a data set all files."""
    if storage.exists(storage.join(folder, "_job.json")):
        state = JobStore(folder).state()
        if state != "done":
            raise ConfigError(f"FOLDER must be the output of a finished job, got {folder!r} which is {state}")
        yield from _CLOSING
        manifest = json.loads(storage.read_bytes(storage.join(folder, "_manifest.json")))
        yield from (part["path"] for part in manifest["parts"])
        return
    if not storage.exists(storage.join(folder, "README.md")):
        raise ConfigError(f"FOLDER must be a finished output or a data set that export wrote, got {folder!r}")
    yield "README.md"
    yield from (f"data/{name}" for name in storage.list_names(storage.join(folder, "data")))


def _content(path: str) -> str | bytes:
    return storage.read_bytes(path) if "://" in path else path
