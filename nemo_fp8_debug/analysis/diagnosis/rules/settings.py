"""Settings: versions and features that have broken other runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...runs.settings import differences
from ..facts import Facts, Records, fact
from ..finding import Finding
from ..known_issues import KNOWN, section
from ..rule import rule

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
    """The settings of the run, and of the baseline; None: there is none."""

    run: Mapping[str, Any]
    baseline: Mapping[str, Any] | None


@fact
def fingerprints(records: Records) -> Fingerprints:
    """Return the settings that records carry."""
    return Fingerprints(records.run.fingerprint, None if records.baseline is None else records.baseline.fingerprint)


@rule("settings", ("software",), (fingerprints,))
def find_settings(facts: Facts) -> Iterator[Finding]:
    """Name known bugs of the versions in use, FP8 that has no effect, and risky features that the baseline has not.

    Example: Transformer Engine 1.7 with FP8 parameters, whose amax history was reduced over the wrong group.
    """
    run, baseline = fingerprints(facts)
    from_the_start = diverged_at_the_start(facts)
    for known in KNOWN:
        if known.holds(run) and not (baseline and known.holds(baseline)):
            strength = "clear" if baseline and from_the_start else "hint"
            evidence = f"{known.what} ({known.source})"
            yield Finding("known issue", "software", strength, evidence, advice=known.advice)
    engine = str(section(run, "recipe").get("fp8_engine", ""))
    if engine.startswith("none:"):
        advice = "Build the model with Transformer Engine's layers."
        yield Finding("no FP8", "software", "hint", engine.removeprefix("none:").strip(), advice=advice)
    on = {name for name, value in section(run, "risky_features_on").items() if value and name in _SWITCH_OFF}
    before = section(baseline or {}, "risky_features_on")
    new = sorted({_SWITCH_OFF[name] for name in on if not before.get(name)})
    compared = baseline is not None and "risky_features_on" in baseline
    if new and (compared or from_the_start):
        where = "on here and off in the baseline" if compared else "on"
        evidence = f"{', '.join(new)}: {where}"
        yield Finding("features", "software", "hint", evidence, advice="Switch it off and run again.")
    if baseline is not None:
        both = differences(baseline, run).drop_nulls()
        rows = [row for row in both.iter_rows(named=True) if row["setting"].startswith("versions.")]
        told = [f"{row['setting'].removeprefix('versions.')} {row['baseline']} -> {row['run']}" for row in rows]
        if told:
            evidence = f"other versions than in the baseline: {', '.join(told)}"
            yield Finding("versions", "software", "hint", evidence, advice="Run both on the same versions.")


def diverged_at_the_start(facts: Facts) -> bool:
    """Return True if the loss is off from the start, as running medians can tell."""
    run, since = facts.loss.run, facts.loss.harmful_since
    return since is not None and bool((run.steps < since).sum() <= run.half)
