"""The interface of a framework's backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from ...kernels import CastRule
from ...numerics.block_scaling import BlockRule
from ...numerics.formats import Decoded, FloatFormat
from ...numerics.recipe import Recipe
from ...numerics.tensor_scaling import CurrentScaling
from ..tensors import is_dtensor
from . import parallel

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class ScaleInUse:
    """How an operand is cast during one step, and how we know its scale."""

    #: a float32 scalar tensor for the whole step, or the rule that computes a scale for each tensor
    scale: torch.Tensor | CurrentScaling | BlockRule
    format: FloatFormat
    #: recipe of the scale
    recipe: Recipe
    #: "engine": read from the quantizer of the operand. "emulated": from a history that we keep. "current": the operand's
    #: own amax. "not quantized": the engine left it in high precision, and current scaling is what it might use.
    #: "expected": as "engine", but codes are rounded stochastically, so that metrics are expected values.
    #: "stored": W is stored as codes, its values before the cast are unknown, and errors are null.
    #: "unknown": the engine may quantize the operand in an unknown way. We measure it as if it were not quantized
    source: str
    #: different casts for other GEMMs, by product as in `numerics.gemm_error`; None: in high precision
    products: Mapping[str, ScaleInUse | None] = field(default_factory=dict, compare=False)
    #: cast of the copy that another product of the backward multiplies, if it is known and its values differ
    columnwise: ScaleInUse | None = field(default=None, compare=False)
    #: values of the codes if the engine stores codes; None if it casts in each step
    decoded: Decoded | None = field(default=None, compare=False)
    #: ranks that share the largest amax for this cast, or None if the cast takes the tensor's own
    amax_group: Any = field(default=None, compare=False)

    def in_product(self, product: str) -> ScaleInUse | None:
        """Return the cast for one GEMM, or None if this GEMM takes the operand in high precision."""
        return self.products.get(product, self)

    @functools.cached_property
    def rule(self) -> CastRule:
        """The rule that measures a tensor under this cast."""
        return CastRule(self.scale, self.format, self.sees_infinity)

    @property
    def sees_infinity(self) -> bool:
        """True if an infinite value makes the amax infinite, as in an engine. Otherwise metrics are over finite values."""
        return self.source in ("engine", "expected")


class UnknownCast(Exception):
    """Raised if the cast of an operand cannot be determined. The message names the reason."""


#: stands for the cast of an operand that nothing quantizes
_SHADOW = Recipe(CurrentScaling())


@functools.cache
def make_unquantized_cast(role: str) -> ScaleInUse:
    """Return the cast of an operand that its engine leaves in high precision."""
    return ScaleInUse(CurrentScaling(), _SHADOW.format_of(role), _SHADOW, "not quantized")


@functools.cache
def make_unknown_cast(role: str) -> ScaleInUse:
    """Return the cast of an operand that is quantized in an unknown way."""
    return replace(make_unquantized_cast(role), source="unknown")


class StoredCodes(Protocol):
    """A weight that is stored as codes."""

    @property
    def parameter(self) -> Any:
        """The parameter of the module."""

    def decoded(self) -> Decoded:
        """Return the values of the codes. Raises UnknownCast."""

    def cast(self) -> ScaleInUse:
        """Return how the codes were cast. Raises UnknownCast."""


@dataclass(frozen=True)
class Backend:
    """How to find a framework's GEMM modules and their operands.

    A module may run several GEMMs, its *parts*. Functions receive the part's name, or "" if there is only one part.
    """

    name: str
    #: whether a module is one of the framework's GEMMs; the framework is never imported here
    owns: Callable[[nn.Module], bool]
    #: X from the arguments of a forward call, or None if it is not available
    input: Callable[[nn.Module, Args, Kwargs, str], torch.Tensor | None]
    #: W; never read through `module.weight`, whose getter makes some sharding engines gather
    weight: Callable[[nn.Module, Args, Kwargs, str], torch.Tensor | None]
    #: the tensor whose gradient is dY, from the output of forward
    output: Callable[[Any], torch.Tensor]
    #: the GEMMs that a module runs, by the suffix of their name
    parts: Callable[[nn.Module], Sequence[str]] = lambda module: ("",)
    #: dY of a part, from the gradient of the output
    grad: Callable[[torch.Tensor, nn.Module, Args, Kwargs, str], torch.Tensor | None] = lambda grad, *_: grad
    #: whether another rank counts this rank's copy; None if all ranks with the module hold the same
    copied: Callable[[nn.Module, str], bool | None] = parallel.is_copy
    #: roles of a part that hooks cannot observe
    unseen: Callable[[nn.Module, str], Collection[str]] = lambda module, part: ()
    #: called after a forward call; returns a function that returns how the engine casts a role of a part. Call that function
    #: at once for X and W, and in the backward for dY. Raises UnknownCast. None if the backend never quantizes
    cast: Callable[[nn.Module, Kwargs, str, str, torch.Tensor], Callable[[], ScaleInUse]] | None = None
    #: called once a sampled step; returns why no cast of the engine can be determined, or ""
    untold: Callable[[], str] = str
    #: returns the reader of a part's weight that is stored in FP8 or FP4
    stored: Callable[[nn.Module, str], StoredCodes | None] = lambda module, part: None
    #: whether operands exist only inside its forward, and are observed at torch's operators
    in_forward: bool = False
    #: returns why a module may treat its operands in an unknown way, or "" if the way is known or `cast` determines it
    foreign: Callable[[nn.Module], str] = lambda module: ""
    #: returns facts about a call before it runs, as keywords of `cast`
    arguments: Callable[[nn.Module, Args, Kwargs], Kwargs] = lambda module, args, kwargs: kwargs
    #: whether ranks may share the amax of a module's calls
    shares_amax: Callable[[nn.Module], bool] = lambda module: False
    #: the autograd node in whose backward dY is cast, from the output of forward, if it is known
    node: Callable[[torch.Tensor], Any] = lambda out: None
    #: whether a module in FP8 accumulates a product in float32 between the sums of the tensor core
    splits_accumulator: Callable[[nn.Module, str], bool] = lambda module, product: False
    #: whether its modules can quantize on their own
    has_own_fp8: bool = False
    #: whether a plan can use another recipe for a call of its modules
    takes_plans: bool = False
    #: the FP8 recipe in the module's configuration, if there is one
    recipe: Callable[[nn.Module], Recipe | None] = lambda module: None


def find_foreign_forward(module: nn.Module, kinds: tuple[type, ...], read: Collection[str] = ()) -> str:
    """Return why the forward of a module may change or quantize its operands, or "" if this forward is supported.

    Args:
        kinds: classes of the engine whose forwards are supported.
        read: forwards of subclasses that only call a supported one, by module and qualified name.
    """
    if "forward" in vars(module):
        return "its forward was replaced by one that may change or quantize its operands"
    for kind in type(module).__mro__:
        if kind in kinds:
            return ""
        forward = vars(kind).get("forward")
        name = ".".join(str(getattr(forward, part, "")) for part in ("__module__", "__qualname__"))
        if forward is not None and name not in read:
            break
    return "its class has a forward of its own, which may change or quantize its operands"


def read_raw_weight(module: nn.Module, name: str = "weight") -> torch.Tensor | None:
    """Return the parameter of a module without the getters of sharding engines, or None if it is computed anew."""
    weight: torch.Tensor | None = dict.get(module._parameters, name)
    if weight is None:
        # FSDP1 without `use_orig_params` gathers into a plain attribute, a view of its flat parameter.
        attribute = module.__dict__.get(name)
        weight = attribute if getattr(getattr(attribute, "_base", None), "_is_flat_param", False) else None
    return weight


def is_plain(parameter: Any) -> bool:
    """Return True for plain numbers of 16 bits or more, and False for tensor classes that may quantize in their products."""
    if parameter is None:
        return False
    local = getattr(parameter, "_local_tensor", parameter) if is_dtensor(parameter) else parameter
    return type(local) in (torch.Tensor, nn.Parameter) and local.is_floating_point() and local.element_size() >= 2


def is_prepared_later(module: nn.Module, weight: torch.Tensor | None) -> bool:
    """Return True if a sharding engine has yet to gather W, or to cast or split X, before this forward."""
    if hasattr(module, "unshard"):  # FSDP2, which may have gathered W in advance
        return True
    return weight is not None and (is_dtensor(weight) or weight.numel() == 0)
