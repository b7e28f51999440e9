"""Find products of inputs and parameters inside a module's forward, by watching torch's operators.

A mode calls every operator unchanged during the forward. For `mm`, `addmm`, `bmm`, `baddbmm` and `_grouped_mm`, it
determines which operand comes from a parameter and which from the inputs. We measure the values that the operator
multiplies, no matter how they were computed.

We track the origin of values by their memory, so views need no special treatment. If an operator is not listed here, such as
a library's kernel or a rounding, its results have the origin `UNTOLD`. A cast to an 8-bit type has the same effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from ..core.error_guard import leave_dispatch_modes, restore_dispatch_modes
from .backends.in_forward import read_parameter
from .dispatcher import GraphHook
from .operator_mode import is_dtensor_call
from .scan import scan_modules
from .tensors import is_dtensor

#: position of the first of the two operands in the arguments of each product
_OPERANDS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}
_INPUTS = ""


@dataclass(frozen=True)
class Matmul:
    """A product of inputs and a parameter. In both matrices, the product sums over the values of a row."""

    #: name of the parameter
    parameter: str
    x: torch.Tensor
    #: returns W, or None if the GEMM uses a tensor computed from parts of the parameter, not from all of it
    weight: Callable[[], torch.Tensor | None]
    #: whether we know that nothing has quantized X, or W, before the product
    x_is_told: bool
    weight_is_told: bool
    #: whether outputs are the rows of the product instead of its columns
    turned: bool


class MatmulMode(TorchDispatchMode):
    """A mode that finds the products in one forward call."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Any],
        inputs: Any,
        found: Callable[[Matmul], Callable[[torch.Tensor, bool], None] | None],
    ) -> None:
        """
        Args:
            module: the module whose forward runs.
            parameters: names of the parameters to look for.
            inputs: arguments of the module.
            found: receives each product, and returns a function. When the output is part of the autograd graph, this
                function receives the output, and whether other code has already put a hook on it.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._module, self._watched, self._found = module, set(parameters), found
        self._inputs = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        self._input_memory = {x.untyped_storage()._cdata for x in self._inputs if not is_dtensor(x)}
        self._scanned = scan_modules([module])
        self._flow = Dataflow()
        self._waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor, bool], None]]] = []
        self._on = True
        #: whether tensors of this forward have hooks, which may change gradients
        self.hooked = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions stay compiled."""
        return True

    def begin(self) -> None:
        """Observe from now on."""
        self._flow.mark_source(self._inputs, _INPUTS)
        self._inputs = []
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop observing."""
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._on = False
        self._give_out()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` unchanged, and follow its values."""
        kwargs = kwargs or {}
        if self._on and is_dtensor_call(types):
            return NotImplemented
        if not self._on or any(isinstance(x, FakeTensor) for x in args):
            return func(*args, **kwargs)
        modes = leave_dispatch_modes()
        try:
            self._before(func, args)
        finally:
            restore_dispatch_modes(modes)
        out = func(*args, **kwargs)
        with contextlib.suppress(Exception):  # after an error, the origin of the results is unknown
            self._flow.follow(func, args, kwargs, out)
            self._remember(func, out)
        return out

    def _before(self, func: Any, args: Any) -> None:
        self._take: Callable[[torch.Tensor, bool], None] | None = None
        self._give_out()
        product = None
        with contextlib.suppress(Exception):  # after an error, the product is ignored
            given = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            if any(self._flow.find_origin(x) is None for x in given):
                self._begin_parameters()
            self.hooked |= any(x._backward_hooks and self._is_of_this_forward(x) for x in given)
            at = _OPERANDS.get(func.overloadpacket.__name__) if func.namespace == "aten" else None
            product = None if at is None else self._product(*args[at : at + 2])
        if product is not None:
            self._take = self._found(product)

    def _remember(self, func: Any, out: Any) -> None:
        if self._take is not None and isinstance(out, torch.Tensor):
            self._waiting.append((out, self._take))
            self._take = None

    def _give_out(self) -> None:
        """Pass on outputs of earlier products. An output is part of the graph only after its operator has returned."""
        waiting, self._waiting = self._waiting, []
        for out, take in waiting:
            take(out, bool(out._backward_hooks))

    def _is_of_this_forward(self, x: torch.Tensor) -> bool:
        hooks = (x._backward_hooks or {}).values()
        mine = all(isinstance(hook, GraphHook) and hook.is_inside for hook in hooks)
        return not mine and x.grad_fn is not None and x.untyped_storage()._cdata not in self._input_memory

    def _begin_parameters(self) -> None:
        """Note the module's present parameters. A sharding engine may have gathered them only after the forward began."""
        for one in self._scanned:
            for key, value in (*one.module._parameters.items(), *one.module._buffers.items()):
                if value is not None and type(local_of(value)) in (torch.Tensor, nn.Parameter):
                    self._flow.begin_parameter(local_of(value), f"{one.path_in_root}.{key}" if one.path_in_root else key)

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> Matmul | None:
        of_a, of_b = (self._flow.find_origin(x) or Origin(UNTOLD) for x in (a, b))
        for x, w, of_x, of_w, turned in ((a, b, of_a, of_b, False), (b, a, of_b, of_a, True)):
            mine = of_w.sources & self._watched
            if mine and _INPUTS not in of_w.sources and not (of_x.sources and _INPUTS not in of_x.sources):
                of_rows = w if turned else w.transpose(-1, -2)
                if (key := self._which(mine, of_rows)) is None:
                    return None
                return Matmul(
                    key,
                    x.transpose(-1, -2) if turned else x,
                    partial(self._weight, key, of_rows, of_w),
                    of_x.made >= COMPUTED and _INPUTS in of_x.sources,
                    of_w.made >= COMPUTED,
                    turned,
                )
        return None

    def _which(self, names: frozenset[str], weight: torch.Tensor) -> str | None:
        """If several parameters are possible, return the only one with as many values as the operand, or None."""
        if len(names) == 1:
            return next(iter(names))
        fitting = [name for name in names if local_of(read_parameter(self._module, name)).numel() == weight.numel()]
        return fitting[0] if len(fitting) == 1 else None

    def _weight(self, key: str, multiplied: torch.Tensor, origin: Origin) -> torch.Tensor | None:
        """Return the parameter if it was only moved, the operand if it was computed from the whole parameter, or None."""
        parameter: Any = read_parameter(self._module, key)
        if origin.made == MOVED and origin.sources == {key}:
            out, k = parameter.shape[-2:]
            along = multiplied.stride(-1) <= multiplied.stride(-2) if out == k else k == multiplied.shape[-1]
            whole = parameter.detach() if along else parameter.detach().transpose(-1, -2)
            return whole.to(multiplied.dtype)  # type: ignore[no-any-return]
        return multiplied if multiplied.numel() == local_of(parameter).numel() else None


