"""Tiny random models on disk, one folder each, as real checkpoints are. torch is imported by the fixtures alone.

Weights are drawn wide (std 0.5), so that distributions are peaked and greedy decoding neither loops at once nor ties.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The models are so small that threads would only wait for each other; torch reads this when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCAB_SIZE = 320
EOS_TOKEN = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs on.",
    "One step of seven-league boots covers seven leagues. One step of this covers several tokens.",
    "def add(a, b):\n    return a + b\n\nassert add(1, 2) == 3\n",
]

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
# head sizes and widths that the compiled kernels take
NATIVE = {**SHAPE, "hidden_size": 64, "intermediate_size": 80, "head_dim": 32}
# tied and scaled embeddings at this width would make Gemma repeat its last token for ever
GEMMA = {**GROUPED, "tie_word_embeddings": False, "sliding_window": 16, "query_pre_attn_scalar": 8}

TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", {**SHAPE, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", GROUPED),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 16}),
    "gemma2": (
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": 20.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    ),
    "gpt_neox": ("GPTNeoXConfig", SHAPE),
    "phi3": ("Phi3Config", {**SHAPE, "num_key_value_heads": 2, "pad_token_id": 0}),
    "llama_native": ("LlamaConfig", {**NATIVE, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama_wide_native": (
        "LlamaConfig",
        {**NATIVE, "hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "qwen2_native": ("Qwen2Config", {**NATIVE, "num_attention_heads": 2, "num_key_value_heads": 2}),
    "qwen3_native": (
        "Qwen3Config",
        {**NATIVE, "hidden_size": 80, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 64},
    ),
    "mistral_native": ("MistralConfig", {**NATIVE, "num_key_value_heads": 2, "sliding_window": 16}),
}
"""Name -> configuration class of transformers and its arguments."""


@pytest.fixture
def python_handles_sigint() -> Iterator[None]:
    """As in a terminal, also for child processes: one started in the background inherits that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    """Commands that run in this process set up its logs (`pipeline.logs.configure`)."""
    loggers = [logging.getLogger(name) for name in (None, "pipeline", "workers", "jobs")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    hook = sys.excepthook
    yield
    sys.excepthook = hook
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 320 tokens that reads any text back, with an end token and a chat template.

    The template refuses roles other than system, user and assistant.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN, "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN)
    tokenizer.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Callable[[str], Path]:
    """`tiny_model_dir("llama")` is the folder of a tiny model and its tokenizer, made once (names: `TINY_MODELS`)."""
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            made[name] = _make_model(name, tmp_path_factory.mktemp(name), tiny_tokenizer_dir)
        return made[name]

    return folder_of


def _make_model(name: str, folder: Path, tokenizer_dir: Path) -> Path:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    class_name, arguments = TINY_MODELS[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    end = tokenizer.eos_token_id
    config = getattr(transformers, class_name)(**{**arguments, "eos_token_id": end, "bos_token_id": None})
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases start as constants; a bug that drops them must show
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter_dir(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`adapter_dir("llama", head="c", ..)` is the folder of an adapter on a tiny model, made once.

    With `spread` 0 it was never trained and does not see the noise: slot 0 draws from the base's own distribution, so
    with head c, where it takes the last token's place, it is always right. Else its weights lie far from the base's.
    """
    made: dict[tuple[str, float, str], Path] = {}

    def folder_of(family: str, spread: float = 0.0, **settings: Any) -> Path:
        key = (family, spread, repr(sorted(settings.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("adapter")
            _make_adapter(str(tiny_model_dir(family)), made[key], spread, settings)
        return made[key]

    return folder_of


def _make_adapter(base: str, folder: Path, spread: float, settings: dict[str, Any]) -> None:
    import torch

    from pipeline.adapter_config import AdapterConfig
    from pipeline.config import ModelConfig
    from workers.model_loading import load_model
    from workers.ptp.adapter import base_shape, new_adapter

    loaded = load_model(ModelConfig(id=base, dtype="float32"))
    shape = {"base": base, "base_revision": loaded.revision, "base_shape": base_shape(loaded.model)}
    low_rank = {"rank": 5, "scale": 0.7} if settings.get("variant", "lora") == "lora" else {}
    config = AdapterConfig.model_validate({**shape, "slots": 6, **low_rank, **settings})
    adapter = new_adapter(loaded.model, config, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in adapter.embedding.parameters():
            parameter.mul_(spread)
        for parameter in adapter.gated.trainable_parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    adapter.save(str(folder))
