"""Find the GEMM weights of a checkpoint, their names, and their stored scales."""

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
from .contents import CheckpointContents, CheckpointTensor
from .pickles import UnloadedObject, load_pickle, load_torch_bytes, stores_every_value

#: match names without a layer or expert number. Megatron gives such names to layers or experts stacked along a leading axis
_STACKED_LAYERS = re.compile(r"((?:^|\.)layers\.)(?!\d)")
_STACKED_EXPERTS = re.compile(r"(.*(?:^|\.)experts\.)(?!\d|local_experts\.)")

#: names of weights in their modules: nn.Linear, Transformer Engine's grouped layer and LayerNormMLP, Megatron's grouped MLP,
#: and stacked experts of Hugging Face's models
_LEAVES = re.compile(r"weight\d*|fc[12]_weight|gate_up_proj|gate_proj|up_proj|down_proj")
_EMBEDDINGS = re.compile(r"embed|(^|\.)(wte|wpe)\.")
_OUTPUT_LAYERS = re.compile(r"(^|\.)embed_out\.")  # GPT-NeoX's name for the layer that other models call lm_head
_ROUTERS = re.compile(r"(^|\.)(router|gate)\.[^.]*$")
_OPTIMIZER = re.compile(r"optim")
#: Megatron uses this name for the state of an expert both in a grouped layer and in a separate layer
_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
#: suffixes of the scale by which to multiply an FP8 weight: in DeepSeek's checkpoints, and in those of compressed-tensors
_SCALES = ("_scale_inv", "_scale")


@dataclass(frozen=True)
class WeightPart:
    """A weight matrix, or some of its rows or columns."""

    open: Callable[[], torch.Tensor]
    #: index in the stored tensor, along its leading axes
    index: tuple[int, ...]

    def load_values(self) -> torch.Tensor:
        """Return the values. They may still be in a memory-mapped file."""
        return self.open()[self.index]


@dataclass(frozen=True)
class GemmWeight:
    """One weight matrix of one GEMM."""

    #: name in the model, without the final `.weight`
    name: str
    #: last part of the parameter's name, such as `weight` or `fc1_weight`
    parameter: str
    dtype: torch.dtype
    #: [rows, columns]
    shape: tuple[int, int]
    parts: tuple[WeightPart, ...]
    #: key of the module's extra state, if the checkpoint has one
    extra_state: str | None
    #: tensor to multiply an FP8 weight by
    scale: WeightPart | None = None
    #: whether this is the weight of an expert, whose module may have several weights
    expert: bool = False


def find_gemm_weights(contents: CheckpointContents) -> tuple[list[GemmWeight], Counter[str]]:
    """Return the GEMM weights of a checkpoint in order, and the number of other tensors by kind."""
    states = {module_of_state(key): key for key in contents.extra_states}
    scales = {name + suffix for name in contents.tensors for suffix in _SCALES}
    weights: list[GemmWeight] = []
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
    """Return the reason if a tensor is not the weight of a GEMM, otherwise None."""
    if _OPTIMIZER.match(path):
        return "of the optimizer"
    if not _OUTPUT_LAYERS.search(path) and _EMBEDDINGS.search(path):
        return "embeddings"
    if _ROUTERS.search(path):
        return "routers"
    if dimensions != 2 or not _LEAVES.fullmatch(path.rpartition(".")[2]):
        return "norms, biases and others"
    return None if dtype in DTYPES else f"of dtype {str(dtype).removeprefix('torch.')}"


def _stacked_axes(path: str, entry: CheckpointTensor) -> list[re.Pattern[str]]:
    """Return the meaning of a tensor's leading axes: layers, experts, both, or no leading axes."""
    axes = [_STACKED_LAYERS] if _STACKED_LAYERS.search(path) else []
    if _STACKED_EXPERTS.search(path) and len(entry.shape) - len(axes) == 3:
        axes.append(_STACKED_EXPERTS)
    return axes


def _numbered(path: str, axes: list[re.Pattern[str]], index: tuple[int, ...]) -> str:
    for pattern, i in zip(axes, index, strict=True):
        path = pattern.sub(rf"\g<1>{i}.", path, count=1)
    return path


def module_of_state(key: str) -> str:
    """Return the module of an extra state: `decoder.layers.mlp.linear_fc1._extra_state/shard_3_4` belongs to layer 3 of 4.

    Megatron builds such keys in `ShardedObject.unique_key` of megatron/core/dist_checkpointing/mapping.py.
    """
    name, _, shard = key.partition("/shard_")
    path = strip_wrappers(name).rpartition(".")[0] + "."
    index = tuple(int(i) for i in shard.partition("_")[0].split(".") if i.isdigit())
    axes = [p for p in (_STACKED_LAYERS, _STACKED_EXPERTS) if p.search(path)]
    if len(axes) > len(index):
        axes = axes[: len(index)]
    return _numbered(path, axes, index[: len(axes)]).removesuffix(".")