def local_of(x: Any) -> torch.Tensor:
    """Return the part of a parameter that this rank holds."""
    part: torch.Tensor = x._local_tensor if is_dtensor(x) and hasattr(x, "_local_tensor") else x
    return part


#: how values were made from their sources: in an unknown way (UNTOLD), by arithmetic that does not quantize (COMPUTED), or
#: only by moving them or casting them to another type of at least 16 bits (MOVED)
UNTOLD, COMPUTED, MOVED = range(3)
#: a number of at least this size may be added or subtracted in order to round the values of a tensor
_ROUNDING_ADDEND = 64.0


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: operators of torch that move or cast values
_MOVES = _names(
    "_pin_memory _reshape_copy _to_copy _unsafe_index cat clone constant_pad_nd copy copy_ embedding expand_copy fill_ "
    "flip gather index index_copy index_copy_ index_put index_put_ index_select masked_scatter masked_select new_zeros pad "
    "repeat roll scatter scatter_ select_scatter slice_scatter sort stack t_copy take topk view_copy zero_ zeros zeros_like"
)
#: operators that compute with values but do not round them to another grid
_ARITHMETIC = _names(
    "_fused_rms_norm _grouped_mm _log_softmax _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _softmax _weight_norm_interface abs add add_ addbmm addcdiv addcmul "
    "addmm amax amin baddbmm bmm clamp clamp_ clamp_max clamp_min cos cumsum div div_ dot dropout elu exp gelu glu "
    "hardtanh index_add index_add_ index_reduce leaky_relu linalg_vector_norm log log_sigmoid_forward masked_fill "
    "masked_fill_ max maximum mean min minimum mish mm mul mul_ mv native_dropout native_group_norm native_layer_norm "
    "neg norm pow prod reciprocal relu relu_ rsqrt rsub scatter_add scatter_add_ scatter_reduce sigmoid sigmoid_ silu "
    "silu_ sin softplus sqrt sub sub_ sum tanh threshold tril triu var var_mean vdot where"
)
#: operators whose integer arguments are positions
_AT_PLACES = _names("_grouped_mm index_add index_add_ index_reduce scatter_add scatter_add_ scatter_reduce")
#: operators that can round away the low bits of a tensor by adding or subtracting a large number
_SUMS = frozenset(("add", "add_", "sub", "sub_", "rsub"))
#: namespaces of collectives, which move values between ranks
_COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")


