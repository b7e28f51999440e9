"""Which tensors of a checkpoint are weights of GEMMs, what they are called, and what scales are stored for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ...core.layer_names import strip_wrappers
from ...errors import RecordError
from ...numerics.formats import E4M3, E5M2, FloatFormat
from .contents import CheckpointEntry, Contents
from .pickles import Placeholder, has_values, load_pickle, load_torch_bytes

#: where Megatron leaves out the number of a layer or of an expert, and stacks them along a leading axis instead
_STACKED_LAYERS = re.compile(r"((?:^|\.)layers\.)(?!\d)")
_STACKED_EXPERTS = re.compile(r"(.*(?:^|\.)experts\.)(?!\d|local_experts\.)")

#: a weight's own name in its module: nn.Linear and most others; Transformer Engine's grouped layer; its LayerNormMLP;
#: Megatron's grouped MLP; stacked experts of Hugging Face's models
_LEAVES = re.compile(r"weight\d*|fc[12]_weight|gate_up_proj|gate_proj|up_proj|down_proj")
_EMBEDDINGS = re.compile(r"embed|(^|\.)(wte|wpe)\.")
_OUTPUT_LAYERS = re.compile(r"(^|\.)embed_out\.")  # GPT-NeoX's name for what others call lm_head
_ROUTERS = re.compile(r"(^|\.)(router|gate)\.[^.]*$")
_OPTIMIZER = re.compile(r"optim")
#: Megatron saves the state of an expert in a grouped layer and of one that is a layer of its own under the same name
_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
#: suffixes of the tensor that an FP8 weight is to be multiplied by: DeepSeek's (an inverse in name), compressed-tensors'
_SCALES = ("_scale_inv", "_scale")


@dataclass(frozen=True)
class WeightPart:
    """A matrix of a weight's values, or some of its rows or columns."""

    open: Callable[[], torch.Tensor]
    #: where in the stored tensor, along its leading axes
    index: tuple[int, ...]

    def find(self) -> torch.Tensor:
        """Return the values, which may still lie in a mapped file."""
        return self.open()[self.index]


@dataclass(frozen=True)
class Weight:
    """One weight matrix of one GEMM."""

    #: as in the model, without the final `.weight`
    name: str
    #: last part of the parameter's name, as `weight` or `fc1_weight`
    parameter: str
    dtype: torch.dtype
    #: [rows, columns]
    shape: tuple[int, int]
    parts: tuple[WeightPart, ...]
    #: key of the module's extra state, where the checkpoint has one
    extra_state: str | None
    #: of an FP8 weight: the tensor to multiply it by
    scale: WeightPart | None = None
    #: one of several that its module may hold
    expert: bool = False


def find_weights(contents: Contents) -> tuple[list[Weight], Counter[str]]:
    """The GEMM weights of a checkpoint in its order, and how many tensors were left out, by kind."""
    states = {module_of_state(key): key for key in contents.extra_states}
    scales = {name + suffix for name in contents.tensors for suffix in _SCALES}
    weights: list[Weight] = []
    left_out: Counter[str] = Counter()
    for name, entry in contents.tensors.items():
        if name in scales:
            continue
        path = strip_wrappers(name)
        axes = _stacked_axes(path, entry)
        if entry.dtype in FP8_DTYPES and contents.lost & {name + suffix for suffix in _SCALES}:
            left_out["in FP8, with their scales lost"] += 1
            continue
        if why := _no_gemm(path, len(entry.shape) - len(axes), entry.dtype):
            left_out[why] += 1
        else:
            weights += _unstack(path, axes, entry, states, _scale_of(name, contents.tensors))
    return weights, left_out


def _no_gemm(path: str, dimensions: int, dtype: torch.dtype) -> str | None:
    """Why a tensor is not the weight of a GEMM; None if it is."""
    if _OPTIMIZER.match(path):
        return "of the optimizer"
    if not _OUTPUT_LAYERS.search(path) and _EMBEDDINGS.search(path):
        return "embeddings"
    if _ROUTERS.search(path):
        return "routers"
    if dimensions != 2 or not _LEAVES.fullmatch(path.rpartition(".")[2]):
        return "norms, biases and others"
    return None if dtype in DTYPES else f"of dtype {str(dtype).removeprefix('torch.')}"


def _stacked_axes(path: str, entry: CheckpointEntry) -> list[re.Pattern[str]]:
    """What the leading axes of a tensor count: layers, experts, both or neither."""
    axes = [_STACKED_LAYERS] if _STACKED_LAYERS.search(path) else []
    if _STACKED_EXPERTS.search(path) and len(entry.shape) - len(axes) == 3:
        axes.append(_STACKED_EXPERTS)
    return axes


