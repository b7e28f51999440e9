"""Find the modules of a model that are GEMMs, and give them the same names in all frameworks and on all ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ..core.arguments import quote_names
from ..core.layer_names import compile_layer_patterns
from ..errors import ConfigError
from .backends import BACKENDS, FrameworkBackend
from .backends.base import is_plain_tensor, read_raw_weight
from .backends.in_forward import is_weight_computed
from .backends.parallel import find_first_expert_index
from .patching import find_emulation
from .scan import ScannedModule, scan_modules


@dataclass(frozen=True)
class Gemm:
    """A module that multiplies its input by a weight."""

    #: global, stable name: without wrappers, and with the layer's 0-based index over all pipeline stages
    name: str
    module: nn.Module
    backend: FrameworkBackend
    #: whether the module runs inside torch.compile, where a hook would become part of the graph and change it
    compiled: bool = False
    #: part of the module that is this GEMM, or "" if the module has only one GEMM
    part: str = ""

    @property
    def kind(self) -> str:
        """Kind of the GEMM within its layer, such as `linear_fc2`: the last part of its name, without an expert's number."""
        name = self.name.rpartition(".")[0] if self.part.isdigit() else self.name
        return name.rpartition(".")[2]

    @property
    def unobserved_roles(self) -> Collection[str]:
        """Roles that hooks cannot observe."""
        return self.backend.unseen(self.module, self.part)


def find_gemms(roots: Sequence[nn.Module], in_forward: bool = False) -> list[Gemm]:
    """Return every GEMM of a model that a backend supports, in the order of modules.

    Args:
        roots: the model, or its chunks if a virtual pipeline splits it.
        in_forward: whether to include GEMMs whose operands exist only inside their module's forward.
    """
    return list_scanned_gemms(scan_modules(roots), in_forward)


def list_scanned_gemms(scanned: Iterable[ScannedModule], in_forward: bool = False) -> list[Gemm]:
    """Return the result of `find_gemms` for a model that is already scanned."""
    return [
        Gemm(one.global_name + _part_of_name(part, len(parts)), one.module, backend, one.compiled, part)
        for one in scanned
        if (backend := next((h for h in BACKENDS if h.owns(one.module)), None)) and (in_forward or not backend.in_forward)
        for parts in (backend.parts(one.module),)
        for part in parts
    ]


def is_observed_in_forward(gemm: Gemm) -> bool:
    """Return True if operands are observed inside the module's forward, at the torch operators that multiply them."""
    if gemm.backend.in_forward:
        return True
    if find_emulation(gemm.module):
        return False
    if is_weight_computed(gemm.module):
        return True
    # The replacement may multiply in a function of autograd, inside which operators show no gradient.
    if gemm.backend.explain_replaced_product():
        return False
    foreign = not gemm.backend.has_own_fp8 and bool(gemm.backend.foreign(gemm.module))
    return foreign and is_plain_tensor(read_raw_weight(gemm.module))


def _part_of_name(part: str, parts: int) -> str:
    """Return the suffix that a part adds to the GEMM's name. Experts are numbered over all ranks."""
    number = str(int(part) + find_first_expert_index(parts)) if part.isdigit() else part
    return f".{number}" if number else ""


def find_unsupported_gemms(scanned: Iterable[ScannedModule]) -> dict[str, str]:
    """Return the class of each unsupported module, by name.

    These modules have a matrix and belong to a framework that quantizes on its own, but no backend supports them.
    """
    found = {one.global_name: one.module for one in scanned if one.holder}
    return {
        name: f"{type(module).__module__}.{type(module).__qualname__}"
        for name, module in found.items()
        if type(module).__module__.partition(".")[0] in ("transformer_engine", "torchao")
        and any(p is not None and p.dim() in (2, 3) for p in module._parameters.values())
        and not any(h.owns(module) for h in BACKENDS)
    }


def match_gemms_by_name(gemms: Iterable[Gemm], patterns: Sequence[str] | None) -> list[Gemm]:
    """Return the GEMMs whose names match a pattern. The list may be empty."""
    matches = compile_layer_patterns(patterns)
    return [g for g in gemms if matches(g.name)]


def require_matching_gemms(gemms: Iterable[Gemm], patterns: Sequence[str] | None) -> list[Gemm]:
    """Return the GEMMs whose names match a pattern.

    Raises:
        ConfigError: no name matches. The message lists similar names.
    """
    gemms = list(gemms)
    chosen = match_gemms_by_name(gemms, patterns)
    if not gemms:
        known = ", ".join(h.name for h in BACKENDS)
        raise ConfigError(f"the model has no supported GEMM layer (supported: {known})")
    if not chosen:
        names = quote_names(sorted({g.name for g in gemms}))
        raise ConfigError(f"no GEMM layer matches {list(patterns or ())}; the model has {names}")
    if all(g.compiled for g in chosen):
        raise ConfigError(
            f"{chosen[0].name!r} and all other chosen layers run inside torch.compile, where a hook would change the graph; "
            "compile after the run with nemo_fp8_debug, or only parts of the model"
        )
    return [g for g in chosen if not g.compiled]


def drop_end_layers(gemms: Sequence[Gemm], first: int, last: int) -> list[Gemm]:
    """Return all GEMMs except those of the first `first` and last `last` transformer layers, by `layers.N` in their names.

    Raises:
        ConfigError: no layer is left.
    """
    number = {g.name: int(found[1]) for g in gemms if (found := re.search(r"(?:^|\.)layers\.(\d+)\.", g.name))}
    layers = sorted(set(number.values()))
    kept = set(layers[first : len(layers) - last])
    chosen = [g for g in gemms if g.name not in number or number[g.name] in kept]
    if not chosen:
        raise ConfigError(
            f"{first} first and {last} last layers stay in BF16, which leaves none of {len(layers)} to quantize"
        )
    return chosen
