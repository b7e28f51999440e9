"""Keeps operators of the monitor from the dispatch modes of a run, such as those of selective checkpoints. Internal.

These keep the outputs of operators in a forward and hand them out, in order, as it is done again. What a hook computes in
between would be handed to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _python_dispatch

_NONE: Sequence[Any] = ()


def leave_modes() -> Sequence[Any]:
    """Leave the modes that are entered, in this thread; for `enter_again`. Those of tracing remain, and with them others."""
    modes: Sequence[Any] = _python_dispatch._get_current_dispatch_mode_stack()
    if not modes or any(getattr(mode, "_mode_key", None) is not None for mode in modes):
        return _NONE
    return [_python_dispatch._pop_mode() for _ in modes]


def enter_again(modes: Sequence[Any]) -> None:
    """Enter them as they were."""
    for mode in reversed(modes):
        _python_dispatch._push_mode(mode)
