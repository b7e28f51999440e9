"""The interface of a framework's backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...kernels import CastRule
from ...numerics.block_scaling import BlockScalingRule
from ...numerics.formats import DecodedCodes, FloatFormat
from ...numerics.recipe import Recipe
from ...numerics.tensor_scaling import CurrentScaling
from ..tensors import is_dtensor
from . import parallel

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class CastInUse:
    """The cast of an operand during one step, and the source of its scale."""

    #: a float32 scalar tensor for the whole step, or the rule that computes a scale for each tensor
    scale: torch.Tensor | CurrentScaling | BlockScalingRule
    format: FloatFormat
    #: recipe of the scale
    recipe: Recipe
    #: "engine": read from the quantizer of the operand. "emulated": from a history that we keep. "current": from the
    #: operand's own amax. "not quantized": the engine left the operand in high precision; we assume current scaling.
    #: "expected": as "engine", but codes are rounded stochastically, so that metrics are expected values.
    #: "stored": W is stored as codes. Its values before the cast are unknown, so errors are null.
    #: "unknown": the engine may quantize the operand in an unknown way. We measure it as if it were not quantized
    source: str
    #: casts for other products if they differ, by product as in `numerics.gemm_error`; None means high precision
    products: Mapping[str, CastInUse | None] = field(default_factory=dict, compare=False)
    #: cast of the separate copy that dgrad or wgrad uses as its operand, if we know it and the copy has other values
    columnwise: CastInUse | None = field(default=None, compare=False)
    #: decoded values if the engine stores the operand as codes; None if the engine casts the operand in each step
    decoded: DecodedCodes | None = field(default=None, compare=False)
    #: group of ranks that all cast with the largest amax in the group, or None if this rank casts with its own amax
    amax_group: Any = field(default=None, compare=False)

    def select_product_cast(self, product: str) -> CastInUse | None:
        """Return the cast for one GEMM, or None if this GEMM multiplies the operand in high precision."""
        return self.products.get(product, self)

    @functools.cached_property
    def cast_rule(self) -> CastRule:
        """The rule that measures a tensor under this cast."""
        return CastRule(self.scale, self.format, self.counts_infinity_in_amax)

    @property
    def counts_infinity_in_amax(self) -> bool:
        """True if an infinite value makes the amax infinite, as in an engine. Otherwise infinite values are ignored."""
        return self.source in ("engine", "expected")


class UnknownCastError(Exception):
    """An error that is raised if the cast of an operand cannot be determined. The message names the reason."""


#: recipe for measuring an operand that nothing quantizes
_SHADOW = Recipe(CurrentScaling())


@functools.cache
def make_unquantized_cast(role: str) -> CastInUse:
    """Return the cast of an operand that its engine leaves in high precision."""
    return CastInUse(CurrentScaling(), _SHADOW.get_format(role), _SHADOW, "not quantized")


@functools.cache
def make_unknown_cast(role: str) -> CastInUse:
    """Return the cast of an operand that is quantized in an unknown way."""
    return replace(make_unquantized_cast(role), source="unknown")


class StoredCodes(Protocol):
    """A weight that is stored as codes."""

    @property
    def parameter(self) -> Any:
        """The parameter of the module."""

    def decode_values(self) -> DecodedCodes:
        """Return the values of the codes. Raises UnknownCastError."""

    def find_cast(self) -> CastInUse:
        """Return how the codes were cast. Raises UnknownCastError."""


@dataclass(frozen=True)
class FrameworkBackend:
    """Functions that find a framework's GEMM modules and their operands.

    A module may run several GEMMs, which we call its *parts*. Functions receive the name of a part, or "" if a module has
    only one part.
    """

    name: str
    #: returns whether a module is a GEMM of the framework, without importing the framework
    owns: Callable[[nn.Module], bool]
    #: returns X from the arguments of a forward call, or None if X is not available
    input: Callable[[nn.Module, Args, Kwargs, str], torch.Tensor | None]
    #: returns W, but never through `module.weight`, because some sharding engines gather when this attribute is read
    weight: Callable[[nn.Module, Args, Kwargs, str], torch.Tensor | None]
    #: returns the tensor whose gradient is dY, from the output of forward
    output: Callable[[Any], torch.Tensor]
    #: returns the parts of a module: suffixes of the names of its GEMMs
    parts: Callable[[nn.Module], Sequence[str]] = lambda module: ("",)
    #: returns dY of a part, from the gradient of the output
    grad: Callable[[torch.Tensor, nn.Module, Args, Kwargs, str], torch.Tensor | None] = lambda grad, *_: grad
    #: returns whether another rank counts this rank's copy; None if all ranks with the module hold copies
    copied: Callable[[nn.Module, str], bool | None] = parallel.is_duplicate_operand
    #: returns the roles of a part that hooks cannot observe
    unseen: Callable[[nn.Module, str], Collection[str]] = lambda module, part: ()
    #: called after a forward call, to find how the engine casts a role of a part. It returns a function that returns this
    #: cast. Call the returned function immediately for X and W, and in the backward for dY. Both functions may raise
    #: UnknownCastError. The field is None if the backend never quantizes
    cast: Callable[[nn.Module, Kwargs, str, str, torch.Tensor], Callable[[], CastInUse]] | None = None
    #: called once per sampled step; returns why no cast of the engine can be determined, or ""
    untold: Callable[[], str] = str
    #: returns the reader of a part's weight if the weight is stored in FP8 or FP4
    stored: Callable[[nn.Module, str], StoredCodes | None] = lambda module, part: None
    #: whether operands exist only inside the module's forward, so that we observe them at torch's operators
    in_forward: bool = False
    #: returns why a module may change its operands in an unknown way, or "" if it does not, or if `cast` determines the way
    foreign: Callable[[nn.Module], str] = lambda module: ""
    #: returns why all modules of the backend may change operands, because a function of torch was replaced, or ""
    explain_replaced_product: Callable[[], str] = lambda: ""
    #: returns facts about a call before it runs, as keywords of `cast`
    arguments: Callable[[nn.Module, Args, Kwargs], Kwargs] = lambda module, args, kwargs: kwargs
    #: returns whether ranks may share the amax of a module's calls
    shares_amax: Callable[[nn.Module], bool] = lambda module: False
    #: returns, from the output of forward, the autograd node that casts dY in the backward, or None if it is unknown
    node: Callable[[torch.Tensor], Any] = lambda out: None
    #: returns whether a module in FP8 adds up partial sums of the tensor cores in float32, for a product
    splits_accumulator: Callable[[nn.Module, str], bool] = lambda module, product: False
    #: whether the framework's modules can quantize on their own
    has_own_fp8: bool = False
    #: whether a plan can use another recipe for a call of the framework's modules
    takes_plans: bool = False
    #: returns the FP8 recipe in the module's configuration, if there is one
    recipe: Callable[[nn.Module], Recipe | None] = lambda module: None


def explain_unsupported_forward(module: nn.Module, kinds: tuple[type, ...], read: Collection[str] = ()) -> str:
    """Return why the forward of a module may change or quantize its operands, or "" if this forward is supported.

    Args:
        kinds: classes of the engine whose forwards are supported.
        read: forwards of subclasses that only call a supported forward, by module and qualified name.
    """
    if "forward" in vars(module):
        return "its forward was replaced by a function that may change or quantize its operands"
    for kind in type(module).__mro__:
        if kind in kinds:
            return ""
        forward = vars(kind).get("forward")
        name = ".".join(str(getattr(forward, part, "")) for part in ("__module__", "__qualname__"))
        if forward is not None and name not in read:
            break
    return "its class has a forward of its own, which may change or quantize its operands"


def read_raw_weight(module: nn.Module, name: str = "weight") -> torch.Tensor | None:
    """Return a module's parameter without calling a sharding engine. Return None if each call computes the weight, or if it
    is a lazy weight without a shape.
    """
    weight: torch.Tensor | None = dict.get(module._parameters, name)
    if weight is not None and is_lazy(weight):
        return None
    if weight is None:
        # Under FSDP1 without `use_orig_params`, the gathered weight is a plain attribute: a view of FSDP1's flat parameter.
        attribute = module.__dict__.get(name)
        weight = attribute if getattr(getattr(attribute, "_base", None), "_is_flat_param", False) else None
    return weight


def is_plain_tensor(parameter: Any) -> bool:
    """Return True for a plain tensor with 16 bits or more per value, not for tensor classes whose products may quantize."""
    if parameter is None:
        return False
    local = getattr(parameter, "_local_tensor", parameter) if is_dtensor(parameter) else parameter
    return type(local) in (torch.Tensor, nn.Parameter) and local.is_floating_point() and local.element_size() >= 2


def may_be_gathered_later(module: nn.Module, weight: torch.Tensor | None) -> bool:
    """Return True if a sharding engine may still gather W, or cast or split X, between our hook and the forward."""
    if hasattr(module, "unshard"):  # FSDP2 may have gathered W in advance
        return True
    return weight is not None and (is_dtensor(weight) or weight.numel() == 0)
