"""Versions and combinations of features that have made runs fail, each with where it was reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

Fingerprint = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """A report, and which runs it is about."""

    what: str
    #: an issue or a pull request
    source: str
    advice: str
    holds: Callable[[Fingerprint], bool]


def section(fingerprint: Fingerprint, name: str) -> Fingerprint:
    """A section; empty where a record, as one made from others' logs, has none."""
    found = fingerprint.get(name)
    return found if isinstance(found, Mapping) else {}


def _version(fingerprint: Fingerprint, package: str) -> Version | None:
    try:
        return Version(section(fingerprint, "versions")[package])
    except (KeyError, InvalidVersion, TypeError):
        return None


def _option(fingerprint: Fingerprint, name: str) -> Any:
    return section(fingerprint, "backend_options").get(name) or section(fingerprint, "risky_features_on").get(name)


def _te_before(fingerprint: Fingerprint, fixed: str) -> bool:
    """Whether Transformer Engine quantizes in this run and is older than a release."""
    version = _version(fingerprint, "transformer-engine")
    return version is not None and version < Version(fixed) and bool(_option(fingerprint, "fp8"))


def _te_1_7(fingerprint: Fingerprint) -> bool:
    version = _version(fingerprint, "transformer-engine")
    unused = str(section(fingerprint, "recipe").get("fp8_engine", "")).startswith(("none", "emulation"))
    return version is not None and version.release[:2] == (1, 7) and not unused


def _mxfp8(fingerprint: Fingerprint) -> bool:
    return "mxfp8" in str(_option(fingerprint, "fp8_recipe"))


def _mxfp8_parameters_without_overlap(fingerprint: Fingerprint) -> bool:
    gathered = _option(fingerprint, "fp8_param_gather") or _option(fingerprint, "fp8_param")
    overlapped = _option(fingerprint, "overlap_param_gather") and _option(fingerprint, "overlap_grad_reduce")
    return bool(_mxfp8(fingerprint) and gathered and not overlapped)


def _mxfp8_gathered_in_the_optimizer(fingerprint: Fingerprint) -> bool:
    return bool(_mxfp8(fingerprint) and _option(fingerprint, "overlap_param_gather_with_optimizer_step"))


def _fp4_over_context_parallel_ranks(fingerprint: Fingerprint) -> bool:
    ranks = _option(fingerprint, "context_parallel_size")
    return bool(_option(fingerprint, "fp4")) and isinstance(ranks, int) and ranks > 1


def _fp8_recomputed_outside(fingerprint: Fingerprint) -> bool:
    modules = str(_option(fingerprint, "recompute_modules") or "")
    selective = "selective" in str(_option(fingerprint, "recompute_granularity"))  # the modules have a default
    return selective and bool(_option(fingerprint, "fp8")) and any(name in modules for name in ("core_attn", "gdn"))


def _recomputed_with_delayed_scales(fingerprint: Fingerprint) -> bool:
    return _te_before(fingerprint, "1.12") and bool(_option(fingerprint, "recompute_granularity"))


def _recomputed_in_a_pipeline(fingerprint: Fingerprint) -> bool:
    stages = _option(fingerprint, "pipeline_model_parallel_size")
    full = "full" in str(_option(fingerprint, "recompute_granularity"))
    return _te_before(fingerprint, "1.4") and full and isinstance(stages, int) and stages > 1


def _blockwise_experts(fingerprint: Fingerprint) -> bool:
    return "blockwise" in str(_option(fingerprint, "fp8_recipe")) and bool(_option(fingerprint, "num_moe_experts"))


def _gathers_quantized_parameters(fingerprint: Fingerprint) -> bool:
    """Whether parameters are kept in a format with copies of their own for rows and columns, and gathered ahead."""
    by_block = any(recipe in str(_option(fingerprint, "fp8_recipe")) for recipe in ("mxfp8", "blockwise"))
    fp8 = by_block and (_option(fingerprint, "fp8_param_gather") or _option(fingerprint, "fp8_param"))
    fp4 = _option(fingerprint, "fp4_param_gather") or _option(fingerprint, "fp4_param")
    return bool((fp8 or fp4) and _option(fingerprint, "overlap_param_gather"))