def _numbered(path: str, axes: list[re.Pattern[str]], index: tuple[int, ...]) -> str:
    for pattern, i in zip(axes, index, strict=True):
        path = pattern.sub(rf"\g<1>{i}.", path, count=1)
    return path


def module_of_state(key: str) -> str:
    """The module an extra state belongs to: `decoder.layers.mlp.linear_fc1._extra_state/shard_3_4` is of layer 3 of 4.

    Megatron's form: `ShardedObject.unique_key` in megatron/core/dist_checkpointing/mapping.py.
    """
    name, _, shard = key.partition("/shard_")
    path = strip_wrappers(name).rpartition(".")[0] + "."
    index = tuple(int(i) for i in shard.partition("_")[0].split(".") if i.isdigit())
    axes = [p for p in (_STACKED_LAYERS, _STACKED_EXPERTS) if p.search(path)]
    if len(axes) > len(index):
        axes = axes[: len(index)]
    return _numbered(path, axes, index[: len(axes)]).removesuffix(".")


def _unstack(
    path: str, axes: list[re.Pattern[str]], entry: CheckpointEntry, states: Mapping[str, str], scale: CheckpointEntry | None
) -> Iterator[Weight]:
    """The matrices that a tensor stacks, each with its share of the pieces."""
    parts: dict[tuple[int, ...], list[WeightPart]] = {}
    for piece in entry.pieces:
        for index in product(*(range(n) for n in piece.shape[: len(axes)])):
            whole = tuple(o + i for o, i in zip(piece.offsets, index, strict=False))
            parts.setdefault(whole, []).append(WeightPart(piece.open, index))
    for whole, found in parts.items():
        numbered = _numbered(path, axes, whole)
        parameter = numbered.rpartition(".")[2]
        yield Weight(
            name=numbered.removesuffix(".weight"),
            parameter=parameter,
            dtype=entry.dtype,
            shape=(entry.shape[-2], entry.shape[-1]),
            parts=tuple(found),
            extra_state=states.get(numbered.rpartition(".")[0]),
            scale=None if scale is None else _scale_at(scale, whole),
            expert=bool(_EXPERT.search(numbered)),
        )


def _scale_of(name: str, tensors: Mapping[str, CheckpointEntry]) -> CheckpointEntry | None:
    found = (tensors.get(name + suffix) for suffix in _SCALES)
    return next((entry for entry in found if entry is not None and len(entry.pieces) == 1), None)


def _scale_at(scale: CheckpointEntry, index: tuple[int, ...]) -> WeightPart:
    """The scale of one of the stacked weights, where there is one for each."""
    stacked = len(scale.shape) > len(index) and all(i < n for i, n in zip(index, scale.shape, strict=False))
    return WeightPart(scale.pieces[0].open, index if index and stacked else ())


# --- the scales that Transformer Engine stores, as a module's `_extra_state` ----------------------------------------------

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
    if not all(has_values(each) and each.is_floating_point() for each in (scale, history)):
        raise RecordError(f"{source} is damaged: its scales are no numbers")
    slot, length = _SLOTS.get(parameter, (0, 0))
    if scale.shape != (length,) or history.shape[1:] != (length,):
        raise RecordError(
            f"{source} has {tuple(scale.shape)} forward scales; which is that of `{parameter}` is not known"
            " (in grouped layers it depends on the version of Transformer Engine)"
        )
    fmt = E5M2 if isinstance(limit, float | int) and limit == E5M2.max else E4M3
    # An empty history alone says nothing: one of length 1 is emptied by the update that sets the scale.
    unset = float(scale[slot]) == 1 and bool((history[:, slot] == 0).all())
    return StoredScale(float(scale[slot]), fmt, unset)


def _decoded(state: Any, source: str) -> Any:
    if isinstance(state, torch.Tensor):
        if state.dtype != torch.uint8 or not has_values(state):
            raise RecordError(f"{source} is damaged: extra state of dtype {state.dtype}, layout {state.layout}")
        data = state.numpy().tobytes()
        return load_pickle(data, source) if data else None
    if (
        isinstance(state, Placeholder)
        and isinstance(state.state, tuple)
        and state.state
        and isinstance(state.state[0], bytes)
    ):
        return load_torch_bytes(state.state[0], source)
    if state is None:
        return None
    raise RecordError(f"{source} is of a kind that Transformer Engine does not write ({type(state).__name__})")
