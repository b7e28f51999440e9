"""Real Transformer Engine on a CPU: its Python as it is, its kernels emulated, every cast written down.

    from emulated_te import CASTS, casts_of, te

It stands in for the GPU for the rest of the process, so it belongs into a process of its own.
"""

from __future__ import annotations

from typing import Any

from .casts import ATTENTION_CASTS, CASTS, MODULES, Cast, casts_of, scales_of
from .stubs import import_te, pretend_a_gpu

__all__ = ["ATTENTION_CASTS", "CASTS", "Cast", "casts_of", "scales_of", "te"]

pretend_a_gpu()
te: Any = import_te()

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule  # noqa: E402

from . import kernels  # noqa: E402, F401

_init = TransformerEngineBaseModule.__init__


def _init_and_remember(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    MODULES.add(self)


TransformerEngineBaseModule.__init__ = _init_and_remember
