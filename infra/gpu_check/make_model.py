"""A Llama of random weights with a byte-level tokenizer, and prompts of ordinary length.

Random weights cost what trained ones do, but nobody can guess their tokens: this measures what steps cost, and that
drafts do no harm, not what drafts gain. usage: make_model.py MODEL_FOLDER PROMPTS.jsonl 1b|tiny|none
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SIZES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    },
}
TEXT = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they"


def make_model(folder: str, size: str) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    backend.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(folder)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        config = LlamaConfig(**SIZES[size], eos_token_id=0, bos_token_id=None, dtype="bfloat16")
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def make_prompts(path: str) -> None:
    """Texts of 60 to 400 words; every other one repeats a part of itself, as templates and code do."""
    rng = random.Random(0)
    with Path(path).open("w") as lines:
        for i in range(320):
            words = rng.choices(TEXT.split(), k=rng.randrange(60, 200))
            words *= 1 + i % 2
            lines.write(json.dumps({"prompt": " ".join(words)}) + "\n")


if __name__ == "__main__":
    if sys.argv[3] != "none":
        make_model(sys.argv[1], sys.argv[3])
    make_prompts(sys.argv[2])
