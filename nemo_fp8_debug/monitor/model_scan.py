"""Scan a model for GEMMs: choose the GEMMs to measure, and warn about unsupported GEMMs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..capture.attention import find_attentions
from ..capture.gemms import (
    Gemm,
    find_unsupported_gemms,
    is_observed_in_forward,
    list_scanned_gemms,
    match_gemms_by_name,
    require_matching_gemms,
)
from ..capture.optimizer_weights import MasterWeights
from ..capture.patching import find_emulation
from ..capture.scales import CastChooser
from ..capture.scan import ScannedModule, scan_modules
from ..core.arguments import format_value
from ..core.error_guard import ErrorGuard
from ..core.keys import ATTENTION, Key
from ..core.table import load_feature_modules
from ..coverage.scan import build_coverage_ledger
from ..distributed.shard_group import name_tensor_part
from ..errors import ConfigError
from ..options.config import Config
from .fingerprint import make_fingerprint


@dataclass(frozen=True)
class FeatureModules:
    """Modules other than GEMMs that a feature observes."""

    #: the modules, in the feature's own data structure
    modules: Sequence[Any] = ()
    #: kind of the module of each observed tensor
    kinds: Mapping[Key, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelScan:
    """The result of scanning a model."""

    #: the model, or its chunks
    roots: Sequence[nn.Module]
    #: GEMMs that hooks can see
    known: Sequence[Gemm]
    #: GEMMs inside torch.compile, which hooks cannot see
    compiled: Sequence[Gemm]
    #: GEMMs of `known` that are measured
    gemms: Sequence[Gemm]
    #: attention modules of Transformer Engine, which may run in FP8
    attentions: Sequence[Gemm]
    #: modules that features found, by feature
    features: Mapping[str, FeatureModules]
    scales: CastChooser
    #: master weights of the weights that are stored as FP8 codes
    masters: MasterWeights
    #: the run's settings
    fingerprint: Mapping[str, Any]

    @property
    def kinds_by_name(self) -> dict[str, str]:
        """Return the kind of each GEMM, attention and tensor by name. Kinds of attention modules have a prefix."""
        gemms = {g.name: g.kind for g in self.known} | {g.name: f"{ATTENTION}{g.kind}" for g in self.attentions}
        tensors = (item for found in self.features.values() for item in found.kinds.items())
        return gemms | {name_tensor_part(key): kind for key, kind in tensors}

    def drop_model_references(self) -> ModelScan:
        """Return a copy without references to the model."""
        return replace(self, roots=(), known=(), compiled=(), gemms=(), attentions=(), features={}, masters=MasterWeights())


def scan_model(model: Any, config: Config, ranks: int, errors: ErrorGuard) -> ModelScan:
    """Find the GEMMs of a model, and warn about GEMMs that are left out.

    Args:
        model: a module, or a sequence of modules.
        ranks: number of ranks of the run.

    Raises:
        ConfigError: `model` is not a model, or nothing in it matches `config`.
    """
    roots = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Iterable) else []
    if not roots or not all(isinstance(root, nn.Module) for root in roots):
        raise ConfigError(
            f"model is {format_value(model)}; Monitor takes a torch.nn.Module first, or the list of its chunks"
        )
    if config.eager and not hasattr(torch.compiler, "set_stance"):
        raise ConfigError(f"eager needs torch 2.6 or later, and this is {torch.__version__}")
    scanned = scan_modules(roots)
    found = [replace(g, compiled=g.compiled and not config.eager) for g in list_scanned_gemms(scanned, in_forward=True)]
    known = [g for g in found if not g.compiled]
    if ranks == 1:
        gemms = require_matching_gemms(found, config.layers)
        for patterns in filter(None, (config.dump, config.trigger_dump)):
            require_matching_gemms(found, patterns)
    else:  # a pipeline stage may contain no matching GEMM
        gemms = match_gemms_by_name(known, config.layers)
    _warn_of_what_is_left_out(scanned, gemms, errors)
    scales = CastChooser(known, config.parsed_recipe, config.recipe)
    setup = make_fingerprint(scanned, gemms, config, scales.description)
    setup["coverage"] = _coverage(scanned, gemms, config, errors)
    compiled, features = [g for g in found if g.compiled], dict[str, FeatureModules]()
    for module in load_feature_modules("observer"):
        if hasattr(module, "find_observed_modules"):
            features[module.NAME] = module.find_observed_modules(scanned, config, errors)
    return ModelScan(roots, known, compiled, gemms, find_attentions(scanned), features, scales, MasterWeights(), setup)


def _coverage(scanned: Sequence[ScannedModule], gemms: Sequence[Gemm], config: Config, errors: ErrorGuard) -> dict[str, Any]:
    try:
        return build_coverage_ledger(scanned, gemms, config.roles).summarize_coverage()
    except Exception as error:  # a module with odd attributes must not prevent recording
        if errors.raises:
            raise
        errors.warn(f"how much of the model is observed could not be read: {type(error).__name__}: {error}")
        return {}


def _warn_of_what_is_left_out(scanned: Sequence[ScannedModule], gemms: Sequence[Gemm], errors: ErrorGuard) -> None:
    if unknown := find_unsupported_gemms(scanned):
        first = next(iter(unknown))
        errors.warn(f"{len(unknown)} unsupported modules are left out, first {first}, a {unknown[first]}")
    untold = [g for g in gemms if not find_emulation(g.module) and not is_observed_in_forward(g)]
    if foreign := {g.name: why for g in untold if (why := g.backend.foreign(g.module))}:
        first = next(iter(foreign))
        errors.warn(f"how {len(foreign)} layers cast their operands is unknown (first {first}: {foreign[first]})")
    if stored := [g.name for g in gemms if "weight" in g.unobserved_roles]:
        errors.warn(f"W of {len(stored)} layers (first {stored[0]}) is stored in an unsupported format, and left out")
