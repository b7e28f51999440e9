"""Do versions or features that have been at fault elsewhere explain the run?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...runs.settings import differences
from .finding import Finding
from .known_issues import KNOWN, section

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


def settings(run: Mapping[str, Any], baseline: Mapping[str, Any] | None, from_the_start: bool) -> Iterator[Finding]:
    """What fingerprints tell.

    Args:
        run: fingerprint.
        baseline: likewise.
        from_the_start: whether the loss is off from the start, as with faults of software.
    """
    for known in KNOWN:
        if known.holds(run) and not (baseline and known.holds(baseline)):
            confidence = "high" if baseline and from_the_start else "medium"
            yield Finding("known", "software", confidence, f"{known.what} ({known.source})", known.advice)
    if engine := _without_effect(run):
        yield Finding("engine", "software", "high", engine, "Build the model with Transformer Engine's layers.")
    on = {name: value for name, value in section(run, "risky_features_on").items() if value and name in _SWITCH_OFF}
    before = section(baseline or {}, "risky_features_on")
    new = {_SWITCH_OFF[name] for name in on if not before.get(name)}
    compared = baseline is not None and "risky_features_on" in baseline
    if new and (compared or from_the_start):
        which = ", ".join(sorted(new))
        where = "on here and off in the baseline" if compared else "on"
        confidence = "medium" if compared and from_the_start else "low"
        yield Finding("features", "software", confidence, f"{which}: {where}", "Switch it off and run again.")
    if baseline is not None:
        yield from _versions(run, baseline)


def _without_effect(fingerprint: Mapping[str, Any]) -> str | None:
    engine = str(section(fingerprint, "recipe").get("fp8_engine", ""))
    return engine if engine.startswith("none:") else None


def _versions(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> Iterator[Finding]:
    both = differences(baseline, run).drop_nulls()
    differing = [row for row in both.iter_rows(named=True) if row["setting"].startswith("versions.")]
    if differing:
        told = ", ".join(
            f"{row['setting'].removeprefix('versions.')} {row['baseline']} -> {row['run']}" for row in differing
        )
        yield Finding("versions", "software", "low", f"other versions than in the baseline: {told}", "Run both on the same.")
