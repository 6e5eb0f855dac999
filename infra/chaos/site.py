"""Where a run of `make chaos` takes place: a folder, a tiny model, an S3 server with a proxy before it, a cluster."""

from __future__ import annotations

import logging
import os
import random
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.chaos import processes
from infra.chaos.nodes import Nodes
from infra.chaos.proxy import FaultProxy

ROOT = Path(__file__).parents[2]
BUCKET = "bucket"
COMMAND = (sys.executable, "-c", "from jobs.cli import entry; entry()")
_WORDS = (
    "seven",
    "league",
    "boots",
    "step",
    "over",
    "one",
    "hill",
    "two",
    "rivers",
    "three",
    "towns",
    "and",
    "a",
    "sea",
)


@dataclass(frozen=True)
class Site:
    """`mark` is that of all processes of this run. This process itself reads the store past the proxy."""

    folder: Path
    mark: str
    model: Path
    proxy: FaultProxy
    nodes: Nodes
    environment: Mapping[str, str]

    @property
    def hook_file(self) -> Path:
        """The settings of the hook in the workers (see hook/sitecustomize.py); workers read it when they start."""
        return self.folder / "hook.json"

    def environment_of(self, mark: str) -> dict[str, str]:
        """The environment of processes that this run starts."""
        return {**self.environment, processes.MARK: mark}


@contextmanager
def site(seed: int, folder: str | None) -> Iterator[Site]:
    """Everything but the cluster is started here, and all that runs at the end is killed. The folder stays."""
    from moto.server import ThreadedMotoServer

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    work = Path(folder or tempfile.mkdtemp(prefix="chaos-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    mark = f"chaos-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        ray_folder = stack.enter_context(  # short, since the paths of Ray's sockets may not be long
            tempfile.TemporaryDirectory(prefix="chaos-ray-", ignore_cleanup_errors=True)
        )
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        stack.callback(server.stop)
        host, port = server.get_host_and_port()
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://{host}:{port}",
            AWS_ACCESS_KEY_ID="testing",
            AWS_SECRET_ACCESS_KEY="testing",
            AWS_DEFAULT_REGION="us-east-1",
        )
        _make_bucket()
        proxy = stack.enter_context(FaultProxy(os.environ["AWS_ENDPOINT_URL"], seed=seed))
        environment = {
            "AWS_ENDPOINT_URL": proxy.url,
            "CHAOS_HOOK": str(work / "hook.json"),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "infra" / "chaos" / "hook"), str(ROOT)]),
            "RAY_TMPDIR": ray_folder,
            "OMP_NUM_THREADS": "1",
        }
        nodes = Nodes({**environment, processes.MARK: f"{mark}-nodes"})
        stack.callback(lambda: processes.kill(processes.marked(mark)))
        stack.callback(nodes.kill_all)
        yield Site(work, mark, make_model(work / "model"), proxy, nodes, environment)


def _make_bucket() -> None:
    import boto3  # type: ignore[import-untyped]

    boto3.client("s3").create_bucket(Bucket=BUCKET)


def make_model(folder: Path) -> Path:
    """A Llama of random weights, so small that steps cost next to nothing; its tokens are peaked, so nothing ties."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

    logging.disable_progress_bar()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([" ".join(_WORDS)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_prompts(rng: random.Random, ids: list[str]) -> Any:
    """An Arrow table of ids and prompts."""
    import pyarrow as pa

    texts = [" ".join(rng.choices(_WORDS, k=rng.randint(4, 20))) for _ in ids]
    return pa.table({"id": ids, "prompt": texts})