def _unstack(
    path: str,
    axes: list[re.Pattern[str]],
    entry: CheckpointTensor,
    states: Mapping[str, str],
    scale: CheckpointTensor | None,
) -> Iterator[GemmWeight]:
    """Yield the matrices that are stacked in a tensor, each with its own pieces."""
    parts: dict[tuple[int, ...], list[WeightPart]] = {}
    for piece in entry.pieces:
        for index in product(*(range(n) for n in piece.shape[: len(axes)])):
            whole = tuple(o + i for o, i in zip(piece.offsets, index, strict=False))
            parts.setdefault(whole, []).append(WeightPart(piece.open, index))
    for whole, found in parts.items():
        numbered = _numbered(path, axes, whole)
        parameter = numbered.rpartition(".")[2]
        yield GemmWeight(
            name=numbered.removesuffix(".weight"),
            parameter=parameter,
            dtype=entry.dtype,
            shape=(entry.shape[-2], entry.shape[-1]),
            parts=tuple(found),
            extra_state=states.get(numbered.rpartition(".")[0]),
            scale=None if scale is None else _scale_at(scale, whole),
            expert=bool(_EXPERT.search(numbered)),
        )


def _scale_of(name: str, tensors: Mapping[str, CheckpointTensor]) -> CheckpointTensor | None:
    found = (tensors.get(name + suffix) for suffix in _SCALES)
    return next((entry for entry in found if entry is not None and len(entry.pieces) == 1), None)


def _scale_at(scale: CheckpointTensor, index: tuple[int, ...]) -> WeightPart:
    """Return the scale of one of the stacked weights, or their common scale if there is only one scale."""
    stacked = len(scale.shape) > len(index) and all(i < n for i, n in zip(index, scale.shape, strict=False))
    return WeightPart(scale.pieces[0].open, index if index and stacked else ())


# --- the scales that Transformer Engine stores, as a module's `_extra_state` ----------------------------------------------

#: index of a weight's scale in a module's forward scales, and the number of these scales: X, W and Y of each GEMM in turn
#: (FP8FwdTensors of transformer_engine/pytorch/constants.py; fc1 and fc2 are the two GEMMs of LayerNormMLP)
_SLOTS = {"weight": (1, 3), "fc1_weight": (1, 6), "fc2_weight": (4, 6)}


@dataclass(frozen=True)
class StoredScale:
    """The scale that the next cast of a weight would use."""

    scale: float
    format: FloatFormat
    #: whether the scale still has its initial value 1 and the history has no amax
    unset: bool


def find_stored_weight_scale(state: Any, parameter: str, source: str) -> StoredScale | None:
    """Return the scale of a module's weight, or None if the module stores no scales (no FP8, or a recipe without stored
    scales).

    Args:
        state: the extra state in the checkpoint: uint8 bytes of a pickle (Transformer Engine 2), a placeholder for
            io.BytesIO with a torch file (1.x), or None.
        parameter: last part of the weight's name.
        source: name of the checkpoint and the module, for errors.

    Raises:
        RecordError: the state needs to run code, is damaged, or has an unknown order of weights.
    """
    found = _decoded(state, source)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise RecordError(f"{source} is damaged: expected a mapping")
    scale, history = found.get("scale_fwd"), found.get("amax_history_fwd")
    if scale is None:
        return None
    extra = found.get("extra_fp8_variables")
    limit = extra.get("fp8_max_fwd") if isinstance(extra, Mapping) else None
    if not isinstance(scale, torch.Tensor) or not isinstance(history, torch.Tensor):
        raise RecordError(f"{source} is damaged: its scales are not tensors")
    if not all(stores_every_value(each) and each.is_floating_point() for each in (scale, history)):
        raise RecordError(f"{source} is damaged: its scales are not plain floating-point numbers")
    slot, length = _SLOTS.get(parameter, (0, 0))
    if scale.shape != (length,) or history.shape[1:] != (length,):
        raise RecordError(
            f"{source} has {tuple(scale.shape)} forward scales, and the place of `{parameter}` among them is unknown"
            " (in grouped layers it depends on the version of Transformer Engine)"
        )
    fmt = E5M2 if isinstance(limit, float | int) and limit == E5M2.max else E4M3
    # Do not test the history alone, because setting the scale also empties a history of length 1.
    unset = float(scale[slot]) == 1 and bool((history[:, slot] == 0).all())
    return StoredScale(float(scale[slot]), fmt, unset)


def _decoded(state: Any, source: str) -> Any:
    if isinstance(state, torch.Tensor):
        if state.dtype != torch.uint8 or not stores_every_value(state):
            raise RecordError(f"{source} is damaged: extra state of dtype {state.dtype}, layout {state.layout}")
        data = state.numpy().tobytes()
        return load_pickle(data, source) if data else None
    if (
        isinstance(state, UnloadedObject)
        and isinstance(state.state, tuple)
        and state.state
        and isinstance(state.state[0], bytes)
    ):
        return load_torch_bytes(state.state[0], source)
    if state is None:
        return None
    raise RecordError(f"{source} has an extra state that Transformer Engine does not write ({type(state).__name__})")
