"""The packed training forwards against plain transformers models, window by window, under dense masks made here.

The reference has two plain models: the base reads a document and leaves its keys and values in transformers' own cache;
a model with merged weights then reads one window's slots behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from pipeline.adapter_config import EmbeddingKind, Head, SlotZero, Variant
from tests.workers.ptp.makers import FAMILIES, load, make_adapter, merged, packed, random_ids
from workers.ptp.adapter import Adapter
from workers.ptp.losses import cross_entropy
from workers.ptp.student import Captured, capture, continuation_logits, slot_logits
from workers.ptp.windows import PADDING, PackedTokens, Windows, make_windows

SLOTS = 4
STARTS = torch.tensor([[1, 8, 30, 41], [2, 22, 26, 42]])


def two_rows() -> PackedTokens:
    """Documents of different lengths, some longer than the tiny models' sliding windows (16), and padding."""
    ids = random_ids(90, 5)
    return packed(
        [
            [(ids[:1], False), (ids[1:9], True), (ids[9:12], False), (ids[12:46], True)],
            [(ids[46:66], False), (ids[66:68], True), (ids[68:69], False), (ids[69:89], True)],
        ],
        columns=46,
    )


def additive(sees: Tensor, positions: Tensor, model: PreTrainedModel) -> Tensor | dict[str, Tensor]:
    """Masks as the models' own forward takes them: `sees` [Q, C] and, in sliding layers, distance too."""
    low = torch.finfo(model.dtype).min
    far = positions[-len(sees) :, None] - positions >= (getattr(model.config, "sliding_window", None) or 10**9)
    full, near = (
        torch.zeros(sees.shape, dtype=model.dtype).masked_fill(~s, low)[None, None] for s in (sees, sees & ~far)
    )
    if getattr(model.config, "layer_types", None):
        return {"full_attention": full, "sliding_attention": near}
    return near


def reference(
    base: PreTrainedModel, student: PreTrainedModel, inputs_LE: Tensor, context: list[int], seen: int
) -> Tensor:
    """Logits `[L, V]` of one window's slots behind the first `seen` tokens of its document's `context`."""
    slots = len(inputs_LE)
    cache = DynamicCache()
    positions = torch.arange(len(context) - 1 + slots)
    slot_positions = positions[len(context) - 1 :]
    if seen:
        square = torch.ones(seen, seen, dtype=torch.bool).tril()
        mask = additive(square, positions[:seen], base)
        base(torch.tensor([context[:seen]]), attention_mask=mask, cache=cache, use_cache=True)
    sees = torch.cat((torch.ones(slots, seen, dtype=torch.bool), torch.ones(slots, slots, dtype=torch.bool).tril()), 1)
    mask = additive(sees, torch.cat((positions[:seen], slot_positions)), student)
    output = student(
        inputs_embeds=inputs_LE[None],
        position_ids=slot_positions[None],
        attention_mask=mask,
        cache=cache,
        use_cache=True,
    )
    return output.logits[0]  # type: ignore[no-any-return]


