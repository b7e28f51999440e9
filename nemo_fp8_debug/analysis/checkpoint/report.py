"""What an audit found, in numbers and in sentences."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.arguments import quoted
from ...numerics.formats import FloatFormat

#: state of an FP8 weight that the checkpoint holds no scale for: its codes are taken as values
NO_SCALE = "no scale"


@dataclass
class ReadErrors:
    """What could not be read, each fault once with the weights it costs."""

    weights: dict[str, list[str]] = field(default_factory=dict)

    def add(self, fault: str, weight: str) -> None:
        """Note a fault, and the weight that it costs."""
        self.weights.setdefault(fault, []).append(weight)

    def sentences(self) -> list[str]:
        """Return a sentence for each fault."""
        return [
            f"{fault} (costs {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''})"
            for fault, names in self.weights.items()
        ]


@dataclass(frozen=True)
class Audit:
    """What was found in a checkpoint."""

    path: str
    format: str
    #: that of the weights under current scaling
    fp8_format: FloatFormat
    #: a row a weight, worst first
    rows: list[dict[str, Any]]
    #: tensors that are no GEMM weights, by kind
    left_out: Counter[str]
    #: what could not be read
    faults: list[str]

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values; null stands for what cannot be had."""
        return {
            "path": self.path,
            "format": self.format,
            "fp8_format": self.fp8_format.name,
            "verdict": self.verdict(),
            "left_out": dict(self.left_out),
            "faults": self.faults,
            "weights": self.rows,
        }

    def verdict(self) -> list[str]:
        """What the metrics say, a sentence each."""
        parts = [self._read(), self._without_scale(), self._nonfinite(), self._in_fp8(), self._stored(), self._in_bf16()]
        return [sentence for sentence in parts if sentence]

    def _read(self) -> str:
        values = sum(math.prod(row["shape"]) for row in self.rows)
        dtypes = ", ".join(f"{n} {dtype}" for dtype, n in Counter(row["dtype"] for row in self.rows).items())
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.left_out.items())
        left_out = f"; left out: {sum(self.left_out.values())} tensors that are no GEMM weights ({kinds})" if kinds else ""
        return f"Weights: {len(self.rows)}, values: {values:.4g} ({dtypes}){left_out}."

    def _without_scale(self) -> str:
        lost = [row["layer"] for row in self.rows if lacks_scale(row)]
        if not lost:
            return ""
        return (
            f"{len(lost)} of {len(self._stored_in_fp8())} FP8 weights have no stored scale: {quoted(lost)}. "
            "If the checkpoint lost their scales, a server loads wrong weights. The errors below leave these weights out."
        )

    def _nonfinite(self) -> str:
        bad = [row["layer"] for row in self.rows if row["nan"] or row["inf"]]
        return f"With NaN or infinity: {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}." if bad else ""

    def _in_fp8(self) -> str:
        """A model trained in higher precision, served in FP8."""
        errors = _errors(self.rows, "fp8_current")
        already = " (those stored in FP8: once more, to one scale a tensor)" if self._stored_in_fp8() else ""
        return f"Served in FP8 ({self.fp8_format.name}) under current scaling the weights change{already} by {errors}."

    def _stored_in_fp8(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["dtype"].startswith("float8")]

    def _stored(self) -> str:
        """Whether stored scales fit, and a model trained in FP8, served in BF16."""
        with_scale = [row for row in self.rows if row["fp8_stored"] and "scale" in row["fp8_stored"]]
        if not with_scale:
            return (
                "No weight has a stored scale to compare with, so whether FP8 was used in training is not known. If it was, "
                "with current scaling, serving in BF16 changes the weights by as much as serving in FP8 would."
            )
        states = Counter(row["fp8_stored"]["state"] for row in with_scale)
        said = ", ".join(f"{state} ({n})" for state, n in states.most_common())
        engine = [row for row in with_scale if not row["dtype"].startswith("float8")]
        served = (
            f" Served in FP8 with them the weights change by {_errors(engine, 'fp8_stored')}; served in BF16, a model that "
            "was trained in FP8 meets weights that differ by as much from those that these scales make in its forward pass."
        )
        return f"Stored scales of {len(with_scale)} weights: {said}." + (served if engine else "")

    def _in_bf16(self) -> str:
        wide = [row for row in self.rows if row["dtype"] != "bfloat16"]
        rounding = f"Served in BF16, weights of other dtypes ({len(wide)}) change by {_errors(wide, 'bf16')}."
        made = " What was lost when weights were stored in FP8 is not in the checkpoint." if self._stored_in_fp8() else ""
        return (rounding if wide else "Served in BF16 the weights are as stored.") + made


def lacks_scale(row: Mapping[str, Any]) -> bool:
    """Return True for an FP8 weight whose scale the checkpoint does not hold."""
    return bool((row["fp8_stored"] or {}).get("state") == NO_SCALE)


def _errors(rows: Sequence[Mapping[str, Any]], cast: str) -> str:
    """Return the median and worst relative error of a cast over weights. Leave out weights that lack their scale."""
    errors = {row["layer"]: row[cast]["relative_error"] for row in rows if not lacks_scale(row)}
    known = {layer: error for layer, error in errors.items() if error is not None}
    if not known:
        return "an unknown amount"
    worst = max(known, key=lambda layer: known[layer])
    return (
        f"{100 * statistics.median(known.values()):.3g}% (median relative error; worst {100 * known[worst]:.3g}%: {worst})"
    )
