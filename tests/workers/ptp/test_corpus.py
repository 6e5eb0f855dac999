"""The corpus of the standard library: which files, which passages, and that measurements never saw training text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from workers.ptp.corpus import SourceFile, passages, read_sources, standard_library, write_corpus
from workers.ptp.documents import is_held_out

SOURCES = [SourceFile(f"m{i}.py", "".join(f"value_{i} = {n}\n" for n in range(200))) for i in range(60)]


def test_tests_installed_packages_and_other_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "pkg/b.py", "pkg/test/c.py", "site-packages/d.py", "notes.txt", "empty.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else f"# {name}\n")
    assert list(read_sources(tmp_path)) == [SourceFile("a.py", "# a.py\n"), SourceFile("pkg/b.py", "# pkg/b.py\n")]


def test_the_standard_library_is_found() -> None:
    first = next(iter(read_sources(standard_library())))
    assert first.id == "__future__.py"


def test_passages_end_at_lines() -> None:
    lines = [f"line{i}\n" for i in range(5)]
    assert passages(SourceFile("x.py", "".join(lines)), 10) == ["line0\nline1\n", "line2\nline3\n"]


def test_prompts_to_measure_with_come_from_held_out_files(tmp_path: Path) -> None:
    write_corpus(SOURCES, tmp_path, held_out=0.3, prompts=50, bench=8)
    corpus, prompts, bench = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("corpus", "prompts", "bench"))
    assert (len(prompts), len(bench)) == (50, 8)
    for table, held_out in ((corpus, False), (prompts, False), (bench, True)):
        ids = table["id"].to_pylist()
        assert len(set(ids)) == len(ids)
        assert {is_held_out(id.split("#")[0], 0.3) for id in ids} == {held_out}
    texts = dict(zip(corpus["id"].to_pylist(), corpus["text"].to_pylist(), strict=True))
    for id, prompt in zip(prompts["id"].to_pylist(), prompts["prompt"].to_pylist(), strict=True):
        assert texts[id].startswith(prompt)
        assert len(prompt) < len(texts[id])


def test_neighbours_are_of_different_files(tmp_path: Path) -> None:
    write_corpus(SOURCES, tmp_path, held_out=0.3, prompts=1, bench=1)
    files = [id.split("#")[0] for id in pq.read_table(tmp_path / "corpus.parquet")["id"].to_pylist()]
    same = sum(a == b for a, b in pairwise(files))
    assert same < len(files) / 5


@pytest.mark.parametrize("name", ["corpus.parquet", "prompts.parquet", "bench.parquet"])
def test_the_same_sources_give_the_same_rows(tmp_path: Path, name: str) -> None:
    for folder, order in (("a", SOURCES), ("b", SOURCES[::-1])):
        write_corpus(order, tmp_path / folder, held_out=0.3, prompts=10, bench=5)
    assert pq.read_table(tmp_path / "a" / name).equals(pq.read_table(tmp_path / "b" / name))
