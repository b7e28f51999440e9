"""The scales that Transformer Engine stores beside the weights, as a module's `_extra_state`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import RecordError
from ...numerics.formats import E4M3, E5M2, FloatFormat
from .pickles import Placeholder, load_pickle, load_torch_bytes
from .stored import Stored

#: where a weight's scale lies among a module's forward scales, and how many there are: X, W and Y of each GEMM in turn
#: (FP8FwdTensors of transformer_engine/pytorch/constants.py; fc1 and fc2 are the two GEMMs of LayerNormMLP)
_SLOTS = {"weight": (1, 3), "fc1_weight": (1, 6), "fc2_weight": (4, 6)}


@dataclass(frozen=True)
class StoredScale:
    """The scale that the next cast of a weight would use."""

    scale: float
    format: FloatFormat
    #: the scale is 1, which the engine begins with, and no amax is in the history
    unset: bool


def weight_scale(state: Any, parameter: str, source: str) -> StoredScale | None:
    """The scale of a module's weight; None where the module stores none (no FP8, or a recipe without stored scales).

    Args:
        state: what the checkpoint holds as the extra state: uint8 bytes of a pickle (Transformer Engine 2), a
            stand-in for io.BytesIO with a torch file in it (1.x), or nothing.
        parameter: last part of the weight's name.
        source: names the checkpoint and the module, for errors.

    Raises:
        RecordError: the state cannot be read without running code, is damaged, or has no known place for this weight.
    """
    found = _decoded(state, source)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise RecordError(f"{source} is damaged: no mapping")
    scale, history = found.get("scale_fwd"), found.get("amax_history_fwd")
    if scale is None:
        return None
    extra = found.get("extra_fp8_variables")
    limit = extra.get("fp8_max_fwd") if isinstance(extra, Mapping) else None
    if not isinstance(scale, torch.Tensor) or not isinstance(history, torch.Tensor):
        raise RecordError(f"{source} is damaged: its scales are no tensors")
    slot, length = _SLOTS.get(parameter, (0, 0))
    if scale.shape != (length,) or history.shape[1:] != (length,):
        raise RecordError(
            f"{source} has {tuple(scale.shape)} forward scales; which is that of `{parameter}` is not known"
            " (in grouped layers it depends on the version of Transformer Engine)"
        )
    fmt = E5M2 if limit == E5M2.max else E4M3
    # An empty history alone says nothing: one of length 1 is emptied by the update that sets the scale.
    unset = float(scale[slot]) == 1 and bool((history[:, slot] == 0).all())
    return StoredScale(float(scale[slot]), fmt, unset)


def _decoded(state: Any, source: str) -> Any:
    if isinstance(state, Stored):
        state = state.read()
        if state.dtype != torch.uint8:
            raise RecordError(f"{source} is damaged: extra state of dtype {state.dtype}")
        data = state.numpy().tobytes()
        return load_pickle(io.BytesIO(data), source) if data else None
    if isinstance(state, Placeholder) and isinstance(state.state, tuple) and isinstance(state.state[0], bytes):
        return load_torch_bytes(state.state[0], source)
    if state is None:
        return None
    raise RecordError(f"{source} is of a kind that Transformer Engine does not write ({type(state).__name__})")
