"""Prompts that begin alike are prefilled once: system prompts, few-shot heads, and the samples of one prompt.

A radix tree holds the prompts of all samples that wait or run. A node is a run of tokens that the same prompts have in
common; it branches between blocks of 32 tokens, and tokens are compared, never hashes alone. The keys and values of a
node come from the slot of a running sample (a holder), or, once the last holder left, from a part that was kept since
more than one prompt asked for it. Prompts that share nothing cost no copy.

Worked example, blocks of 2, prompts abcdef|x, abcdgh|y, abcd|z (a prompt's last token is never cached: its logits are
wanted): the tree is abcd -> (ef, gh), and the third prompt ends in the inner node.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.kv_cache import KVCache, Slot
from workers.sequence import Sequence

BLOCK = 8
"""Tokens of a block: prompts are told apart between blocks only, which keeps the tree and its copies coarse. Small
enough that what a chat template puts before every message is shared."""

_WORTH_WAITING = 64
"""Tokens that a sample waits a step for, if another one is computing them."""

_WHOLE_PROMPT = 2**62
_BUDGET_SHARE = 4
"""Kept prefixes may take one part in so many of the KV budget, while nobody else needs it."""


@dataclass(slots=True, eq=False)
class _Node:
    """The prefix of `end` tokens that the parent's prefix and `tokens` make.

    `live` samples that begin with it wait or run; `asked` prompts came with it; the slots of `holders` (an ordered
    set) hold it, or will when their prefill is through. `part` is the number of the kept keys and values of `tokens`;
    where a node has them, all its ancestors have.
    """

    parent: _Node | None
    tokens: tuple[int, ...]
    end: int
    live: int = 0
    asked: int = 0
    holders: dict[Sequence, None] = field(default_factory=dict)
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    part: int | None = None

    @property
    def start(self) -> int:
        return self.end - len(self.tokens)

    def holder(self) -> Sequence | None:
        """A running sample that has computed this prefix."""
        return next((s for s in self.holders if s.num_cached >= self.end), None)


class PrefixCache:
    """Finds, lends and keeps the keys and values of prompt prefixes.

    `share_parts=False`: only equal prompts share, and nothing is kept. `saved_tokens` counts the prompt tokens that
    were copied instead of computed.
    """

    def __init__(self, cache: KVCache, *, share_parts: bool = True) -> None:
        self.cache = cache
        self.saved_tokens = 0
        self._block = BLOCK if share_parts else _WHOLE_PROMPT
        self._limit_bytes = cache.budget_bytes // _BUDGET_SHARE if share_parts else 0
        self._part_numbers = itertools.count()
        self._root = _Node(None, (), 0)
        self._leaves: dict[Sequence, _Node] = {}
        # Oldest first. A path is touched from its leaf to the root, so an ancestor is never older than a descendant.
        self._kept: OrderedDict[_Node, None] = OrderedDict()

    def add(self, samples: Seq[Sequence]) -> None:
        """The samples of one prompt begin to wait."""
        leaf = self._find_or_add(samples[0].request.prompt_ids[:-1])
        self._leaves.update(dict.fromkeys(samples, leaf))
        for node in _path(leaf):
            node.asked += 1
            node.live += len(samples)

    def discard(self, sequence: Sequence) -> None:
        """A sample is gone for good; it holds no slot any more."""
        leaf = self._leaves.pop(sequence)
        for node in _path(leaf):
            node.live -= 1
        self._prune(leaf)

    def load(self, sequence: Sequence) -> None:
        """A sample was given an empty slot: copy the longest prefix of its prompt that is at hand."""
        slot, path = sequence.slot, _path(self._leaves[sequence])
        assert slot is not None
        columns, holder = _at_hand(path)
        if holder is not None:
            assert holder.slot is not None
            self.cache.copy(holder.slot, slot, columns)
        else:
            for node in path:
                if node.end <= columns:
                    assert node.part is not None
                    self.cache.storage.load(node.part, slot.place, node.start)
            slot.used = columns
        self._touch(path)
        self.saved_tokens += columns
        self.hold(sequence)

    def is_worth_waiting(self, sequence: Sequence) -> bool:
        """Whether a sample that runs is computing so much of this one's prompt that to wait saves more than it costs:
        all of it, or much of it in tokens and in proportion.
        """
        path = _path(self._leaves[sequence])
        coming = max((node.end for node in path if node.holders), default=0)
        gain = coming - _at_hand(path)[0]
        length = sequence.context.prompt_length
        return gain > 0 and (coming == length - 1 or (gain >= _WORTH_WAITING and 4 * gain > length))

    def hold(self, sequence: Sequence) -> None:
        """A sample's slot holds its prompt, or will."""
        for node in _path(self._leaves[sequence]):
            node.holders[sequence] = None

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """A sample is about to lose its slot. With `keep`, its prompt is cached whole, and what other prompts begin
        with too is kept unless another slot holds it.
        """
        path = _path(self._leaves[sequence])
        for node in path:
            node.holders.pop(sequence, None)
        shared = [node for node in path if node.asked > 1]
        if keep and shared and not shared[-1].holders:
            assert sequence.slot is not None
            self._keep(sequence.slot, shared)

    def evict(self) -> bool:
        """Give up the prefix that was not used for the longest time; False when none is kept."""
        if not self._kept:
            return False
        node, _ = self._kept.popitem(last=False)
        self.cache.reserved_bytes -= self._bytes(node)
        assert node.part is not None
        self.cache.storage.drop(node.part)
        node.part = None
        self._prune(node)
        return True

    def _find_or_add(self, tokens: tuple[int, ...]) -> _Node:
        """The node in which these tokens end."""
        node = self._root
        while node.end < len(tokens):
            rest = tokens[node.end :]
            child = node.children.setdefault(rest[: self._block], _Node(node, rest, len(tokens)))
            node = self._split(child, self._common(child.tokens, rest))
        return node

    def _common(self, a: tuple[int, ...], b: tuple[int, ...]) -> int:
        """Length of the common beginning in whole blocks; a last, shorter block counts when both end with it."""
        for at in range(0, len(a), self._block):
            if a[at : at + self._block] != b[at : at + self._block]:
                return at
        return len(a)

    def _split(self, lower: _Node, length: int) -> _Node:
        """Cut a node after `length` tokens; returns the upper part. The node itself becomes the lower one, so that
        samples whose prompts end in it need not know.
        """
        if length == len(lower.tokens):
            return lower
        parent, first = lower.parent, lower.tokens[: self._block]
        assert parent is not None
        upper = _Node(parent, lower.tokens[:length], lower.start + length, lower.live, lower.asked, dict(lower.holders))
        if lower.part is not None:
            upper.part = next(self._part_numbers)
            self.cache.storage.cut(lower.part, length, upper.part)
        lower.parent, lower.tokens = upper, lower.tokens[length:]
        upper.children[lower.tokens[: self._block]] = lower
        parent.children[first] = upper
        if upper.part is not None:
            self._kept[upper] = None
            self._touch(_path(upper))
        return upper

    def _keep(self, slot: Slot, path: Seq[_Node]) -> None:
        """Copy what is not kept yet out of a slot, if there is room without giving up a part of the path itself."""
        self._touch(path)
        missing = [node for node in path if node.part is None]
        needed = sum(map(self._bytes, missing))
        while needed > self._free_bytes():
            if not self._kept or next(iter(self._kept)) in path:
                return
            self.evict()
        for node in missing:
            node.part = next(self._part_numbers)
            self.cache.storage.keep(node.part, slot.place, node.start, node.end)
            self._kept[node] = None
        self.cache.reserved_bytes += needed
        self._touch(path)

    def _free_bytes(self) -> int:
        return min(self._limit_bytes - self.cache.reserved_bytes, self.cache.free_bytes)

    def _bytes(self, node: _Node) -> int:
        return len(node.tokens) * self.cache.shape.bytes_per_token

    def _touch(self, path: Seq[_Node]) -> None:
        for node in reversed(path):
            if node.part is not None:
                self._kept.move_to_end(node)

    def _prune(self, node: _Node) -> None:
        """Remove a node that nobody needs, and its ancestors of which that is then true too."""
        while node.parent is not None and not (node.live or node.children or node.part is not None):
            del node.parent.children[node.tokens[: self._block]]
            node = node.parent


def _path(leaf: _Node) -> list[_Node]:
    """The nodes from below the root to `leaf`."""
    path = []
    node = leaf
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _at_hand(path: Seq[_Node]) -> tuple[int, Sequence | None]:
    """Length of the longest prefix that can be copied, and the running sample to copy it from (None: kept tensors)."""
    columns, source, is_kept = 0, None, True
    for node in path:
        holder = node.holder()
        is_kept = is_kept and node.part is not None
        if holder is None and not is_kept:
            break
        columns, source = node.end, holder
    return columns, source