@dataclass(frozen=True)
class Origin:
    """The known origin of values."""

    #: UNTOLD, COMPUTED or MOVED
    made: int
    #: names of parameters, and "" for inputs
    sources: frozenset[str] = frozenset()


_NOT_KNOWN = Origin(UNTOLD)
#: address of a storage, and offset of a parameter in this storage if several parameters share it
_Memory = tuple[int, int]


class Dataflow:
    """The origins of tensors, by their memory. It keeps no tensor alive."""

    def __init__(self) -> None:
        # A weak reference to a storage keeps the address of this storage from being reused.
        self._known: dict[_Memory, tuple[Any, Origin]] = {}
        self._parts: dict[int, list[tuple[int, int]]] = {}

    def mark_source(self, tensors: Iterable[Any], source: str) -> None:
        """Note tensors with values of at least 16 bits as a source, unless their memory already has an origin."""
        for x in tensors:
            if isinstance(x, torch.Tensor) and _is_plain(x) and self.find_origin(x) is None:
                self._note(x, Origin(MOVED, frozenset((source,))))

    def begin_parameter(self, x: torch.Tensor, name: str) -> None:
        """Note a parameter as a source. Several parameters may share a storage, as under a sharding optimizer."""
        size = x.numel() * x.element_size()
        if size and x.untyped_storage().nbytes() > size and self.find_origin(x) is None:
            self._parts.setdefault(x.untyped_storage()._cdata, []).append((x.data_ptr(), x.data_ptr() + size))
        self.mark_source([x], name)

    def _memory(self, x: torch.Tensor) -> _Memory:
        number = x.untyped_storage()._cdata
        parts = self._parts.get(number)
        if not parts:
            return number, 0
        at = x.data_ptr()
        return number, next((start for start, end in parts if start <= at < end), -1)

    def find_origin(self, x: torch.Tensor) -> Origin | None:
        """Return the origin of a tensor, or None if unknown."""
        found = self._known.get(self._memory(x))
        return None if found is None else found[1]

    def _note(self, x: torch.Tensor, origin: Origin) -> None:
        self._known[self._memory(x)] = StorageWeakRef(x.untyped_storage()), origin

    def follow(self, operator: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Note the origins of an operator's results."""
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = self._made(operator, given, args, kwargs)
        untold = Origin(UNTOLD, made.sources)
        written = list(_written(operator, args, kwargs))
        for x in written:
            self._note(x, made if _is_plain(x) else untold)
        mine = {self._memory(x): x.dtype for x in given}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and all(x is not y for y in written):
                is_view = self._memory(x) in mine
                if not is_view:
                    self._note(x, made if _is_plain(x) else untold)
                elif x.dtype != mine[self._memory(x)]:  # the same bits viewed as another type
                    self._note(x, untold)

    def _made(self, operator: Any, given: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Any) -> Origin:
        name = str(operator._schema.name).partition("::")[2]
        moves = name in _MOVES or operator.namespace in _COLLECTIVES
        # Masks and indices have no effect on the origin, but other integers may be codes.
        places = name != "_to_copy" and (moves or name in _AT_PLACES)
        counted = [x for x in given if x.is_floating_point() or not (places or x.dtype == torch.bool)]
        origins = [self.find_origin(x) or _NOT_KNOWN for x in counted]
        sources = frozenset[str]().union(*(o.sources for o in origins))
        told = moves or (operator.namespace == "aten" and name in _ARITHMETIC and not _may_round(name, args, kwargs))
        if not told or not all(map(_is_plain, counted)):
            return Origin(UNTOLD, sources)
        how = min((o.made for o in origins), default=MOVED)
        return Origin(how if moves else min(how, COMPUTED), sources)


def _may_round(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Return True if these arguments make an operator round."""
    large = any(isinstance(a, (int, float)) and abs(a) >= _ROUNDING_ADDEND for a in args)
    return kwargs.get("rounding_mode") is not None or (name in _SUMS and large)


def _is_plain(x: torch.Tensor) -> bool:
    return x.is_floating_point() and x.element_size() >= 2


def _written(operator: Any, args: Sequence[Any], kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator changes in place."""
    for argument, value in zip(operator._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (x for x in tree_leaves(value) if isinstance(x, torch.Tensor))
    for argument in operator._schema.arguments:
        if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
            yield from (x for x in tree_leaves(kwargs[argument.name]) if isinstance(x, torch.Tensor))
