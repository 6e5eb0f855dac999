"""Noise: pinned values (a changed hash would change every user's output), uniformity, independence of neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from workers.randomness import _mix64, gumbels, noise_key, streams, uniforms


def splitmix64(x: int) -> int:
    """Steele, Lea, Flood 2014, in unsigned integers: the reference for the tensor version."""
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


PINNED_UNIFORM = 0.6074175238609314
PINNED_GUMBELS = [-1.1719546, 0.0134451, 0.5676277]


@pytest.mark.parametrize("x", [0, 1, 0x9E3779B97F4A7C15, 2**63, 2**64 - 1, 123456789012345678])
def test_mix64_is_splitmix64(x: int) -> None:
    signed = x - 2**64 if x >= 2**63 else x
    assert int(_mix64(torch.tensor([signed]))[0]) % 2**64 == splitmix64(x)


def test_streams_depend_on_key_and_index_alone() -> None:
    a, b = noise_key(0, "row-1", 0), noise_key(0, "row-1", 1)
    together = streams([a, b, a], [5, 5, 6])
    assert together[0] == streams([a], [5])[0]
    assert len(set(together.tolist())) == 3


def test_keys_do_not_run_into_each_other() -> None:
    assert len({noise_key(1, "2x", 3), noise_key(12, "x", 3), noise_key(1, "x", 23), noise_key(2, "x", 13)}) == 4


def test_pinned_values() -> None:
    stream = streams([noise_key(7, "row", 2)], [11])
    assert float(uniforms(stream)[0]) == PINNED_UNIFORM
    assert gumbels(stream, torch.tensor([[0, 1, 49151]]))[0].tolist() == pytest.approx(PINNED_GUMBELS, rel=1e-5)


def test_uniforms_are_uniform_and_exact_in_float32() -> None:
    keys = [noise_key(0, f"row-{i}", 0) for i in range(2000)]
    u = uniforms(streams(keys * 5, [j for j in range(5) for _ in keys]))
    assert torch.equal(u.float().double(), u)
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3


def test_gumbels_are_gumbel_and_uncorrelated() -> None:
    stream = streams([noise_key(0, "row", i) for i in range(64)], list(range(64)))
    g = gumbels(stream, torch.arange(4096).expand(64, -1)).double().numpy()
    assert stats.kstest(g.ravel()[::7], "gumbel_r").pvalue > 1e-3
    along_tokens = np.corrcoef(g[:, :-1].ravel(), g[:, 1:].ravel())[0, 1]
    along_rows = np.corrcoef(g[:-1].ravel(), g[1:].ravel())[0, 1]
    assert abs(along_tokens) < 0.01
    assert abs(along_rows) < 0.01


def test_gumbels_of_some_tokens_are_those_of_all() -> None:
    stream = streams([noise_key(3, "row", 0)], [0])
    dense = gumbels(stream, torch.arange(1000)[None])
    some = torch.tensor([[3, 999, 17]])
    assert torch.equal(gumbels(stream, some)[0], dense[0, some[0]])
