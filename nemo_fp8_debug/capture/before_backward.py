"""The gradient of a call, looked at right before the function of its autograd node runs: behind all hooks that were there.

Such a hook can still change what the gradient is cast with, after a hook of the tensor has seen it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .amax_reductions import Reduced


class BeforeBackward:
    """Waits until the function of an autograd node that is written in Python is about to run. Does not hold the node."""

    def __init__(self, node: Any) -> None:
        self._node = weakref.ref(node)  # which holds the hook of the tensor, which holds this

    def wait(self, take: Callable[[Reduced], None]) -> None:
        """Have `take` called, once. To be called as the gradient arrives: hooks run in the order in which they came."""
        waiting, node = [take], self._node()

        def last(*_: Any) -> None:
            while waiting:
                waiting.pop()(())  # nothing is reduced before the node runs

        if node is None:
            last()
        else:
            node.register_prehook(last)
