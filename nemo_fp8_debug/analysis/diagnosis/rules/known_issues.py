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


KNOWN = (
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
