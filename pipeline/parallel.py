"""Many small reads at once, their results in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

THREADS = 16
_AHEAD = 4 * THREADS


def in_order(function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """`map` in a few threads. What fails raises in its turn, so of several errors the first in order counts.

    At most 64 results are waiting at a time, and none is begun any more once the iterator has ended or raised.
    """
    remaining = iter(items)
    waiting: deque[Future[B]] = deque()
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reader")
    try:
        waiting.extend(pool.submit(function, item) for item in itertools.islice(remaining, _AHEAD))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in itertools.islice(remaining, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
