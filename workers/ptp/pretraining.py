"""New language models for experiments: a Llama of a given shape, and a tokenizer where there is none yet."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from pipeline import storage
from pipeline.config import JobConfig, ModelConfig
from pipeline.data_config import InputConfig, OutputConfig
from pipeline.errors import ConfigError
from pipeline.prompts import read_prompts
from pipeline.shards import plan
from pipeline.train_config import ShapeConfig

END_TOKEN = "<|end|>"
_SAMPLE_CHARACTERS = 20_000_000
"""Text that a vocabulary is learned from, at most."""


def new_llama(shape: ShapeConfig, vocabulary: int, end_token_id: int | None, seed: int) -> PreTrainedModel:
    """A Llama with random float32 weights and tied embeddings. The global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        initializer_range=shape.init or shape.hidden**-0.5,
        bos_token_id=None,
        eos_token_id=end_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def number_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    """Token ids as decimal numbers between spaces, for data that is no text: `3 0 17` is [3, 0, 17]."""
    backend = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def train_tokenizer(input: InputConfig, vocabulary: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE with an end token, learned from the first texts of a data set. Raises ConfigError."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(input), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_TOKEN)


def save_model(folder: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a model folder (any fsspec path), `config.json` last, so that a folder with one is whole."""
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        for name in sorted(os.listdir(made), key=lambda name: (name == "config.json", name)):
            with open(os.path.join(made, name), "rb") as file:
                storage.write_bytes(storage.join(folder, name), file.read())


def _texts(input: InputConfig) -> Iterator[str]:
    job = JobConfig(model=ModelConfig(id="unused"), input=input, output=OutputConfig(path="unused"))
    left = _SAMPLE_CHARACTERS
    for shard in plan(job).shards:
        for prompt in read_prompts(shard, input, ()):
            if prompt.prompt is None:
                raise ConfigError("base.pretrain.input must hold plain strings, got a row without one")
            yield prompt.prompt
            left -= len(prompt.prompt)
            if left < 0:
                return
