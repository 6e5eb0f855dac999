"""Windows against loops that read the definition (algorithms.md section 8) slot by slot."""

from __future__ import annotations

import pytest
import torch

from pipeline.adapter_config import SlotZero
from tests.workers.ptp.makers import packed
from workers.ptp.windows import PackedTokens, choose_starts, context_mask, is_start, make_windows

END = 2
TOKENS = packed(
    [
        [([5, 6, 7], False), ([8, 9, END], True), ([10, 11], False), ([12, 13, 14, 15], True)],
        [([16], False), ([17, END, 18, 19, 20, 21, 22, 23], True), ([24, 25], False)],
        [([26, 27], False)],
    ],
    columns=13,
    end=END,
)


def counts(tokens: PackedTokens, row: int, start: int, slots: int) -> list[bool]:
    """Slot by slot: the target exists, is of the context's document, was sampled, and no sample ended before it."""
    document, result, going = tokens.document_BS[row].tolist(), [], True
    for column in range(start, start + slots):
        going = going and column < len(document) and document[column] == document[start - 1] != -1
        going = going and bool(tokens.sampled_BS[row, column])
        if column > start:
            going = going and not bool(tokens.ends_BS[row, column - 1])
        result.append(going)
    return result


def test_worked_example() -> None:
    tokens = packed([[([5, 6], False), ([7, 8], False), ([9, 10, 11], True)]], columns=8)
    assert tokens.document_BS.tolist() == [[0, 0, 1, 1, 1, 1, 1, -1]]
    assert tokens.position_BS[0, :7].tolist() == [0, 1, 0, 1, 2, 3, 4]
    windows = make_windows(tokens, torch.tensor([[4]]), 3)
    assert windows.position_BWL.tolist() == [[[1, 2, 3]]]
    assert windows.of(tokens.ids_BS).tolist() == [[[9, 10, 11]]]
    assert windows.before(tokens.ids_BS).tolist() == [[8]]
    assert windows.counts_BWL.tolist() == [[[True, True, True]]]
    assert context_mask(tokens, windows, "context_token").nonzero()[:, 2].tolist() == [2]
    assert context_mask(tokens, windows, "plain").nonzero()[:, 2].tolist() == [2, 3]


def test_slots_that_count_at_every_start() -> None:
    every = torch.arange(1, 13).expand(3, -1)
    windows = make_windows(TOKENS, every, 4)
    expected = [[counts(TOKENS, row, start, 4) for start in range(1, 13)] for row in range(3)]
    assert windows.counts_BWL.tolist() == expected
    assert windows.counts_BWL.any()
    assert torch.equal(is_start(TOKENS)[:, 1:], windows.counts_BWL[..., 0])
    assert not is_start(TOKENS)[:, 0].any()


def test_the_end_token_counts_and_nothing_behind_it() -> None:
    windows = make_windows(TOKENS, torch.tensor([[4], [1], [1]]), 4)
    assert windows.counts_BWL[:, 0].tolist() == [[True, True, False, False], [True, True, False, False], [False] * 4]


def test_a_window_at_the_very_start_sees_itself_alone() -> None:
    windows = make_windows(TOKENS, torch.tensor([[1], [1], [1]]), 2)
    assert windows.position_BWL.tolist() == [[[0, 1]]] * 3
    assert not context_mask(TOKENS, windows, "context_token").any()
    assert context_mask(TOKENS, windows, "plain").nonzero().tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


@pytest.mark.parametrize("slot_zero", ["context_token", "plain"])
def test_context_is_the_own_document_before_the_window(slot_zero: SlotZero) -> None:
    every = torch.arange(1, 13).expand(3, -1)
    sees = context_mask(TOKENS, make_windows(TOKENS, every, 3), slot_zero)
    for row in range(3):
        document = TOKENS.document_BS[row].tolist()
        for start in range(1, 13):
            end = start - 1 if slot_zero == "context_token" else start
            expected = [c < end and document[c] == document[start - 1] != -1 for c in range(13)]
            assert sees[row, start - 1].tolist() == expected


def test_starts_are_different_and_possible_as_long_as_there_are_any() -> None:
    starts = choose_starts(TOKENS, 5, torch.Generator().manual_seed(0))
    possible = is_start(TOKENS)
    assert starts.shape == (3, 5)
    assert (starts >= 1).all()
    for row in range(3):
        chosen = [s for s in starts[row].tolist() if possible[row, s]]
        assert len(set(chosen)) == len(chosen) == min(5, int(possible[row].sum()))
        assert starts[row].tolist() == sorted(starts[row].tolist())
    assert not make_windows(TOKENS, starts, 2).counts_BWL[2].any()


def test_starts_are_even_and_repeatable() -> None:
    generator = torch.Generator().manual_seed(0)
    many = torch.cat([choose_starts(TOKENS, 1, generator)[1] for _ in range(2000)])
    share = many.bincount(minlength=13)[1:9] / 2000
    torch.testing.assert_close(share, torch.full((8,), 1 / 8), atol=0.03, rtol=0.0)
    first, second = (choose_starts(TOKENS, 4, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)


def test_first_slots_are_the_same_windows() -> None:
    every = torch.arange(1, 13).expand(3, -1)
    cut, expected = make_windows(TOKENS, every, 4).first_slots(2), make_windows(TOKENS, every, 2)
    assert torch.equal(cut.counts_BWL, expected.counts_BWL)
    assert torch.equal(cut.position_BWL, expected.position_BWL)
    assert torch.equal(cut.of(TOKENS.ids_BS), expected.of(TOKENS.ids_BS))
