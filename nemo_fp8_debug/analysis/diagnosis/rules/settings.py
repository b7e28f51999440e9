"""A rule about versions and features that have broken other runs, and the list of the bug reports that the rule uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from ...runs.settings import list_setting_differences
from ..facts import DiagnosedRecords, Facts, define_fact
from ..finding import Finding
from ..rule import register_rule

Fingerprint = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """A bug report, and a test for the runs to which the report applies."""

    what: str
    #: the issue or pull request
    source: str
    advice: str
    holds: Callable[[Fingerprint], bool]


def read_section(fingerprint: Fingerprint, name: str) -> Fingerprint:
    """Return a section of a fingerprint, or an empty section if it is missing, as in records that were imported from
    logs.
    """
    found = fingerprint.get(name)
    return found if isinstance(found, Mapping) else {}


def _version(fingerprint: Fingerprint, package: str) -> Version | None:
    try:
        return Version(read_section(fingerprint, "versions")[package])
    except (KeyError, InvalidVersion, TypeError):
        return None


def _option(fingerprint: Fingerprint, name: str) -> Any:
    return read_section(fingerprint, "backend_options").get(name) or read_section(fingerprint, "risky_features_on").get(name)


def _te_before(fingerprint: Fingerprint, fixed: str) -> bool:
    """Return True if Transformer Engine quantizes in this run and is older than the release `fixed`."""
    version = _version(fingerprint, "transformer-engine")
    return version is not None and version < Version(fixed) and bool(_option(fingerprint, "fp8"))


def _te_1_7(fingerprint: Fingerprint) -> bool:
    version = _version(fingerprint, "transformer-engine")
    unused = str(read_section(fingerprint, "recipe").get("fp8_engine", "")).startswith(("none", "emulation"))
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
    selective = "selective" in str(_option(fingerprint, "recompute_granularity"))  # the modules to recompute have a default
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
    """Return True if parameters are stored in a format with separate row-wise and column-wise copies, and gathered in
    advance.
    """
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


def _is_between(fingerprint: Fingerprint, package: str, first: str, fixed: str) -> bool:
    """Return True if a package is at least as new as the release `first` and older than the release `fixed`."""
    version = _version(fingerprint, package)
    return version is not None and Version(first) <= version < Version(fixed)


def _is_parallel(fingerprint: Fingerprint, *kinds: str) -> bool:
    """Return True if each of these kinds of parallelism has several ranks."""
    ranks = [_option(fingerprint, f"{kind}_parallel_size") for kind in kinds]
    return all(isinstance(number, int) and number > 1 for number in ranks)


def _uses_deepspeed(fingerprint: Fingerprint) -> bool:
    """Return True if the model is a DeepSpeed engine. It is not enough that the package is installed."""
    return "DeepSpeed" in str(read_section(fingerprint, "model").get("class", ""))


def _averages_twice(fingerprint: Fingerprint) -> bool:
    return _uses_deepspeed(fingerprint) and _is_between(fingerprint, "deepspeed", "0.17.6", "0.18.3")


def _leaks_last_micro_batch(fingerprint: Fingerprint) -> bool:
    return _uses_deepspeed(fingerprint) and _is_between(fingerprint, "deepspeed", "0.18.6", "0.18.11")


def _has_long_code_table(fingerprint: Fingerprint) -> bool:
    return _is_between(fingerprint, "bitsandbytes", "0.36", "0.41.1")


def _overlaps_with_te_2(fingerprint: Fingerprint) -> bool:
    return _is_between(fingerprint, "transformer-engine", "2.0", "2.2") and bool(_option(fingerprint, "tp_comm_overlap"))


def _scales_norm_gradients(fingerprint: Fingerprint) -> bool:
    ranks = _is_parallel(fingerprint, "tensor_model", "context")
    return ranks and bool(_option(fingerprint, "fp8")) and _is_between(fingerprint, "transformer-engine", "1.13", "1.14")


def _fuses_experts_of_hybrid(fingerprint: Fingerprint) -> bool:
    hybrid = _option(fingerprint, "fp8") == "hybrid"
    return bool(_mxfp8(fingerprint) and hybrid and _option(fingerprint, "num_moe_experts"))


def _captured_with_shared_buffer(fingerprint: Fingerprint) -> bool:
    captured = _option(fingerprint, "cuda_graph_impl") == "local"
    return bool(captured) and _gathered_from_the_gradient_buffer(fingerprint)


def _rounds_to_zero(fingerprint: Fingerprint) -> bool:
    """Return True if NVFP4 runs on a GPU that has no instruction for stochastic rounding."""
    capability = str(read_section(fingerprint, "devices").get("compute_capability", ""))
    return bool(_option(fingerprint, "fp4")) and capability in ("12.0", "12.1")


def _fused_loss_of_te(fingerprint: Fingerprint) -> bool:
    fused = _option(fingerprint, "cross_entropy_loss_fusion") and _option(fingerprint, "cross_entropy_fusion_impl") == "te"
    version = _version(fingerprint, "transformer-engine")
    return bool(fused) and version is not None and version.release[:2] <= (2, 5)


KNOWN = (
    Known(
        "ZeRO stage 2 computes wrong gradients, whose norm is about a third, from 0.17.6 to 0.18.2",
        "DeepSpeed #7718, fixed in 0.18.3",
        "Take DeepSpeed 0.18.3 or later, or another ZeRO stage.",
        _averages_twice,
    ),
    Known(
        "BF16 with ZeRO stage 1 and FP32 accumulation leaves out the last micro-batch when it reduces, 0.18.6 to 0.18.10",
        "DeepSpeed #7985",
        "Take a DeepSpeed that has the fix, or another ZeRO stage.",
        _leaks_last_micro_batch,
    ),
    Known(
        "8-bit optimizers keep their states in a wrong table of codes, from bitsandbytes 0.36 to 0.41.0",
        "bitsandbytes #659, fixed in 0.41.1",
        "Take bitsandbytes 0.41.1 or later, or an optimizer whose states have 32 bits.",
        _has_long_code_table,
    ),
    Known(
        "Overlapped tensor-parallel communication gives wrong weight gradients in Transformer Engine 2.0 and 2.1",
        "TransformerEngine #1616",
        "Switch tp_comm_overlap off, or take a later Transformer Engine.",
        _overlaps_with_te_2,
    ),
    Known(
        "With FP8, tensor and context parallelism, gradients of norms are multiplied by the number of tensor-parallel ranks",
        "Megatron-LM #1528, seen with Transformer Engine 1.13",
        "Take a later Transformer Engine, or one context-parallel rank.",
        _scales_norm_gradients,
    ),
    Known(
        "Fused experts read E5M2 gradients of MXFP8 (`hybrid`) as E4M3, which scales them down by up to 2^-7",
        "TransformerEngine #3342, fixed by #3352",
        "Use E4M3 for all operands (`fp8='e4m3'`).",
        _fuses_experts_of_hybrid,
    ),
    Known(
        "MXFP8 parameters are zero in the first iteration of a graph of the full iteration",
        "Megatron-Bridge #3076",
        "Take a Megatron-Bridge that has the fix, or switch reuse_grad_buf_for_mxfp8_param_ag off.",
        _captured_with_shared_buffer,
    ),
    Known(
        "After an evaluation gradients are added to MXFP8 parameters that were left in their buffer",
        "Megatron-LM #5464, #5487",
        "Take a Megatron-LM that has the fix, or switch reuse_grad_buf_for_mxfp8_param_ag off.",
        _gathered_from_the_gradient_buffer,
    ),
    Known(
        "Stochastic rounding of NVFP4 gradients returns zeros on GPUs of compute capability 12.0 and 12.1",
        "TransformerEngine #3281",
        "Take a Transformer Engine that has the fix, or set NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1.",
        _rounds_to_zero,
    ),
    Known(
        "Transformer Engine's fused cross entropy returns gradients of zero, up to 2.5",
        "Megatron-LM #1750, fixed by TransformerEngine #2139",
        "Take a Transformer Engine that has the fix, or another cross_entropy_fusion_impl.",
        _fused_loss_of_te,
    ),
    Known(
        "Activation inputs are stored in FP8 without a scale: small values become zero and large ones infinite",
        "Megatron-LM #1751, #1753",
        "Switch activation_func_fp8_input_store off.",
        lambda fingerprint: bool(_option(fingerprint, "activation_func_fp8_input_store")),
    ),
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


_SWITCH_OFF = {
    "cpu_offloading": "CPU offloading",
    "fine_grained_activation_offloading": "activation offloading",
    "fp8_param": "FP8 parameters",
    "fp8_param_gather": "FP8 parameters",
    "fp8_dot_product_attention": "FP8 attention",
    "fp8_multi_head_attention": "FP8 attention",
    "tp_comm_overlap": "overlapped tensor-parallel communication",
    "overlap_p2p_comm": "overlapped pipeline communication",
    "overlap_grad_reduce": "overlapped gradient reduction",
    "overlap_param_gather": "overlapped parameter gathering",
}


class Fingerprints(NamedTuple):
    """The settings of the run and of the baseline, which may be None."""

    run: Mapping[str, Any]
    baseline: Mapping[str, Any] | None


@define_fact
def fingerprints(records: DiagnosedRecords) -> Fingerprints:
    """Return the settings in the records."""
    return Fingerprints(records.run.fingerprint, None if records.baseline is None else records.baseline.fingerprint)


@register_rule("settings", ("software",), (fingerprints,))
def find_settings(facts: Facts) -> Iterator[Finding]:
    """Name known bugs of the versions in use, FP8 options without effect, and risky features that are off in the baseline.

    Example: Transformer Engine 1.7 reduced the amax history of FP8 parameters over the wrong group.
    """
    run, baseline = fingerprints(facts)
    from_the_start = diverged_at_the_start(facts)
    for known in KNOWN:
        if known.holds(run) and not (baseline and known.holds(baseline)):
            strength = "clear" if baseline and from_the_start else "hint"
            evidence = f"{known.what} ({known.source})"
            yield Finding("known issue", "software", strength, evidence, advice=known.advice)
    engine = str(read_section(run, "recipe").get("fp8_engine", ""))
    if engine.startswith("none:"):
        advice = "Build the model with Transformer Engine's layers."
        yield Finding("no FP8", "software", "hint", engine.removeprefix("none:").strip(), advice=advice)
    on = {name for name, value in read_section(run, "risky_features_on").items() if value and name in _SWITCH_OFF}
    before = read_section(baseline or {}, "risky_features_on")
    new = sorted({_SWITCH_OFF[name] for name in on if not before.get(name)})
    compared = baseline is not None and "risky_features_on" in baseline
    if new and (compared or from_the_start):
        where = "on here and off in the baseline" if compared else "on"
        evidence = f"{', '.join(new)}: {where}"
        yield Finding("features", "software", "hint", evidence, advice="Switch it off and run again.")
    if baseline is not None:
        both = list_setting_differences(baseline, run).drop_nulls()
        rows = [row for row in both.iter_rows(named=True) if row["setting"].startswith("versions.")]
        told = [f"{row['setting'].removeprefix('versions.')} {row['baseline']} -> {row['run']}" for row in rows]
        if told:
            evidence = f"other versions than in the baseline: {', '.join(told)}"
            yield Finding("versions", "software", "hint", evidence, advice="Run both on the same versions.")


def diverged_at_the_start(facts: Facts) -> bool:
    """Return True if the harm begins at the start of the run, within half a window of the loss's running median."""
    run, since = facts.loss.run, facts.loss.harm_onset_step
    return since is not None and bool((run.steps < since).sum() <= run.half)
