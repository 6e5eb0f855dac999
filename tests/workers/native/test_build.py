"""The kernels are built once per source, flags, compiler and CPU; where they cannot be, models run without them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from workers.model_loading import load_model
from workers.model_runner import ModelRunner
from workers.native import build, decoder
from workers.native.build import NativeUnavailable, load_kernels

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(
    COMPILER is None or "avx512bw" not in build.cpu_features(), reason="needs a C++ compiler and AVX-512"
)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of this test's own; what was loaded before is forgotten, and loaded again later."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_kernels.cache_clear()
    yield tmp_path / "cache" / "sevenleague" / "native"
    load_kernels.cache_clear()


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_built_once_and_nothing_else_is_left(fresh_cache: Path) -> None:
    library = load_kernels()
    assert hasattr(library, "forward_float32")
    assert hasattr(library, "forward_bfloat16") == ("avx512_bf16" in build.cpu_features())
    (path,) = fresh_cache.glob("*.so")
    built = path.stat().st_mtime_ns
    load_kernels.cache_clear()
    load_kernels()
    assert path.stat().st_mtime_ns == built
    assert {p.suffix for p in fresh_cache.iterdir()} <= {".so", ".lock"}


def test_the_key_names_all_that_the_library_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILER is not None
    features = frozenset({"avx512f", "avx512bw"})
    key = build._key(COMPILER, features)
    assert key == build._key(COMPILER, frozenset(sorted(features)))
    other = script(tmp_path / "c++", "echo another compiler")
    assert len({key, build._key(COMPILER, features | {"amx_tile"}), build._key(other, features)}) == 3
    with monkeypatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
        assert build._key(COMPILER, features) != key
    sources = build.SOURCE.parent
    for name in ("kernels.cpp", "lanes.h"):
        folder = tmp_path / f"other_{name}"
        shutil.copytree(sources, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        monkeypatch.setattr(build, "SOURCE", folder / "kernels.cpp")
        assert build._key(COMPILER, features) == key
        (folder / name).write_text((folder / name).read_text() + "\n")
        assert build._key(COMPILER, features) != key


def test_two_processes_at_once_compile_once(tmp_path: Path, fresh_cache: Path) -> None:
    log = tmp_path / "log"
    compiler = script(
        tmp_path / "c++", f'case "$*" in *kernels.cpp*) echo compiled >> {log};; esac\nexec {COMPILER} "$@"'
    )
    code = "import torch; from workers.native.build import load_kernels; print(load_kernels().forward_float32)"
    root = Path(build.__file__).parents[2]
    both = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "CXX": compiler}, cwd=root) for _ in range(2)
    ]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert log.read_text().splitlines() == ["compiled"]
    assert len(list(fresh_cache.glob("*.so"))) == 1


def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", "")


def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "c++", "echo no such file: >&2; echo omp.h >&2; exit 1"))


def compiler_that_fails_on_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'if [ "$1" = --version ]; then echo 1.0; else echo internal compiler error >&2; exit 4; fi'
    monkeypatch.setenv("CXX", script(tmp_path / "c++", body))


def compiler_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "CXX", script(tmp_path / "c++", 'if [ "$1" = --version ]; then echo 1.0; else exec sleep 60; fi')
    )
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.3)


def source_without_openmp_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernels.cpp"
    source.write_text('extern "C" void no_such_runtime();\nextern "C" void forward_float32() { no_such_runtime(); }\n')
    monkeypatch.setattr(build, "SOURCE", source)


def compiler_without_bfloat16(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-avx512bf16"))


def cache_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def old_cpu(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2"}))


TROUBLES: list[tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = [
    (no_compiler, r"there is no C\+\+ compiler \(CXX, c\+\+, g\+\+ or clang\+\+\)"),
    (broken_compiler, r"the C\+\+ compiler failed: no such file: omp.h"),
    (compiler_that_fails_on_the_source, r"the C\+\+ compiler failed: internal compiler error"),
    (compiler_that_hangs, r"the C\+\+ compiler failed: .* timed out"),
    (source_without_openmp_runtime, "the compiled kernels cannot be loaded: .*no_such_runtime"),
    (compiler_without_bfloat16, r"the C\+\+ compiler is too old for torch.bfloat16 kernels on this CPU"),
    (cache_that_is_a_file, "the compiled kernels cannot be kept in the cache folder"),
    (old_cpu, "the CPU has no AVX-512"),
]


@pytest.mark.parametrize(("trouble", "sentence"), TROUBLES, ids=[trouble.__name__ for trouble, _ in TROUBLES])
def test_without_kernels_models_run_through_their_own_modules(
    trouble: Callable[[Path, pytest.MonkeyPatch], None],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model_dir: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load_model(ModelConfig(id=str(tiny_model_dir("llama_native")), dtype="bfloat16")).model
    trouble(tmp_path, monkeypatch)
    with caplog.at_level("INFO"):
        assert ModelRunner(model, "auto").native is None
    assert "the model's own modules are used instead of compiled kernels" in caplog.text
    with pytest.raises(NativeUnavailable, match=sentence):
        decoder._entry(torch.bfloat16)
    with pytest.raises(ConfigError, match=f"engine.compile must be auto or off here, got on: {sentence}"):
        ModelRunner(model, "on")
