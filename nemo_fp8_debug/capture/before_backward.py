"""The gradient of a call, looked at right before the function of its autograd node runs: behind all hooks that were there.

Such a hook can still change what the gradient is cast with, after a hook of the tensor has seen it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from .amax_reductions import Reduced
from .dispatcher import Dispatcher


def wait_for_node(dispatcher: Dispatcher, node: Any) -> Callable[[Callable[[Reduced], None]], None]:
    """Return what has a function called once, as a node written in Python is about to run. Does not hold the node.

    To be called as the gradient arrives: hooks run in the order in which they came.
    """
    held = weakref.ref(node)  # which holds the hook of the tensor, which holds this

    def wait(take: Callable[[Reduced], None]) -> None:
        waiting, node = [take], held()

        def last(*_: Any) -> None:
            while waiting:
                waiting.pop()(())  # nothing is reduced before the node runs

        if node is None:
            last()
        else:
            dispatcher.watch_node(node, nullcontext, before=last)

    return wait
