"""Templated prompts of one narrow domain, as jobs of product texts have them: templated_prompts.py FOLDER

`prompts.parquet` (to train on) and `bench.parquet` (held out) share the template, but no combination of values.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

KINDS = "kettle, desk lamp, backpack, rain jacket, office chair, water bottle, headset, bicycle pump, tent, toaster"
MATERIALS = "steel, aluminium, cotton, oak, recycled plastic, leather, bamboo, glass"
COLOURS = "black, white, dark green, sand, navy blue, red"
BUYERS = "students, commuters, families, hikers, small offices"
BENCH = 32


def main(folder: str) -> None:
    values = [text.split(", ") for text in (KINDS, MATERIALS, COLOURS, BUYERS)]
    combinations = list(itertools.product(*values))
    random.Random(0).shuffle(combinations)
    rows = [
        {"id": f"product-{i}", "prompt": _prompt(kind, material, colour, buyers)}
        for i, (kind, material, colour, buyers) in enumerate(combinations)
    ]
    Path(folder).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows[:BENCH]), Path(folder, "bench.parquet"))
    pq.write_table(pa.Table.from_pylist(rows[BENCH:]), Path(folder, "prompts.parquet"))


def _prompt(kind: str, material: str, colour: str, buyers: str) -> str:
    return (
        f"Write a product text of three short sentences for a web shop.\nProduct: {kind}\nMaterial: {material}\n"
        f"Colour: {colour}\nBuyers: {buyers}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
