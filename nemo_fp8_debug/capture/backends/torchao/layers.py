"""Find the classes and configurations of layers that torchao quantizes in training, including torchtitan's subclasses."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..base import UnknownCastError

FLOAT8_LINEAR = "torchao.float8.float8_linear.Float8Linear"
MXFP8_LINEAR = "torchao.prototype.moe_training.mxfp8_linear.MXFP8Linear"
NVFP4_LINEAR = "torchao.prototype.moe_training.nvfp4_training.nvfp4_training.NVFP4Linear"

_TITAN = "torchtitan.components.quantization"
#: torchtitan's classes that keep the forward of a torchao class, and that torchao class
_SAME_FORWARD: Mapping[str, str] = {
    f"{_TITAN}.float8.Float8Linear": FLOAT8_LINEAR,
    f"{_TITAN}.mx.MXFP8Linear": MXFP8_LINEAR,
    f"{_TITAN}.nvfp4.NVFP4Linear": NVFP4_LINEAR,
}
#: all names in the forward of torchtitan's NVFP4Linear. This forward calls torchao's function without a group of ranks
_NVFP4_FORWARD = ("nvfp4_linear", "weight", "bias", "_sr_seed", "rht_sign_vector")
#: attributes that FSDP2 and torchtitan's Module add to a layer; none affects a cast (`forward`: see `find_replaced_forward`)
_OF_OTHERS = frozenset(
    (
        *("_fsdp_use_orig_params", "_is_fsdp_managed_module"),
        *("_param_init", "_sharding_config", "_pos_arg_list", "_parallelized", "forward"),
    )
)
#: torchtitan's wrapper of a forward. It moves tensors between ranks only under tensor parallelism
_REDISTRIBUTES = "torchtitan.protocols.module.Module.parallelize.<locals>.forward_with_redistribution"


def find_class_path(x: Any) -> str:
    """Return the class of an object as `package.module.Class`."""
    return _name(type(x))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def name_layer_class(module: nn.Module) -> str:
    """Return the name of a layer's class, ignoring the subclass that FSDP2 makes.

    For a subclass that keeps torchao's forward, return torchao's class.
    """
    kind: type = type(module)
    return _layer_class(kind)


@functools.cache
def _layer_class(kind: type) -> str:
    own = next(base for base in kind.__mro__ if not base.__module__.startswith("torch.distributed.fsdp"))
    name = _name(own)
    torchaos = next((base for base in own.__mro__ if _name(base) == _SAME_FORWARD.get(name)), None)
    if torchaos is None:
        return name
    of_torchao, of_own = getattr(torchaos, "forward", None), getattr(own, "forward", None)
    code = getattr(of_own, "__code__", None)
    same = of_own is of_torchao or (_name(torchaos) == NVFP4_LINEAR and getattr(code, "co_names", None) == _NVFP4_FORWARD)
    return _name(torchaos) if same else name


def find_replaced_forward(module: nn.Module) -> str:
    """Return the function that a layer calls instead of its class's forward, or "" if there is no such function."""
    given = vars(module).get("forward")
    if given is None:
        return ""
    name = f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', type(given).__qualname__)}"
    if name != _REDISTRIBUTES:
        return name
    cells = zip(given.__code__.co_freevars, given.__closure__ or (), strict=True)
    held = {variable: cell.cell_contents for variable, cell in cells}
    if getattr(held.get("parallel_dims"), "tp", None) != 1:
        return f"{name}, which moves its operands between the ranks of tensor parallelism"
    inside: Any = inspect.unwrap(held["fn"]) if callable(held.get("fn")) else None  # spmd_types marks the function as local
    return "" if getattr(inside, "__self__", None) is module else f"{name} around {getattr(inside, '__qualname__', inside)}"


def check_attributes(module: nn.Module, options: frozenset[str]) -> None:
    """Check that every attribute of a layer is supported: an attribute of Linear, FSDP2, torchtitan, or one in `options`.

    Raises:
        UnknownCastError: an attribute is not supported. The message names this attribute.
    """
    if strange := sorted(vars(module).keys() - options - _attributes_of_linear() - _OF_OTHERS):
        name = name_layer_class(module).rpartition(".")[2]
        raise UnknownCastError(f"its {name} has an unsupported attribute {strange[0]!r}")


@functools.cache
def _attributes_of_linear() -> frozenset[str]:
    return frozenset(vars(nn.Linear(1, 1, device="meta")))


def list_configurations(modules: Iterable[tuple[str, nn.Module]]) -> list[dict[str, Any]]:
    """Return each configuration (`config`) with the names of its layers (`layers`).

    Args:
        modules: all modules of a model, with their global names.
    """
    if "torchao" not in sys.modules:
        return []
    found: dict[str, dict[str, Any]] = {}
    for name, module in modules:
        config = getattr(module, "config", None)
        if (
            name_layer_class(module) == FLOAT8_LINEAR
            and find_class_path(config) == "torchao.float8.config.Float8LinearConfig"
        ):
            found.setdefault(repr(config), {"config": _plain(config), "layers": []})["layers"].append(name)
    return list(found.values())


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, (bool, type(None))) else str(value)
