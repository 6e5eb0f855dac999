"""Several sets of noise: which one is taken, that samples keep the model's distribution, and that adapters gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig, DecodingConfig, LookaheadConfig, PTPConfig
from workers import noise_sets
from workers.audit import is_near_tie
from workers.blocks import decode_block, prompt_block
from workers.drafters.base import Draft, Proposal
from workers.engine import Engine, Request
from workers.kv_cache import Slot
from workers.model_loading import LoadedModel, load_model
from workers.model_runner import ModelRunner
from workers.planned_block import PlannedBlock
from workers.randomness import key_of_set, noise_key, streams, uniforms
from workers.sampling import Picks, pick_by_tensors, widened
from workers.sequence import Sequence
from workers.step_sampling import pick_rows

SAMPLING = SamplingConfig(temperature=0.9, max_tokens=24, seed=2, coupling="inverse_cdf", ignore_eos=True)


def with_sets(count: int, stretch: int, **others: object) -> SamplingConfig:
    return SAMPLING.model_copy(update={"noise_sets": count, "noise_stretch": stretch, **others})


@pytest.fixture(scope="module")
def target(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float64"))


def test_sets_of_noise_are_independent_and_the_first_is_the_ordinary_one() -> None:
    key = noise_key(3, "row", 0)
    assert key_of_set(key, 0) == key
    u_ML = torch.stack([uniforms(streams([key_of_set(key, m)] * 4000, list(range(4000)))) for m in range(4)])
    assert (torch.corrcoef(u_ML) - torch.eye(4)).abs().max() < 0.07
    assert all(stats.kstest(u_L.numpy(), "uniform").pvalue > 1e-3 for u_L in u_ML)


def by_hand(logits_1V: Tensor, params: SamplingConfig, item: PlannedBlock, index: int) -> tuple[int, int]:
    """Set and token of a row where a stretch begins."""
    found = []
    for m in range(params.noise_sets):
        stream = streams([key_of_set(item.sequence.noise, m)], [index])
        picks = pick_by_tensors(widened(logits_1V), params, stream)
        assert picks.low_R is not None
        assert picks.high_R is not None
        place = (uniforms(stream) - picks.low_R) / (picks.high_R - picks.low_R)
        found.append((abs(float(place) - 0.5), m, int(picks.token_R)))
    return min(found)[1:]


def test_rows_of_a_tree_choose_where_a_stretch_begins_and_follow_their_parents_after_it() -> None:
    """Output of 2 tokens by set 2, stretches of 3: row 0 picks token 2 by set 2, depth 1 chooses, depth 2 follows."""
    params, plain = with_sets(4, 3), SAMPLING
    draft = Draft((7, 8, 9), (-1, -1, 0), (0.5, 0.4, 0.1), ("x", "x", "x"))
    items = []
    for uid, kind in (("a", params), ("b", plain), ("c", params)):
        sequence = Sequence.create(Request(uid, (1, 2, 3), kind), 0, 0, frozenset(), 100)
        sequence.tokens.extend((5, 6))
        sequence.context.noise_sets += [2, 2]
        block = decode_block(Slot(None, 0), 4, 6, draft, None)  # type: ignore[arg-type]
        items.append(PlannedBlock(sequence, block, Proposal(draft)))
    logits_SV = torch.randn(12, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    picks = pick_rows(items, logits_SV)
    for i in (0, 2):
        sets, tokens = picks.sets[4 * i : 4 * i + 4], picks.token_R[4 * i : 4 * i + 4].tolist()
        for row in (1, 2):
            assert (sets[row], tokens[row]) == by_hand(logits_SV[4 * i + row, None], params, items[i], 3)
        assert (sets[0], sets[3]) == (2, sets[1])
        for row, index in ((0, 2), (3, 4)):
            stream = streams([key_of_set(items[i].sequence.noise, sets[row])], [index])
            assert tokens[row] == int(pick_by_tensors(logits_SV[4 * i + row, None], params, stream).token_R)
    alone = pick_rows(items[1:2], logits_SV[4:8])
    assert alone.sets == ()
    assert alone.token_R.tolist() == picks.token_R[4:8].tolist()


def test_a_step_with_one_set_is_what_it_was() -> None:
    assert SAMPLING.identity().keys() == SAMPLING.model_dump().keys() - {"noise_sets", "noise_stretch"}
    assert with_sets(2, 8).identity() == with_sets(2, 8).model_dump(mode="json")


STRATEGIES: dict[str, DecodingConfig] = {
    "lookahead": LookaheadConfig(width=5, ngram=4, candidates=5),
    "serial": PTPConfig(adapter="c-context_token", mode="serial", max_window=18),
    "serial-few-rows": PTPConfig(adapter="c-plain", mode="serial", max_window=3),
    "one_pass": PTPConfig(adapter="o-context_token", mode="one_pass"),
    "small": PTPConfig(adapter="c-context_token", model="llama", max_window=18),
    "auto": AutoConfig(adapter="c-context_token"),
}


@pytest.mark.parametrize(
    ("strategy", "count", "stretch"), [*((name, 3, 4) for name in STRATEGIES), ("serial", 3, 1), ("serial", 8, 16)]
)
def test_every_strategy_gives_the_tokens_of_plain_decoding(
    target: LoadedModel,
    tiny_model_dir: Callable[[str], Path],
    adapter_dir: Callable[..., Path],
    strategy: str,
    count: int,
    stretch: int,
) -> None:
    """Also beside samples with one set and greedy ones, whatever the batch."""
    kinds = [with_sets(count, stretch), SAMPLING, with_sets(count, stretch, temperature=0.0), with_sets(count, stretch)]
    requests = [Request(f"row-{i}", tuple(range(5 + i, 30)), kind) for i, kind in enumerate(kinds)]
    config = STRATEGIES[strategy]
    if isinstance(config, PTPConfig | AutoConfig):
        assert config.adapter is not None
        head, slot_zero = config.adapter.split("-")
        changed = {"adapter": str(adapter_dir("llama", head=head, slot_zero=slot_zero))}
        if isinstance(config, PTPConfig) and config.model is not None:
            changed["model"] = str(tiny_model_dir(config.model))
        config = config.model_copy(update=changed)
    extras = frozenset({"cdf"})
    plain = Engine(target, EngineConfig(max_sequences=1), AutoregressiveConfig(), extras).generate(requests)
    drafted = Engine(target, EngineConfig(max_sequences=3), config, extras).generate(requests)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    for one, other in zip(drafted, plain, strict=True):
        assert one.cdf_low == pytest.approx(other.cdf_low, abs=1e-9)
    one_set = Engine(target, EngineConfig(), AutoregressiveConfig()).generate(
        [Request(r.uid, r.prompt_ids, SAMPLING) for r in requests]
    )
    assert plain[0].token_ids != one_set[0].token_ids
    assert plain[1].token_ids == one_set[1].token_ids


def test_an_audit_knows_the_set_that_was_taken(target: LoadedModel) -> None:
    """In float64 only the picked token is as good as the picked one, where a stretch begins and within it."""
    request = Request("row", (5, 6, 7), with_sets(4, 3))
    (plain,) = Engine(target, EngineConfig(), AutoregressiveConfig()).generate([request])
    for index in (0, 1, 3, 5):
        prefix, token = plain.token_ids[:index], plain.token_ids[index]
        assert is_near_tie(target, request, 0, prefix, token)
        assert not is_near_tie(target, request, 0, prefix, (token + 1) % 320)


def chances(
    target: LoadedModel, prompt: tuple[int, ...], params: SamplingConfig, length: int
) -> dict[tuple[int, ...], float]:
    """The model's own probability of each continuation."""
    runner = ModelRunner(target.model)
    cache = runner.new_cache(2**24, 1)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for path, chance in found.items():
            slot = cache.allocate(100)
            assert slot is not None
            logits_1V = runner.forward([prompt_block(slot, 0, (*prompt, *path), sampled=True)]).double()
            cache.free(slot)
            top = logits_1V[0].topk(params.top_k)
            for p, token in zip(
                (top.values / params.temperature).softmax(-1).tolist(), top.indices.tolist(), strict=True
            ):
                longer[*path, token] = chance * p
        found = longer
    return found


