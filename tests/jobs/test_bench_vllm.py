"""The protocol with a peer in another interpreter. vLLM itself is not installed here; small scripts answer for it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from jobs.bench.contestants import Turn
from jobs.bench.rounds import Entry, compete
from jobs.bench.vllm_client import PeerError, VllmPeer
from jobs.bench.workload import Workload
from pipeline.config import ModelConfig, SamplingConfig
from workers.model_loading import LoadedModel, load_model

WORKLOAD = Workload(("a", "b"), ((1, 2), (3,)), ((4, 5),), SamplingConfig(temperature=0, max_tokens=3, ignore_eos=True))

ECHO = """
import json
for line in iter(input, None):
    request = json.loads(line)
    if request["do"] == "load":
        answer = {"version": "9", "engine": request["engine"]}
    else:
        count = request["sampling"]["max_tokens"]
        answer = {"seconds": 0.5, "tokens": [[prompt[0]] * count for prompt in request["prompts"]], "steps": 4}
    print(json.dumps(answer), flush=True)
"""
CRASHES_IN_THE_ROUND = ECHO.replace("count = ", 'assert request["batch"] < 2, "boom"; count = ')
ANSWERS_ERROR = 'input(); print(\'{"error": "RuntimeError: no such model"}\', flush=True); input()'
DIES_AT_ONCE = "import sys; print('cannot import vllm', file=sys.stderr); sys.exit(3)"


MakePeer = Callable[..., AbstractContextManager[VllmPeer]]


@pytest.fixture(scope="module")
def llama(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float32"))


@pytest.fixture
def peer(llama: LoadedModel, tmp_path: Path) -> MakePeer:
    """A context with a peer whose interpreter runs a script of ours, whatever script it is given."""

    @contextmanager
    def make(script: str, name: str = "vllm") -> Iterator[VllmPeer]:
        (tmp_path / "script.py").write_text(script)
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'script.py'}\n")
        python.chmod(0o755)
        made = VllmPeer(
            name, str(python), ModelConfig(id=llama.name, dtype="float32"), llama, WORKLOAD, max_batch=2, threads=1
        )
        try:
            yield made
        finally:
            made.close()

    return make


class Steady:
    """A contestant that never fails."""

    name = "steady"
    is_own = True

    def refusal(self, batch: int) -> str | None:
        return None

    def start(self) -> float:
        return 1.0

    def prepare(self, batch: int) -> None:
        pass

    def run(self, batch: int) -> Turn:
        return Turn(1.0, [[1, 1, 1], [3, 3, 3]], 6)

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


def is_stopped(pid: int, expected: bool) -> bool:
    """Whether a process is, or soon will be, stopped by a signal (or is not, when that is expected)."""
    deadline = time.monotonic() + 10
    while True:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if (state == "T") == expected or time.monotonic() > deadline:
            return state == "T"
        time.sleep(0.01)


def test_a_turn(peer: MakePeer) -> None:
    with peer(ECHO) as vllm:
        assert vllm.start() > 0
        assert vllm.version == "9"
        pid = vllm._process.pid
        assert is_stopped(pid, expected=True)
        vllm.prepare(2)
        assert not is_stopped(pid, expected=False)
        assert vllm.run(2) == Turn(0.5, [[1, 1, 1], [3, 3, 3]], 4)
        vllm.rest()
        assert is_stopped(pid, expected=True)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (DIES_AT_ONCE, "PeerError: its process ended with exit code 3: cannot import vllm"),
        (ANSWERS_ERROR, "PeerError: RuntimeError: no such model"),
    ],
)
def test_a_peer_that_does_not_start_spoils_nothing(peer: MakePeer, script: str, said: str) -> None:
    entries: list[Entry] = []
    with peer(script) as vllm:
        compete([Steady(), vllm], [1, 2], 2, WORKLOAD, entries, lambda number, entry: None)
    assert [entry.error for entry in entries] == [None, None, said, said]
    assert [len(entry.seconds) for entry in entries] == [2, 2, 0, 0]


def test_a_peer_that_dies_on_the_way_keeps_what_it_has(peer: MakePeer) -> None:
    entries: list[Entry] = []
    with peer(CRASHES_IN_THE_ROUND) as vllm:
        compete([vllm, Steady()], [1, 2], 1, WORKLOAD, entries, lambda number, entry: None)
    small, large, *steady = entries
    assert small.error is None
    assert small.rates == [12.0]
    assert small.tokens_per_step == 1.5
    assert large.error == "PeerError: its process ended with exit code 1: AssertionError: boom"
    assert [len(entry.seconds) for entry in steady] == [1, 1]


def test_what_vllm_is_told(peer: MakePeer, llama: LoadedModel) -> None:
    with peer(ECHO, "vllm-ngram") as vllm:
        vllm.start()
        engine = vllm._engine()
    assert engine["model"] == llama.name
    assert engine["dtype"] == "float32"
    assert engine["max_num_seqs"] == 2
    assert engine["max_model_len"] >= 2 + 3
    assert engine["speculative_config"]["method"] == "ngram"
    assert json.dumps(engine)


def test_an_unstarted_peer_says_so(peer: MakePeer) -> None:
    with peer(ECHO) as vllm, pytest.raises(PeerError, match="it is not running"):
        vllm.run(1)


def test_the_environment_of_vllm(peer: MakePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    with peer(ECHO) as vllm:
        environment = vllm._environment()
    assert "PYTHONPATH" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
