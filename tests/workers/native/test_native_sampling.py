"""Compiled picks against NumPy in float64, written anew here, and against the tensor operations."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.config import SamplingConfig
from workers import sampling as tensors
from workers.native import build, sampling
from workers.native.build import NativeUnavailable, load_kernels
from workers.randomness import noise_key, streams

try:
    load_kernels(build.SAMPLING_SOURCE)
    missing = ""
except NativeUnavailable as error:
    missing = str(error)
pytestmark = pytest.mark.skipif(bool(missing), reason=missing)

Row = npt.NDArray[np.float64]
MASK = 2**64 - 1


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def noise(stream: int, vocabulary: int) -> Row:
    bits = [mix64((stream + (v + 1) * 0x9E3779B97F4A7C15) & MASK) >> 32 for v in range(vocabulary)]
    u = (np.array(bits, np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    gumbels: Row = -np.log(-np.log1p(-np.minimum(u, 1 - np.float32(2.0**-24)).astype(np.float64)))
    return gumbels


def kept_mass(logits: Row, params: SamplingConfig) -> Row:
    """Probability of every token after top-k, top-p and min-p, by full sorts."""
    x = logits / params.temperature
    mass: Row = np.exp(x - x.max())
    if 0 < params.top_k < len(x):
        mass[x < np.sort(x)[-params.top_k]] = 0.0
    mass /= mass.sum()
    order = np.lexsort((np.arange(len(x)), -x))
    if params.top_p < 1.0:
        before = np.cumsum(mass[order]) - mass[order]
        mass[order[before >= params.top_p]] = 0.0
    mass[mass < params.min_p * mass.max()] = 0.0
    mass /= mass.sum()
    return mass


def some_streams(rows: int, seed: int = 0) -> Tensor:
    return streams([noise_key(seed, "row", i) for i in range(rows)], list(range(rows)))


@st.composite
def rows_of_logits(draw: st.DrawFn) -> Tensor:
    """Rows apart in memory, with ties, forbidden tokens and any number of tokens."""
    vocabulary = draw(st.sampled_from([1, 2, 15, 16, 17, 63, 65, 100, 1000, 2049]))
    seed, spread = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.0, 0.3, 2.0, 8.0]))
    padded_RV = torch.randn(3, vocabulary + 5, generator=torch.Generator().manual_seed(seed)) * spread
    if draw(st.booleans()):
        padded_RV = padded_RV.round()
    if draw(st.booleans()):
        padded_RV[:, ::3] = -torch.inf
        padded_RV[:, vocabulary - 1] = 1.0
    padded_RV[:, vocabulary:] = 100.0
    return padded_RV.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))[:, :vocabulary]


SAMPLINGS = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.37, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 7, 64, 900]),
    top_p=st.sampled_from([1.0, 0.9137, 0.5071, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0517]),
    coupling=st.sampled_from(["gumbel", "inverse_cdf"]),
)


@settings(max_examples=400, deadline=None)
@given(logits_RV=rows_of_logits(), params=SAMPLINGS, seed=st.integers(0, 10**6))
def test_picks_are_those_of_numpy(logits_RV: Tensor, params: SamplingConfig, seed: int) -> None:
    stream_R = some_streams(len(logits_RV), seed)
    token_R, bounds_R2 = sampling.pick(logits_RV, params, stream_R)
    for r, (token, stream) in enumerate(zip(token_R.tolist(), stream_R.tolist(), strict=True)):
        logits = logits_RV[r].double().numpy()
        if params.temperature == 0.0:
            assert token == logits.argmax()
            continue
        mass = kept_mass(logits, params)
        if params.coupling == "gumbel":
            with np.errstate(divide="ignore"):
                score = np.log(mass) + noise(stream, len(mass))
            assert score[token] >= score.max() - 1e-5
        else:
            u = (mix64(stream % 2**64) >> 40) * 2.0**-24
            high = np.cumsum(mass)[token]
            assert bounds_R2 is not None
            assert bounds_R2[r].tolist() == pytest.approx([high - mass[token], high], abs=1e-5)
            assert bounds_R2[r, 0] <= u < bounds_R2[r, 1]
            assert mass[token] > 0


@settings(max_examples=200, deadline=None)
@given(logits_RV=rows_of_logits(), k=st.sampled_from([1, 2, 8, 70]))
def test_best_tokens_are_those_of_numpy(logits_RV: Tensor, k: int) -> None:
    ids_RK, probs_RK = sampling.best(logits_RV, k)
    for logits, ids, probs in zip(logits_RV.double().numpy(), ids_RK.numpy(), probs_RK.numpy(), strict=True):
        order = np.lexsort((np.arange(len(logits)), -logits))[:k]
        assert ids.tolist() == order.tolist()
        expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        np.testing.assert_allclose(probs, expected[order], rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("params", [SamplingConfig(), SamplingConfig(temperature=0.7, top_p=0.95)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_picks_are_those_of_tensor_operations(params: SamplingConfig, dtype: torch.dtype) -> None:
    """In float64, where tensor operations do not round; few of 20,000 rows are so close that float32 decides."""
    logits_RV = (torch.randn(20_000, 200, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    stream_R = some_streams(len(logits_RV))
    expected_R = tensors.pick_by_tensors(logits_RV.double(), params, stream_R).token_R
    assert (sampling.pick(logits_RV, params, stream_R)[0] != expected_R).sum() <= 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_rows_do_not_depend_on_each_other_or_on_threads(top_p: float) -> None:
    spread_R1 = torch.tensor([0.01, 1.0, 4.0, 9.0]).repeat(5)[:, None]
    logits_RV = (torch.randn(20, 5000, generator=torch.Generator().manual_seed(2)) * spread_R1).bfloat16()
    params, stream_R = SamplingConfig(top_p=top_p, coupling="inverse_cdf"), some_streams(20)
    token_R, bounds_R2 = sampling.pick(logits_RV, params, stream_R)
    ids_RK, probs_RK = sampling.best(logits_RV, 8)
    torch.set_num_threads(1)
    for r in reversed(range(20)):
        token, bounds = sampling.pick(logits_RV[r : r + 1], params, stream_R[r : r + 1])
        ids, probs = sampling.best(logits_RV[r : r + 1], 8)
        assert bounds is not None
        assert bounds_R2 is not None
        pairs = ((token, token_R), (bounds, bounds_R2), (ids, ids_RK), (probs, probs_RK))
        assert all(torch.equal(alone[0], together[r]) for alone, together in pairs)


def test_signed_zeros_tie() -> None:
    logits_1V = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert sampling.best(logits_1V, 3)[0].tolist() == [[1, 2, 3]]
    assert sampling.pick(logits_1V, SamplingConfig(temperature=0.0), some_streams(1))[0].tolist() == [1]
    params = SamplingConfig(top_p=0.5, coupling="inverse_cdf")  # keeps tokens 1 and 2
    _, bounds_R2 = sampling.pick(logits_1V.expand(40, -1), params, some_streams(40))
    assert bounds_R2 is not None
    assert {tuple(bounds) for bounds in bounds_R2.tolist()} == {(0.0, 0.5), (0.5, 1.0)}


def test_odd_logits_are_not_picked() -> None:
    """Not a number, infinite, transposed, no rows at all."""
    nan, inf = torch.nan, torch.inf
    logits_RV = torch.tensor([[nan, 1.0, 2.0], [nan, nan, nan], [-inf, -inf, -inf], [0.0, inf, 1.0]])
    for params in (SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.01, top_p=0.9)):
        assert sampling.pick(logits_RV, params, some_streams(4))[0].tolist() == [2, 0, 0, 1]
        assert sampling.pick(logits_RV.T.contiguous().T, params, some_streams(4))[0].tolist() == [2, 0, 0, 1]
        assert len(sampling.pick(logits_RV[:0], params, some_streams(0))[0]) == 0


@settings(max_examples=100, deadline=None)
@given(
    logits_RV=rows_of_logits(), odd=st.sampled_from([torch.nan, -torch.nan, torch.inf, -torch.inf]), k=st.integers(1, 9)
)
def test_the_best_token_is_the_greedy_pick(logits_RV: Tensor, odd: float, k: int) -> None:
    """Also where logits are not numbers: in a row of them, between others, and where fewer numbers are left than k."""
    greedy = SamplingConfig(temperature=0.0)
    for columns in (slice(0), slice(None, None, 2), slice(1, None), slice(None)):
        logits_RV[1:, columns] = odd
        assert torch.equal(sampling.best(logits_RV, k)[0][:, 0], sampling.pick(logits_RV, greedy, some_streams(3))[0])


def test_tokens_that_are_not_numbers_come_last() -> None:
    logits_1V = torch.full((1, 500), torch.nan)
    logits_1V[0, 480], logits_1V[0, 490], logits_1V[0, 3] = 1.0, 2.0, -torch.inf
    assert sampling.best(logits_1V, 4)[0].tolist() == [[490, 480, 3, 0]]
    assert sampling.best(-logits_1V, 4)[0].tolist() == [[3, 480, 490, 0]]


def test_without_kernels_tensor_operations_pick(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(_: object) -> None:
        raise NativeUnavailable("no compiler today")

    logits_RV, params = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)), SamplingConfig(top_p=0.9)
    assert sampling.serves(logits_RV)
    assert not sampling.serves(logits_RV.double())
    assert not sampling.serves(logits_RV.to("meta"))
    expected_R = tensors.pick(logits_RV, params, some_streams(5)).token_R
    sampling._library.cache_clear()
    monkeypatch.setattr(sampling, "load_kernels", unavailable)
    try:
        with caplog.at_level("INFO"):
            assert not sampling.serves(logits_RV)
            assert torch.equal(tensors.pick(logits_RV, params, some_streams(5)).token_R, expected_R)
        assert caplog.text.count("no compiler today") == 1
    finally:
        sampling._library.cache_clear()


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2, st.integers(0, 2**40)), max_size=40))
def test_noise_streams_are_those_of_arrays(rows: list[tuple[int, int, int]]) -> None:
    keys, indices = [(a, b) for a, b, _ in rows], [index for *_, index in rows]
    assert torch.equal(sampling.noise_streams(keys, indices), streams(keys, indices))


@pytest.mark.parametrize("params", [SamplingConfig(), SamplingConfig(top_k=30), SamplingConfig(min_p=0.02)])
def test_intervals_touch_and_fill_all_noise(params: SamplingConfig) -> None:
    """Each ends, to the last bit, where the next one begins, across blocks of tokens too; few tokens are not met."""
    params = params.model_copy(update={"coupling": "inverse_cdf"})
    logits_1V = torch.randn(1, 700, generator=torch.Generator().manual_seed(3)) * 2
    token_R, bounds_R2 = sampling.pick(logits_1V.expand(40_000, -1), params, some_streams(40_000))
    assert bounds_R2 is not None
    of_token = dict(zip(token_R.tolist(), map(tuple, bounds_R2.tolist()), strict=True))
    assert len(of_token) == len({*zip(token_R.tolist(), *bounds_R2.T.tolist(), strict=True)})
    intervals = [of_token[token] for token in sorted(of_token)]
    assert intervals[0][0] == 0.0 or params.top_k == params.min_p == 0.0
    touching = sum(a[1] == b[0] for a, b in pairwise(intervals))
    assert all(a[1] <= b[0] for a, b in pairwise(intervals))
    if params.top_k or params.min_p:  # so few are kept that all of them are met
        assert touching == len(intervals) - 1
        assert intervals[-1][1] == 1.0
    else:
        assert touching > 0.8 * len(intervals)