def _gathered_from_the_gradient_buffer(fingerprint: Fingerprint) -> bool:
    reused = _option(fingerprint, "reuse_grad_buf_for_mxfp8_param_ag")
    return bool(reused and _mxfp8(fingerprint) and _option(fingerprint, "overlap_param_gather"))


def _multi_token_prediction_recomputed(fingerprint: Fingerprint) -> bool:
    full = "full" in str(_option(fingerprint, "recompute_granularity"))
    return full and bool(_option(fingerprint, "fp8")) and bool(_option(fingerprint, "mtp_num_layers"))


KNOWN = (
    Known(
        "Evaluation between training steps leaves parameters in FP8 or FP4 stale if gathering them is overlapped",
        "Megatron-LM #4562",
        "Take a Megatron-LM that has the fix, or switch overlap_param_gather off, or evaluate in a run of its own.",
        _gathers_quantized_parameters,
    ),
    Known(
        "MXFP8 parameters that are gathered through the gradients' buffer become stale or zero when a checkpoint is saved",
        "Megatron-LM #5236",
        "Take a Megatron-LM that has the fix, or switch reuse_grad_buf_for_mxfp8_param_ag off.",
        _gathered_from_the_gradient_buffer,
    ),
    Known(
        "Full recomputation of multi-token prediction layers drops gradients under FP8",
        "Megatron-LM #4765, fixed by #4593",
        "Take a Megatron-LM that has the fix, or recompute selectively.",
        _multi_token_prediction_recomputed,
    ),
    Known(
        "Blocks of gradients that are all zero, as of experts without tokens, get an infinite scale under blockwise FP8",
        "Megatron-LM #7523",
        "Give the recipe's fp8_quant_bwd_grad an amax_epsilon such as 1e-12.",
        _blockwise_experts,
    ),
    Known(
        "Scales of gradients are not updated if activations are recomputed, before Transformer Engine 1.12",
        "TransformerEngine #1190, fixed by #1254",
        "Take Transformer Engine 1.12 or later, or switch recomputation off.",
        _recomputed_with_delayed_scales,
    ),
    Known(
        "Full recomputation in a pipeline multiplies by empty FP8 weights, before Transformer Engine 1.4",
        "TransformerEngine #539, fixed by #646",
        "Take Transformer Engine 1.4 or later, or switch recomputation off.",
        _recomputed_in_a_pipeline,
    ),
    Known(
        "MXFP8 with parameters gathered during the optimizer's step gives a gradient norm of NaN",
        "Megatron-Bridge #1771, worked around in #2014",
        "Switch overlap_param_gather_with_optimizer_step off.",
        _mxfp8_gathered_in_the_optimizer,
    ),
    Known(
        "NVFP4 over context-parallel ranks gives a gradient norm of NaN under Megatron-Bridge",
        "Megatron-Bridge #2051, fixed by #2052",
        "Take a Megatron-Bridge that has the fix, or one context-parallel rank.",
        _fp4_over_context_parallel_ranks,
    ),
    Known(
        "Attention that is recomputed outside of the FP8 context runs in BF16 the second time",
        "Megatron-LM #7538",
        "Take core_attn and gdn out of recompute_modules, or a Megatron-LM that has the fix.",
        _fp8_recomputed_outside,
    ),
    Known(
        "MXFP8 with gradients in E5M2 (`hybrid`) diverges and lowers downstream scores",
        "Megatron-Bridge #638",
        "Use E4M3 for all operands (`fp8='e4m3'`).",
        lambda fingerprint: _mxfp8(fingerprint) and _option(fingerprint, "fp8") == "hybrid",
    ),
    Known(
        "MXFP8 parameters without overlapped gradient reduction and parameter gathering give NaN",
        "Megatron-LM #2272, fixed by #4769",
        "Switch FP8 parameters off, or both overlaps on, or take a Megatron-LM that has the fix.",
        _mxfp8_parameters_without_overlap,
    ),
    Known(
        "Transformer Engine 1.7 multiplies later micro-batches by a wrong FP8 copy of the weights",
        "TransformerEngine #1047",
        "Take a later Transformer Engine, or 1.2.1, or switch the caching of FP8 weights off.",
        _te_1_7,
    ),
)
