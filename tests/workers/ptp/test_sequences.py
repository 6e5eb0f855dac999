"""Packing and the order of training data, on documents that say where they come from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError
from workers.ptp.documents import Document, Wanted, is_held_out
from workers.ptp.sequences import PackedStream


class Numbered:
    """Unit u holds documents of lengths that vary; token i of document d is 100 d + i."""

    has_edges = True

    def __init__(self, lengths: list[list[int]], *, splits_long: bool = False) -> None:
        self.lengths, self.units, self.splits_long = lengths, len(lengths), splits_long
        self.reads = 0

    def read(self, unit: int, wanted: Wanted) -> Iterator[Document]:
        self.reads += 1
        for i, length in enumerate(self.lengths[unit]):
            number = 10 * unit + i
            if wanted(str(number)):
                ids = 100 * number + np.arange(length)
                yield Document(ids, np.arange(length) >= 2, ids / 1e6, ids / 1e6 + 1e-7)


def stream_of(source: Numbered, length: int = 12, seed: int = 0, wanted: Wanted = lambda row: True) -> PackedStream:
    return PackedStream(source, length, seed, wanted, frozenset({4}))


MANY = [[5, 7, 3, 12, 4] for _ in range(6)]


def test_documents_lie_whole_beside_each_other_with_their_edges() -> None:
    batch = stream_of(Numbered(MANY)).take(40)
    tokens = batch.tokens
    assert batch.low_BS is not None
    for b in range(40):
        for number in range(int(tokens.document_BS[b].max()) + 1):
            columns = (tokens.document_BS[b] == number).nonzero()[:, 0]
            ids = tokens.ids_BS[b, columns]
            assert torch.equal(ids - ids[0], torch.arange(len(ids)))  # consecutive, from the document's start
            assert ids[0] % 100 == 0
            torch.testing.assert_close(batch.low_BS[b, columns], ids.double() / 1e6)
            assert tokens.sampled_BS[b, columns].tolist() == [i >= 2 for i in range(len(ids))]
    assert (tokens.document_BS == -1).float().mean() < 0.1  # little padding
    assert torch.equal(tokens.ends_BS, (tokens.ids_BS == 4) & tokens.sampled_BS)


def test_every_document_comes_once_an_epoch_in_an_order_that_the_seed_decides() -> None:
    def numbers(seed: int) -> list[int]:
        stream = stream_of(Numbered([[12] * 5 for _ in range(6)]), seed=seed)
        return [int(row[0]) // 100 for row in stream.take(60).tokens.ids_BS]

    first = numbers(0)
    everything = sorted(10 * unit + i for unit in range(6) for i in range(5))
    assert sorted(first[:30]) == sorted(first[30:]) == everything
    assert first == numbers(0)
    assert first != numbers(1)
    assert first[:30] != first[30:]


def test_long_documents_are_split_or_cut() -> None:
    split = stream_of(Numbered([[30]], splits_long=True)).take(3).tokens
    assert sorted(int(row[0]) for row in split.ids_BS) == [0, 12, 24]
    cut = stream_of(Numbered([[30]])).take(3).tokens
    assert [int(row[0]) for row in cut.ids_BS] == [0, 0, 0]


def test_sequences_that_follow_each_other_are_parts_of_different_documents() -> None:
    """Also all parts come once an epoch, and those of a document that is alone come in no order."""
    lengths = [[96] * 10 for _ in range(4)]
    ids = stream_of(Numbered(lengths, splits_long=True)).take(320).tokens.ids_BS[:, 0]
    assert sorted(ids.tolist()) == sorted(100 * number + 12 * i for number in _numbers(lengths) for i in range(8))
    different = [len({int(x) // 100 for x in ids[i : i + 8]}) for i in range(0, 320, 8)]
    assert sum(different) / len(different) > 6  # 7.3 of 8 if drawn evenly from 40 documents
    alone = stream_of(Numbered([[96]], splits_long=True)).take(8).tokens.ids_BS[:, 0].tolist()
    assert sorted(alone) == [12 * i for i in range(8)] != alone


def _numbers(lengths: list[list[int]]) -> list[int]:
    return [10 * unit + i for unit, documents in enumerate(lengths) for i in range(len(documents))]


LONG = [[5, 30, 47], [25, 3, 60]]


@pytest.mark.parametrize("taken", [1, 7, 33])
@pytest.mark.parametrize(("lengths", "splits_long"), [(MANY, False), (LONG, True)])
def test_a_saved_state_goes_on_with_the_same_sequences(taken: int, lengths: list[list[int]], splits_long: bool) -> None:
    stream = stream_of(Numbered(lengths, splits_long=splits_long))
    stream.take(taken)
    state = stream.state()
    expected = stream.take(20)
    again = stream_of(Numbered(lengths, splits_long=splits_long))
    again.load_state(state)
    found = again.take(20)
    assert torch.equal(found.tokens.ids_BS, expected.tokens.ids_BS)
    assert torch.equal(found.tokens.document_BS, expected.tokens.document_BS)
    assert found.low_BS is not None
    assert torch.equal(found.low_BS.nan_to_num(), torch.as_tensor(expected.low_BS).nan_to_num())


def test_held_out_rows_are_never_trained_on() -> None:
    source = Numbered([[12] * 10 for _ in range(10)])
    sides = [lambda row: is_held_out(row, 0.3), lambda row: not is_held_out(row, 0.3)]
    held_out, trained = (
        {int(row[0]) for row in stream_of(source, wanted=side).take(200).tokens.ids_BS} for side in sides
    )
    assert not held_out & trained
    assert len(held_out | trained) == 100
    assert 15 <= len(held_out) <= 45


@pytest.mark.parametrize("lengths", [[[1, 2]], [[]]])
def test_too_few_rows_are_told(lengths: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="data must hold rows to train on"):
        stream_of(Numbered(lengths)).take(1)