def forward(adapter: Adapter, tokens: PackedTokens, u_BWL: Tensor) -> tuple[Tensor, Windows, Captured]:
    windows = make_windows(tokens, STARTS, SLOTS)
    captured = capture(adapter.gated, tokens)
    inputs = adapter.slot_inputs(u_BWL, windows.before(tokens.ids_BS))
    return slot_logits(adapter, inputs, windows, captured).view(2, 4, SLOTS, -1), windows, captured


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("variant", "head", "slot_zero"),
    [("lora", "o", "context_token"), ("full", "c", "plain"), ("full", "o", "context_token"), ("lora", "c", "plain")],
)
def test_slots_are_a_plain_model_behind_the_bases_cache(
    family: str, variant: Variant, head: Head, slot_zero: SlotZero, tiny_model_dir: Callable[[str], Path]
) -> None:
    folder, tokens = tiny_model_dir(family), two_rows()
    adapter = make_adapter(load(folder), variant=variant, head=head, slot_zero=slot_zero)
    u = torch.rand(2, 4, SLOTS, generator=torch.Generator().manual_seed(2))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    student = merged(folder, adapter)
    with torch.no_grad():
        logits, _, _ = forward(adapter, tokens, u)
        for b in range(2):
            for w in range(4):
                start = int(STARTS[b, w])
                document = tokens.document_BS[b].tolist()
                first = document.index(document[start - 1])
                context = tokens.ids_BS[b, first:start].tolist()
                inputs = adapter.slot_inputs(u[b, w], torch.tensor(context[-1]))
                seen = len(context) - (slot_zero == "context_token")
                expected = reference(base, student, inputs, context, seen)
                torch.testing.assert_close(logits[b, w], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_logits_are_those_of_each_document_alone(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    folder, tokens = tiny_model_dir(family), two_rows()
    adapter = make_adapter(load(folder))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    row_N = torch.tensor([3, 20, 45, 46 + 10, 46 + 42])
    logits = capture(adapter.gated, tokens, row_N).logits_NV
    for i, row in enumerate(row_N.tolist()):
        b, column = divmod(row, 46)
        document = tokens.document_BS[b].tolist()
        ids = tokens.ids_BS[b, document.index(document[column]) : column + 1]
        with torch.no_grad():
            expected = base(ids[None]).logits[0, -1]
        torch.testing.assert_close(logits[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_windows_longer_than_the_sliding_window(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    """Slots lose sight of the first slots of their own window too."""
    folder, tokens, slots = tiny_model_dir(family), two_rows(), 20
    adapter = make_adapter(load(folder), variant="full")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    u = torch.rand(2, 1, slots, generator=torch.Generator().manual_seed(2))
    windows = make_windows(tokens, torch.tensor([[8], [2]]), slots)
    with torch.no_grad():
        inputs = adapter.slot_inputs(u, windows.before(tokens.ids_BS))
        logits = slot_logits(adapter, inputs, windows, capture(adapter.gated, tokens)).view(2, slots, -1)
        for b, start in enumerate((8, 2)):  # both in the first document of their row
            context = tokens.ids_BS[b, :start].tolist()
            expected = reference(base, merged(folder, adapter), inputs[b, 0], context, start - 1)
            torch.testing.assert_close(logits[b], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_continuations_are_read_by_the_base(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    """Windows of tokens that are not the row's: the base's logits after the context and these."""
    folder, tokens = tiny_model_dir(family), two_rows()
    adapter = make_adapter(load(folder), variant="full", slot_zero="plain")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    windows = make_windows(tokens, STARTS, SLOTS)
    other = torch.tensor(random_ids(2 * 4 * SLOTS, 9)).view(2, 4, SLOTS)
    logits = continuation_logits(adapter.gated, other, windows, capture(adapter.gated, tokens)).view(2, 4, SLOTS, -1)
    for b in range(2):
        for w in range(4):
            start, document = int(STARTS[b, w]), tokens.document_BS[b].tolist()
            context = tokens.ids_BS[b, document.index(document[start - 1]) : start]
            with torch.no_grad():
                expected = base(torch.cat((context, other[b, w, :-1]))[None]).logits[0, -SLOTS:]
            torch.testing.assert_close(logits[b, w], expected, rtol=1e-4, atol=1e-4)


def test_an_untrained_slot_zero_without_noise_is_the_base(tiny_model_dir: Callable[[str], Path]) -> None:
    """With the last context token's embedding and E(u) = 0, slot 0 stands in for that token exactly."""
    folder, tokens = tiny_model_dir("llama"), two_rows()
    loaded = load(folder)
    for variant in ("lora", "full"):
        adapter = make_adapter(loaded, variant=variant, trained=False)
        with torch.no_grad():
            adapter.embedding.weight.zero_()
            logits, windows, _ = forward(adapter, tokens, torch.rand(2, 4, SLOTS))
        row_N = (torch.arange(2)[:, None] * 46 + windows.start_BW - 1).flatten()
        expected = capture(adapter.gated, tokens, row_N).logits_NV
        torch.testing.assert_close(logits[:, :, 0].flatten(0, 1), expected, rtol=1e-9, atol=1e-9)


def test_chosen_slots_are_those_of_all(tiny_model_dir: Callable[[str], Path]) -> None:
    tokens = two_rows()
    adapter = make_adapter(load(tiny_model_dir("llama")))
    windows = make_windows(tokens, STARTS, SLOTS)
    inputs = adapter.slot_inputs(torch.rand(2, 4, SLOTS), windows.before(tokens.ids_BS))
    captured = capture(adapter.gated, tokens)
    chosen = windows.counts_BWL.flatten().nonzero()[:, 0]
    assert 0 < len(chosen) < windows.counts_BWL.numel()
    with torch.no_grad():
        every = slot_logits(adapter, inputs, windows, captured)
        torch.testing.assert_close(slot_logits(adapter, inputs, windows, captured, chosen), every[chosen])


def test_slots_do_not_see_later_noise_or_other_windows(tiny_model_dir: Callable[[str], Path]) -> None:
    """Head o: u_l reaches slots l.. of its window; head c: slots l + 1.. ."""
    tokens = two_rows()
    u = torch.rand(2, 4, SLOTS, generator=torch.Generator().manual_seed(2))
    moved = u.clone()
    moved[0, 1, 2] = (u[0, 1, 2] + 0.5) % 1
    heads: list[tuple[Head, int]] = [("o", 2), ("c", 3)]
    for head, first in heads:
        adapter = make_adapter(load(tiny_model_dir("llama")), head=head)
        with torch.no_grad():
            before, after = (forward(adapter, tokens, noise)[0] for noise in (u, moved))
        differs = ~torch.isclose(before, after, rtol=1e-9, atol=1e-9).all(-1)
        expected = torch.zeros_like(differs)
        expected[0, 1, first:] = True
        assert torch.equal(differs, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["lora", "full"])
@pytest.mark.parametrize("head", ["o", "c"])
def test_gradients_reach_adapter_and_embedding_only(
    variant: Variant, head: Head, dtype: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    """Over a bfloat16 base trained weights stay float32, and autocast is switched on."""
    loaded, tokens = load(tiny_model_dir("qwen3"), dtype), two_rows()
    adapter = make_adapter(loaded, variant=variant, head=head)
    logits, windows, captured = forward(adapter, tokens, torch.rand(2, 4, SLOTS))
    chosen = windows.counts_BWL.flatten().nonzero()[:, 0]
    cross_entropy(logits.flatten(0, 2)[chosen], windows.of(tokens.ids_BS).flatten()[chosen]).backward()
    trained = {id(parameter) for parameter in adapter.trainable_parameters()}
    for parameter in adapter.parameters():
        if id(parameter) in trained:
            assert parameter.dtype == torch.float32
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0
        else:
            assert parameter.grad is None
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    assert not any(tensor.requires_grad for pair in captured.kv.values() for tensor in pair)


def test_autocast_of_a_float32_base_stays_near(tiny_model_dir: Callable[[str], Path]) -> None:
    tokens = two_rows()
    u = torch.rand(2, 4, SLOTS, generator=torch.Generator().manual_seed(2))
    for family in ("llama", "gemma2"):
        adapter = make_adapter(load(tiny_model_dir(family), "float32"), variant="full")
        with torch.no_grad():
            exact, _, _ = forward(adapter, tokens, u)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                rough, _, _ = forward(adapter, tokens, u)
        assert torch.isfinite(rough).all()
        assert ((rough.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median() < 0.1


def test_windows_over_padding_are_finite(tiny_model_dir: Callable[[str], Path]) -> None:
    tokens = two_rows()
    adapter = make_adapter(load(tiny_model_dir("gemma2"), "float32"))
    windows = make_windows(tokens, torch.tensor([[44], [45]]), SLOTS)
    assert tokens.document_BS[1, 44] == PADDING
    inputs = adapter.slot_inputs(torch.rand(2, 1, SLOTS), windows.before(tokens.ids_BS))
    with torch.no_grad():
        assert torch.isfinite(slot_logits(adapter, inputs, windows, capture(adapter.gated, tokens))).all()


def test_learns_to_use_the_noise(tiny_model_dir: Callable[[str], Path]) -> None:
    """Tokens that are a plain function of u: a head o learns them, but not one that is not shown u (ln 4 = 1.39)."""
    tokens = two_rows()
    embeddings: list[EmbeddingKind] = ["threshold", "constant"]
    loss_of = {}
    for embedding in embeddings:
        loaded = load(tiny_model_dir("llama"), "float32")
        adapter = make_adapter(loaded, variant="full", trained=False, embedding=embedding)
        windows, captured = make_windows(tokens, STARTS, SLOTS), capture(adapter.gated, tokens)
        optimizer = torch.optim.AdamW(adapter.trainable_parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(200):
            u = torch.rand(2, 4, SLOTS, generator=generator)
            target = 100 + (u * 4).long().flatten()
            logits = slot_logits(adapter, adapter.slot_inputs(u, windows.before(tokens.ids_BS)), windows, captured)
            loss = cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        loss_of[embedding] = sum(losses[-20:]) / 20
    assert loss_of["threshold"] < 0.5
    assert loss_of["constant"] > 1.3
