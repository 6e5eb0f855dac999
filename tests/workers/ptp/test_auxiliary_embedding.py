"""Features of noise against binary and struct arithmetic in plain Python; slot inputs by hand."""

from __future__ import annotations

import math
import random
import struct

import pytest
import torch

from pipeline.adapter_config import EmbeddingKind, Head
from workers.ptp.auxiliary_embedding import FEATURES, AuxiliaryEmbedding, features

KINDS: list[EmbeddingKind] = ["arithmetic", "bits32", "threshold", "linear", "constant"]


def expected_features(u: float, kind: EmbeddingKind) -> list[float]:
    """u is a multiple of 2^-24, so that Python's arithmetic on it is exact."""
    if kind == "arithmetic":
        return [float(math.fmod(u * 2.0**i, 1.0) <= 0.5) for i in range(32)]
    if kind == "bits32":
        (word,) = struct.unpack(">I", struct.pack(">f", u))
        return [float(bit) for bit in f"{word:032b}"]
    if kind == "threshold":
        return [float(u >= (i + 0.5) / 32) for i in range(32)]
    return [u, 1.0] if kind == "linear" else [1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_features(kind: EmbeddingKind) -> None:
    draw = random.Random(0)
    grid = [0, 1, 2**23, 2**23 - 1, 2**23 + 1, 2**24 - 1, 2**22] + [draw.randrange(2**24) for _ in range(300)]
    u = torch.tensor([n / 2**24 for n in grid], dtype=torch.float64)
    expected = torch.tensor([expected_features(x, kind) for x in u.tolist()])
    assert expected.shape[1] == FEATURES[kind]
    assert torch.equal(features(u, kind), expected)
    assert torch.equal(features(u.float(), kind), expected)


def test_worked_example() -> None:
    assert features(torch.tensor(0.3125), "arithmetic")[:6].tolist() == [1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_serving_show_the_same(kind: EmbeddingKind) -> None:
    """A float64 u and its float32 rounding give one vector, also next to 1; so do all u between two served ones."""
    u = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = torch.cat((u, torch.tensor([1 - 2.0**-40, 1 - 2.0**-24], dtype=torch.float64)))
    assert torch.equal(features(u, kind), features(u.float(), kind))
    fine = torch.tensor([5 * 2.0**-24, 5 * 2.0**-24 + 2.0**-28])
    assert torch.equal(features(fine[0], kind), features(fine[1], kind))
    assert features(torch.tensor(1 - 2.0**-40, dtype=torch.float64), "linear")[0] < 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_has_the_length_of_token_embeddings_at_first(kind: EmbeddingKind) -> None:
    embedding = AuxiliaryEmbedding(kind, "c", 256, 7.0, torch.Generator().manual_seed(0))
    u = torch.rand(4000, generator=torch.Generator().manual_seed(1))
    assert embedding(u).norm(dim=-1).mean().item() == pytest.approx(7.0, rel=0.02)
    assert embedding.start is not None
    assert embedding.start.norm().item() == pytest.approx(7.0)


@pytest.mark.parametrize("head", ["o", "c"])
@pytest.mark.parametrize("with_context", [True, False])
def test_slot_inputs(head: Head, with_context: bool) -> None:
    """Head o is shown its own token's noise, head c that of the token before, and the start vector first."""
    embedding = AuxiliaryEmbedding("arithmetic", head, 8, 1.0, torch.Generator().manual_seed(0))
    u = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1))
    context = torch.randn(2, 3, 8) if with_context else None
    inputs = embedding.slot_inputs(u, context)
    for i in range(2):
        for j in range(3):
            vectors = [embedding(u[i, j, k]) for k in range(4)]
            if head == "c":
                assert embedding.start is not None
                vectors = [embedding.start, *vectors[:3]]
            if context is not None:
                vectors[0] = vectors[0] + context[i, j]
            torch.testing.assert_close(inputs[i, j], torch.stack(vectors))


def test_constant_does_not_look() -> None:
    embedding = AuxiliaryEmbedding("constant", "o", 8, 1.0, torch.Generator().manual_seed(0))
    vectors = embedding(torch.rand(5))
    assert torch.equal(vectors, vectors[:1].expand(5, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_round(kind: EmbeddingKind) -> None:
    embedding = AuxiliaryEmbedding(kind, "c", 8, 1.0, torch.Generator().manual_seed(0))
    u, context = torch.rand(5, 3), torch.randn(5, 8)
    expected = embedding.slot_inputs(u, context)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(embedding.slot_inputs(u, context), expected)
