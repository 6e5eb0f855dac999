"""How long does a forward take with the kernels of another checkout, and with these? Both by turns, in one process.

    python infra/trials/compare_kernels.py OTHER_CHECKOUT [--dtype bfloat16] [--seconds 25]

Prints a Markdown table of the fewest milliseconds of some steps. A machine whose clock or memory drifts is the same for
both. `git worktree add OTHER_CHECKOUT COMMIT` makes the other checkout; the structures of step.h must be the same.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import click
import torch

from pipeline.config import ModelConfig
from workers.blocks import Block, decode_block, prompt_block
from workers.drafters.base import EMPTY_DRAFT, Draft
from workers.kv_cache import KVCache
from workers.model_loading import load_model
from workers.model_runner import ModelRunner
from workers.native import decoder
from workers.native.build import SOURCE, load_kernels
from workers.native.decoder import NativeDecoder

NOISE = 0.3  # keys and values are of that size: how large they are makes no difference to the time

NewBlock = Callable[[KVCache, int], Block]


def decode(draft: Draft) -> NewBlock:
    """The pending token of a new sequence and its draft, behind so many cached columns."""

    def block(cache: KVCache, columns: int) -> Block:
        slot = cache.allocate(columns + 1 + len(draft))
        assert slot is not None
        return decode_block(slot, columns, 7, draft, None)

    return block


def prompt(rows: int) -> NewBlock:
    def block(cache: KVCache, columns: int) -> Block:
        slot = cache.allocate(columns + rows)
        assert slot is not None
        return prompt_block(slot, columns, tuple(range(5, 5 + rows)), sampled=True)

    return block


def chain(nodes: int) -> Draft:
    return Draft.chain(tuple(range(11, 11 + nodes)), "test")


def fan(nodes: int) -> Draft:
    return Draft(tuple(range(11, 11 + nodes)), (-1,) * nodes, (0.5,) * nodes, ("test",) * nodes)


PLAIN = decode(EMPTY_DRAFT)
STEPS: dict[str, list[NewBlock]] = {
    "1 row": [PLAIN],
    "4 siblings below it": [decode(fan(4))],
    "a chain of 7 below it": [decode(chain(7))],
    "8 sequences": [PLAIN] * 8,
    "and a draft for 4": [decode(chain(1))] * 4 + [PLAIN] * 4,
    "and a draft for 8": [decode(chain(1))] * 8,
    "16 sequences": [PLAIN] * 16,
    "32 sequences": [PLAIN] * 32,
    "128 rows of a prompt": [prompt(128)],
}


def blocks(runner: ModelRunner, makers: list[NewBlock], columns: int) -> list[Block]:
    cache = KVCache(runner.kv_shape, 1 << 62, max_slots=len(makers))
    made = [make(cache, columns) for make in makers]
    for slab in cache.slabs.values():
        slab.kv_L2SCKD.normal_(std=NOISE)
    return made


def decoder_of(checkout: Path, runner: ModelRunner) -> NativeDecoder:
    """With the kernels of a checkout, and weights that are packed as it packs them."""
    source, python = (
        checkout / path.relative_to(Path(__file__).parents[2]) for path in (SOURCE, Path(decoder.__file__))
    )
    spec = importlib.util.spec_from_file_location("other_decoder", python)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with patch.multiple(decoder, load_kernels=partial(load_kernels, source), packed=module.packed):
        return NativeDecoder(runner.model, runner._probe())


@click.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--columns", default="135,300,1000", show_default=True, help="Cached columns of each sequence.")
@click.option("--seconds", default=25.0, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(other: Path, dtype: str, columns: str, seconds: float, threads: int) -> None:
    torch.set_num_threads(threads)
    model = load_model(ModelConfig.model_validate({"id": "builtin:smollm2-135m", "dtype": dtype})).model
    runner = ModelRunner(model)
    decoders = [decoder_of(checkout, runner) for checkout in (other, Path(__file__).parents[2])]
    counts = [int(count) for count in columns.split(",")]
    steps = {(name, count): blocks(runner, makers, count) for name, makers in STEPS.items() for count in counts}
    best = {step: [float("inf")] * 2 for step in steps}
    end = time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < end:
            for step, step_blocks in steps.items():
                for i, one in enumerate(decoders):
                    began = time.perf_counter()
                    one.forward(step_blocks)
                    best[step][i] = min(best[step][i], (time.perf_counter() - began) * 1e3)
    click.echo("| cached columns | " + " | ".join(columns.split(",")) + " |\n" + "|---" * (len(counts) + 1) + "|")
    for name in STEPS:
        cells = ["{:.2f} -> {:.2f}".format(*best[name, count]) for count in counts]
        click.echo(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