def by_noise_alone(picks: Picks, stream_R: Tensor) -> tuple[Tensor, Tensor]:
    """A mistaken choice: a u near 1/2, rather than near the middle of its interval, prefers middle tokens."""
    u_R = uniforms(stream_R)
    return (u_R - 0.5).abs(), torch.ones_like(u_R)


def by_right_drafts(picks: Picks, stream_R: Tensor) -> tuple[Tensor, Tensor]:
    """A mistaken choice: a set whose draft is right. The student here gives each of three tokens a third."""
    assert picks.low_R is not None
    assert picks.high_R is not None
    column_R = 1 - (picks.low_R == 0).int() + (picks.high_R == 1).int()
    is_wrong_R = (column_R != (3 * uniforms(stream_R)).floor()).double()
    return is_wrong_R, torch.ones_like(is_wrong_R)


@pytest.mark.parametrize("mistake", [None, by_noise_alone, by_right_drafts])
def test_samples_keep_the_distribution_of_the_model(
    target: LoadedModel,
    adapter_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[..., tuple[Tensor, Tensor]] | None,
) -> None:
    """Chi-square of the first three tokens together, stretches of 2, drafted by an adapter. A choice that looks at more
    than places fails it.
    """
    if mistake is not None:
        monkeypatch.setattr(noise_sets, "distances_from_middle", mistake)
    params = with_sets(4, 2, temperature=2.0, top_k=3, n=2000, max_tokens=3)
    expected = chances(target, (5, 6, 7), params, 3)
    assert min(expected.values()) > 5 / params.n
    config = PTPConfig(adapter=str(adapter_dir("llama", head="c")), mode="serial", max_window=8, max_draft_rows=512)
    engine = Engine(target, EngineConfig(max_sequences=128), config)
    results = engine.generate([Request("row", (5, 6, 7), params)])
    assert sum(result.stats.num_accepted_draft_tokens for result in results) > 0.2 * params.n
    counts = Counter(result.token_ids for result in results)
    assert counts.keys() <= expected.keys()
    statistic = sum((counts[path] - params.n * p) ** 2 / (params.n * p) for path, p in expected.items())
    pvalue = stats.chi2.sf(statistic, len(expected) - 1)
    assert pvalue > 1e-3 if mistake is None else pvalue < 1e-6


def test_a_student_with_other_edges_misses_less_with_more_sets() -> None:
    """Misses of one who knows probabilities up to a tenth, over the sets that it could choose from."""
    generator = torch.Generator().manual_seed(1)
    logits_1V = torch.randn(1, 12, generator=generator)
    student_1V = logits_1V + 0.1 * torch.randn(1, 12, generator=generator)
    misses = []
    for count in (1, 2, 4, 8):
        keys = [key_of_set(noise_key(0, f"row-{i}", 0), m) for i in range(2000) for m in range(count)]
        stream_NM = streams(keys, [0] * len(keys))
        picks, guesses = (
            pick_by_tensors(one.expand(len(keys), -1), SAMPLING, stream_NM) for one in (logits_1V, student_1V)
        )
        distance_NM, _ = noise_sets.distances_from_middle(picks, stream_NM)
        chosen_N1 = distance_NM.view(-1, count).argmin(-1, keepdim=True)
        is_miss_NM = (picks.token_R != guesses.token_R).view(-1, count)
        misses.append(int(is_miss_NM.gather(1, chosen_N1).sum()))
    assert misses[0] > 2 * misses[2] > 0
    assert sorted(misses, reverse=True) == misses
