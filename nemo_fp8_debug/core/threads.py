"""Work on several cores at once, in order and with no more than a few results waiting."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ahead(do: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """`do` of each item, in order: as many at once as there are cores, and no more than that done and not yet taken.

    Example:
        >>> list(ahead(abs, [-2, 3, -1]))
        [2, 3, 1]
    """
    if len(items) < 2:
        yield from map(do, items)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(cores()) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(do, item))
                if len(waiting) > cores():
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
