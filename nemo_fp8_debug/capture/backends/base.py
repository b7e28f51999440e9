"""What the rest of the package asks of a framework."""

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
    """How the scale that an operand is cast with is known during one step."""

    #: a float32 scalar tensor that holds through the step, or the rule that finds scales anew for each tensor
    scale: torch.Tensor | CurrentScaling | BlockRule
    format: FloatFormat
    #: which the scale belongs to
    recipe: Recipe
    #: "engine": read from what quantizes the operand; "emulated": a history kept here; "current": the operand's own amax;
    #: "not quantized": the engine left this operand in high precision, and current scaling is what it might use;
    #: "expected": as "engine", but codes are rounded by chance: metrics are expected values;
    #: "stored": W is stored in codes, what they were made of is not known, and errors are null;
    #: "unknown": the engine may quantize it, and how could not be read; measured as if it were not quantized
    source: str
    #: by product, as in `numerics.gemm_error`: how it is cast for GEMMs that cast it otherwise; None: in high precision
    products: Mapping[str, ScaleInUse | None] = field(default_factory=dict, compare=False)
    #: the copy that another product of the backward multiplies, where that holds other values; None: there is none that is
    #: known, or it holds the same
    columnwise: ScaleInUse | None = field(default=None, compare=False)
    #: what the codes stand for, if the engine stores them; None: it casts in each step
    decoded: Decoded | None = field(default=None, compare=False)
    #: the ranks of whose amaxes the largest is what the cast goes by; None: the tensor's own
    amax_group: Any = field(default=None, compare=False)

    def in_product(self, product: str) -> ScaleInUse | None:
        """How it is cast for one GEMM; None: it is not."""
        return self.products.get(product, self)

    @functools.cached_property
    def rule(self) -> CastRule:
        """What measures a tensor under it."""
        return CastRule(self.scale, self.format, self.sees_infinity)

    @property
    def sees_infinity(self) -> bool:
        """Whether an infinity is the amax, as in an engine; metrics of what is not quantized are over finite values."""
        return self.source in ("engine", "expected")


class UnknownCast(Exception):
    """How an engine casts an operand cannot be told; the message names what is not known."""


#: what stands for the cast of an operand that nothing quantizes
_SHADOW = Recipe(CurrentScaling())


@functools.cache
def make_unquantized_cast(role: str) -> ScaleInUse:
    """Of an operand that its engine leaves in high precision."""
    return ScaleInUse(CurrentScaling(), _SHADOW.format_of(role), _SHADOW, "not quantized")


@functools.cache
def make_unknown_cast(role: str) -> ScaleInUse:
    """Of an operand whose cast cannot be told."""
    return replace(make_unquantized_cast(role), source="unknown")


class StoredCodes(Protocol):
    """A weight that is stored in codes."""

    @property
    def parameter(self) -> Any:
        """As the module holds it."""

    def decoded(self) -> Decoded:
        """What the codes stand for; raises UnknownCast."""

    def cast(self) -> ScaleInUse:
        """How they were cast; raises UnknownCast."""


