"""vLLM as a peer, in a process of an interpreter of its own (`--peer-python vllm=PATH`).

One process serves all batch sizes. It holds the engine itself (no engine process beside it that would poll), and
between its turns it is stopped by a signal, so that it takes no CPU from the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs.bench.contestants import WARM_UP_TOKENS, Turn
from jobs.bench.workload import Workload
from pipeline.config import ModelConfig
from workers.model_files import locate
from workers.model_loading import LoadedModel

SCRIPT = Path(__file__).with_name("vllm_peer.py")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's cache on a CPU."""


class PeerError(Exception):
    """A peer failed; the message says how, in words."""


class VllmPeer:
    """vLLM, plain or with n-gram drafts (`vllm-ngram`)."""

    is_own = False

    def __init__(
        self,
        name: str,
        python: str,
        model: ModelConfig,
        loaded: LoadedModel,
        workload: Workload,
        *,
        max_batch: int,
        threads: int,
    ) -> None:
        self.name = name
        self.version: str | None = None
        self._python = python
        self._model = model
        self._loaded = loaded
        self._workload = workload
        self._max_batch = max_batch
        self._threads = threads
        self._warm: set[int] = set()
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()

    def refusal(self, batch: int) -> str | None:
        return None

    def start(self) -> float:
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [self._python, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment(),
            process_group=0,  # not a session: if we are killed while it is stopped, the kernel ends it
        )
        self.version = self._ask({"do": "load", "engine": self._engine()})["version"]
        seconds = time.perf_counter() - began
        self.rest()
        return seconds

    def prepare(self, batch: int) -> None:
        self._signal(signal.SIGCONT)
        if batch not in self._warm:
            self._generate(batch, [list(ids) for ids in self._workload.warm_up(batch)], WARM_UP_TOKENS)
            self._warm.add(batch)

    def run(self, batch: int) -> Turn:
        answer = self._generate(batch, self._workload.sequences, self._workload.sampling.max_tokens)
        return Turn(answer["seconds"], answer["tokens"], answer["steps"])

    def rest(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        try:
            os.killpg(process.pid, signal.SIGCONT)
            process.stdin.close()  # the end of its input ends it
            process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._log.close()

    def _generate(self, batch: int, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        sampling = self._workload.sampling
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": max_tokens,
            "ignore_eos": sampling.ignore_eos,
        }
        return self._ask({"do": "generate", "batch": batch, "prompts": prompts, "sampling": params})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None:
            raise PeerError("it is not running")
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; reading says how
        line = process.stdout.readline()
        if not line:
            raise PeerError(f"its process ended with exit code {process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def _engine(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`; what is not here is vLLM's default."""
        engine: dict[str, Any] = {
            "model": locate(self._model, weights=True),
            "dtype": self._model.dtype,
            "trust_remote_code": self._model.trust_remote_code,
            "max_num_seqs": self._max_batch,
            "max_model_len": min(self._loaded.max_context, self._workload.max_length + BLOCK_TOKENS),
            "seed": self._workload.sampling.seed,
        }
        return engine | ({"speculative_config": NGRAM} if self.name == "vllm-ngram" else {})

    def _environment(self) -> dict[str, str]:
        """Ours without what belongs to our interpreter, over what serves vLLM best on CPUs; so a VLLM_* given stays.

        The engine runs in the process itself, with its threads on the first CPUs that are allowed: in a process beside
        it, it would leave one CPU to the other.
        """
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        cpus = sorted(os.sched_getaffinity(0))[: self._threads]
        openmp = Path(self._python).parent.parent / "lib" / "libiomp5.so"  # beside the interpreter, with intel-openmp
        preload = {"LD_PRELOAD": f"{openmp}", "KMP_BLOCKTIME": "5"} if openmp.exists() else {}
        if openmp.exists():
            preload["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{','.join(map(str, cpus))}]"
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(self._kv_gib()),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            **preload,
            **kept,
            "OMP_NUM_THREADS": str(len(cpus)),
            "PYTHONSAFEPATH": "1",  # our folder's modules are none of its business
        }

    def _kv_gib(self) -> int:
        """Memory for the cache of all sequences in flight, in whole GiB, rounded up generously."""
        config = self._loaded.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_hidden_layers * heads * head_dim * self._loaded.model.dtype.itemsize
        tokens = self._max_batch * (self._workload.max_length + 2 * BLOCK_TOKENS)
        return 1 + int(tokens * per_token) // 2**30
