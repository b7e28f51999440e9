"""Where values come from: of each tensor in a module's forward, from which of its parameters and inputs, and by what.

Every operator of torch that runs is looked at as it returns. What it gives is followed by memory, so that views need no
care. Only operators that are listed here keep what is known: anything else, such as a kernel of a library or a rounding,
ends in `UNTOLD`, and so does a type of 8 bits on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

#: how values were made of those they come from: not known; by arithmetic that does not quantize; moved, or cast to another
#: type of 16 bits or more
UNTOLD, COMPUTED, MOVED = range(3)
#: an addend from which on a sum may be there to round
_ROUNDING_ADDEND = 64.0


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: operators of torch that move values, or cast them
_MOVES = _names(
    "_pin_memory _reshape_copy _to_copy _unsafe_index cat clone constant_pad_nd copy copy_ embedding expand_copy fill_ "
    "flip gather index index_copy index_copy_ index_put index_put_ index_select masked_scatter masked_select new_zeros pad "
    "repeat roll scatter scatter_ select_scatter slice_scatter sort stack t_copy take topk view_copy zero_ zeros zeros_like"
)
#: and those that compute with them and round to no other grid
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
#: of which whole numbers are places
_AT_PLACES = _names("_grouped_mm index_add index_add_ index_reduce scatter_add scatter_add_ scatter_reduce")
#: which round if an addend is large
_SUMS = frozenset(("add", "add_", "sub", "sub_", "rsub"))
#: collectives move values between ranks
_COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")


@dataclass(frozen=True)
class Origin:
    """What is known of where values come from."""

    #: UNTOLD, COMPUTED or MOVED
    made: int
    #: names of parameters, and "" for inputs
    sources: frozenset[str] = frozenset()


_NOT_KNOWN = Origin(UNTOLD)
#: memory: a storage, and of one that holds several parameters where this one begins
_Memory = tuple[int, int]


class Dataflow:
    """The origins of tensors, by their memory. Holds none of them."""

    def __init__(self) -> None:
        # A weak reference keeps the number of a storage from being given out anew.
        self._known: dict[_Memory, tuple[Any, Origin]] = {}
        self._parts: dict[int, list[tuple[int, int]]] = {}

    def begin(self, tensors: Iterable[Any], source: str) -> None:
        """Say that tensors of 16 bits and more are a source, where nothing else is known of their memory."""
        for x in tensors:
            if isinstance(x, torch.Tensor) and _is_plain(x) and self.of(x) is None:
                self._note(x, Origin(MOVED, frozenset((source,))))

    def begin_parameter(self, x: torch.Tensor, name: str) -> None:
        """The same of a parameter, which may share a storage with others, as those of a sharding optimizer do."""
        size = x.numel() * x.element_size()
        if size and x.untyped_storage().nbytes() > size and self.of(x) is None:
            self._parts.setdefault(x.untyped_storage()._cdata, []).append((x.data_ptr(), x.data_ptr() + size))
        self.begin([x], name)

    def _memory(self, x: torch.Tensor) -> _Memory:
        number = x.untyped_storage()._cdata
        parts = self._parts.get(number)
        if not parts:
            return number, 0
        at = x.data_ptr()
        return number, next((start for start, end in parts if start <= at < end), -1)

    def of(self, x: torch.Tensor) -> Origin | None:
        """None: nothing is known."""
        found = self._known.get(self._memory(x))
        return None if found is None else found[1]

    def _note(self, x: torch.Tensor, origin: Origin) -> None:
        self._known[self._memory(x)] = StorageWeakRef(x.untyped_storage()), origin

    def follow(self, operator: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """An operator has returned."""
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
                elif x.dtype != mine[self._memory(x)]:  # the same bits, read as another type
                    self._note(x, untold)

    def _made(self, operator: Any, given: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Any) -> Origin:
        name = str(operator._schema.name).partition("::")[2]
        moves = name in _MOVES or operator.namespace in _COLLECTIVES
        # A mask chooses, and places are none of the values; other whole numbers may be codes.
        places = name != "_to_copy" and (moves or name in _AT_PLACES)
        counted = [x for x in given if x.is_floating_point() or not (places or x.dtype == torch.bool)]
        origins = [self.of(x) or _NOT_KNOWN for x in counted]
        sources = frozenset[str]().union(*(o.sources for o in origins))
        told = moves or (operator.namespace == "aten" and name in _ARITHMETIC and not _may_round(name, args, kwargs))
        if not told or not all(map(_is_plain, counted)):
            return Origin(UNTOLD, sources)
        how = min((o.made for o in origins), default=MOVED)
        return Origin(how if moves else min(how, COMPUTED), sources)


def _may_round(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether arguments make an operator one that rounds."""
    large = any(isinstance(a, (int, float)) and abs(a) >= _ROUNDING_ADDEND for a in args)
    return kwargs.get("rounding_mode") is not None or (name in _SUMS and large)


def _is_plain(x: torch.Tensor) -> bool:
    return x.is_floating_point() and x.element_size() >= 2


def _written(operator: Any, args: Sequence[Any], kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operator changes in place."""
    for argument, value in zip(operator._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (x for x in tree_leaves(value) if isinstance(x, torch.Tensor))
    for argument in operator._schema.arguments:
        if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
            yield from (x for x in tree_leaves(kwargs[argument.name]) if isinstance(x, torch.Tensor))