@dataclass(frozen=True)
class Backend:
    """How to find a framework's GEMM modules and their operands.

    A module may run several GEMMs, its *parts*; functions get the part that they are asked about, "" where there is one.
    """

    name: str
    #: whether a module is one of its GEMMs; the framework is never imported from here
    owns: Callable[[nn.Module], bool]
    #: X from the arguments of a forward call; None where it cannot be had
    input: Callable[[nn.Module, Args, Kwargs, str], torch.Tensor | None]
    #: W; never through `module.weight`, whose getter makes some sharding engines gather
    weight: Callable[[nn.Module, Args, Kwargs, str], torch.Tensor | None]
    #: the tensor whose gradient is dY, from what forward returned
    output: Callable[[Any], torch.Tensor]
    #: the GEMMs that a module runs, by what is added to its name
    parts: Callable[[nn.Module], Sequence[str]] = lambda module: ("",)
    #: dY of a part, from the gradient of the output
    grad: Callable[[torch.Tensor, nn.Module, Args, Kwargs, str], torch.Tensor | None] = lambda grad, *_: grad
    #: whether the role of a module on this rank is a copy of what another rank counts; None: the same on all that have it
    copied: Callable[[nn.Module, str], bool | None] = parallel.is_copy
    #: roles of a part that no hook sees
    unseen: Callable[[nn.Module, str], Collection[str]] = lambda module, part: ()
    #: from a forward call that has just returned: what tells how its engine casts a role of a part, asked at once of X and
    #: W, in the backward of dY; raises UnknownCast. No function where the backend never quantizes
    cast: Callable[[nn.Module, Kwargs, str, str, torch.Tensor], Callable[[], ScaleInUse]] | None = None
    #: asked once a sampled step: why nothing can be told of how the engine casts; empty: it can
    untold: Callable[[], str] = str
    #: of a part whose weight is stored in FP8 or FP4: what reads it
    stored: Callable[[nn.Module, str], StoredCodes | None] = lambda module, part: None
    #: whether its operands exist inside its forward only, and are seen at the operators of torch
    in_forward: bool = False
    #: why nothing can be told of what a module does to its operands; empty: it is known, or `cast` tells
    foreign: Callable[[nn.Module], str] = lambda module: ""
    #: what is to be known of a call before it runs, as keywords of `cast`
    arguments: Callable[[nn.Module, Args, Kwargs], Kwargs] = lambda module, args, kwargs: kwargs
    #: whether ranks may share amaxes of a module's calls
    shares_amax: Callable[[nn.Module], bool] = lambda module: False
    #: from what forward returned: the autograd node in whose backward dY is cast; None: there is none, or it is not known
    node: Callable[[torch.Tensor], Any] = lambda out: None
    #: whether a product of a module in FP8 is added up in float32 between the sums of the tensor core
    splits_accumulator: Callable[[nn.Module, str], bool] = lambda module, product: False
    #: whether its modules quantize for themselves when told to
    has_own_fp8: bool = False
    #: whether a plan can put another recipe in force for a call of its modules
    takes_plans: bool = False
    #: the FP8 recipe that the module is configured for; None: none
    recipe: Callable[[nn.Module], Recipe | None] = lambda module: None


def find_foreign_forward(module: nn.Module, kinds: tuple[type, ...], read: Collection[str] = ()) -> str:
    """Return why the forward of a module may change or quantize its operands; empty: that forward was read.

    Args:
        kinds: classes of the engine, whose forwards were read.
        read: forwards of subclasses that do no more than call those, by module and qualified name.
    """
    if "forward" in vars(module):
        return "its forward was replaced, by one that may change or quantize its operands"
    for kind in type(module).__mro__:
        if kind in kinds:
            return ""
        forward = vars(kind).get("forward")
        name = ".".join(str(getattr(forward, part, "")) for part in ("__module__", "__qualname__"))
        if forward is not None and name not in read:
            break
    return "its class has a forward of its own, which may change or quantize its operands"


def read_raw_weight(module: nn.Module, name: str = "weight") -> torch.Tensor | None:
    """The parameter as the module holds it, without the getters of sharding engines; None where it is computed anew."""
    weight: torch.Tensor | None = dict.get(module._parameters, name)
    if weight is None:
        # FSDP1 without `use_orig_params`: what it has gathered is a plain attribute, a view of its flat parameter.
        attribute = module.__dict__.get(name)
        weight = attribute if getattr(getattr(attribute, "_base", None), "_is_flat_param", False) else None
    return weight


def is_plain(parameter: Any) -> bool:
    """Whether values are plain numbers of 16 bits or more, and not a class of tensors that may quantize in its products."""
    if parameter is None:
        return False
    local = getattr(parameter, "_local_tensor", parameter) if is_dtensor(parameter) else parameter
    return type(local) in (torch.Tensor, nn.Parameter) and local.is_floating_point() and local.element_size() >= 2


def is_prepared_later(module: nn.Module, weight: torch.Tensor | None) -> bool:
    """Whether a sharding engine has yet to prepare operands, seen before a forward: to gather W, or to cast or split X."""
    if hasattr(module, "unshard"):  # wrapped by FSDP2, which may have gathered W ahead of time
        return True
    return weight is not None and (is_dtensor(weight) or weight.numel() == 0)
