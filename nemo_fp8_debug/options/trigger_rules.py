"""Rules of triggers. Each rule describes a condition that causes additional samples, such as a loss spike or a NaN."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.keys import RESULTS, ROLES, SHOWN_AS
from ..core.layer_names import find_aggregate_key, find_expert_aggregate, is_expert_aggregate
from ..core.sample import Sample
from ..core.text import format_number
from ..errors import ConfigError
from ..numerics.limits import FAR, FORMATS, LIMITS, find_most_exceeded_limit
from ..numerics.metric_names import METRICS

_RULE = re.compile(r"(?P<metric>\w+)(/(?P<role>\w+))?\s*(?P<sign>[<>])\s*(?P<limit>[-+.\deE]+)")


@dataclass(frozen=True)
class ThresholdRule:
    """A rule for a metric above or below a limit, in any tensor or in tensors of one role."""

    metric: str
    role: str | None
    sign: str
    limit: float

    def describe_violation(self, sample: Sample) -> str | None:
        """Describe the sample's first tensor whose metric is beyond the limit. Return None if there is no such tensor.

        Each expert is a tensor of its own. The aggregate over a layer's experts is ignored.
        """
        columns = sample.operand_columns
        rows = zip(columns["layer"], columns["role"], columns[self.metric], strict=True)
        past = [row for row in rows if not is_expert_aggregate(row[0]) and self._is_past(*row[1:])]
        if not past:
            return None
        layer, role, value = past[0]
        shown, limit = format_number(value, digits=4), format_number(self.limit)
        found = f"{self.metric} of {SHOWN_AS[role]} of {layer} is {shown} ({self.sign} {limit})"
        alike = (
            sum(find_aggregate_key(*row[:2]) == find_aggregate_key(layer, role) for row in past[1:])
            if find_expert_aggregate(layer)
            else 0
        )
        return f"{found}, and of {alike} more experts of the layer" if alike else found

    def _is_past(self, role: str, value: float | None) -> bool:
        sign = 1 if self.sign == ">" else -1
        return value is not None and self.role in (None, role) and (value - self.limit) * sign > 0


@dataclass(frozen=True)
class NonFiniteRule:
    """A rule for NaN or infinity in an operand. For the loss and the gradient norm, `Triggers` checks this itself."""

    def describe_violation(self, sample: Sample) -> str | None:
        """Describe the first operand in the order of execution that has NaN or infinity. Return None if all are finite."""
        return sample.describe_first_nonfinite()


@dataclass(frozen=True)
class LossSpikeRule:
    """A rule for a spike of the loss that is reduced over all ranks. `Triggers` checks this itself."""

    def describe_violation(self, sample: Sample) -> str | None:
        """Return None, because a single sample does not show a spike."""
        return None


@dataclass(frozen=True)
class EarlyWarningRule:
    """A rule for an operand beyond its healthy limits in two consecutive samples, or far beyond them in one sample.

    `Triggers` keeps the previous sample, and calls `describe_warning`.
    """

    def describe_violation(self, sample: Sample) -> str | None:
        """Return None, because the rule needs more than one sample."""
        return None

    def describe_warning(self, sample: Sample, before: Sample | None) -> str | None:
        """Describe the operand that is farthest beyond its limits. Return None if there is nothing to warn of.

        Each expert is a tensor of its own. The aggregate over a layer's experts is ignored.

        Args:
            before: the previous sample, or None if there is no sample to compare with.
        """
        strength, key = score_early_warning(sample, before)
        if strength <= 1 or key is None:
            return None
        _, metric, value = _times(sample)[key]
        (layer, role), limit = key, LIMITS[key[1]][metric]
        shown = format_number(value, digits=4)
        told = f"{metric} of {SHOWN_AS[role]} of {layer} is {shown}, which healthy runs keep within {format_number(limit)}"
        return f"early warning: {told}"


def score_early_warning(sample: Sample, before: Sample | None) -> tuple[float, tuple[str, str] | None]:
    """Return the largest early-warning score of all operands, and the operand that has this score.

    In each sample, take the largest ratio of an operand's metrics to their limits. The score is the smaller of the two
    ratios, or a third of the newer ratio if that is larger.

    Args:
        before: the previous sample, or None if there is no sample to compare with.

    Returns:
        The score (above 1, we warn), and the operand's layer and role, or None if no operand has limits.
    """
    earlier, strongest, found = _times(before), 0.0, None
    for key, (times, *_) in _times(sample).items():
        strength = max(min(times, earlier[key][0] if key in earlier else 0.0), times / FAR)
        if strength > strongest or found is None:
            found, strongest = key, strength
    return strongest, found


def _times(sample: Sample | None) -> dict[tuple[str, str], tuple[float, str, float]]:
    """Return the worst metric of each layer and role: its ratio to the limit, its name and its value."""
    if sample is None:
        return {}
    columns, found = sample.operand_columns, dict[tuple[str, str], tuple[float, str, float]]()
    for i, (layer, role) in enumerate(zip(columns["layer"], columns["role"], strict=True)):
        metric, times = find_most_exceeded_limit(
            role, {name: columns[name][i] for name in LIMITS.get(role, ())}, columns["n"][i]
        )
        if metric is not None and columns["format"][i] in FORMATS and not is_expert_aggregate(layer):
            found[layer, role] = times, metric, columns[metric][i]
    return found


#: descriptions of the correct value, for results that are not products
_OUGHT = {"reduction": "the sum of what ranks and micro-batches computed"}


@dataclass(frozen=True)
class WrongProductRule:
    """A rule for a GEMM that does not return the product of its operands, and for a wrong sum of gradients.

    This rule needs `verify_rows`.
    """

    def describe_violation(self, sample: Sample) -> str | None:
        """Describe the wrong result with the largest error. Return None if no result is wrong."""
        columns = sample.get_table("verification")
        wrong = [i for i, outcome in enumerate(columns.get("outcome", ())) if outcome == "beyond"]
        if not wrong:
            return None
        layer, product, rank, times = (
            columns[name][max(wrong, key=lambda i: columns["error_over_bound"][i])]
            for name in ("layer", "product", "rank", "error_over_bound")
        )
        told = f"{RESULTS[product]} of {layer} is not {_OUGHT.get(product, f'the product of its operands on rank {rank}')}"
        return f"{told} (error {format_number(times)} times its bound)"


Rule = ThresholdRule | NonFiniteRule | LossSpikeRule | EarlyWarningRule | WrongProductRule
#: rules without parameters, by name
_NAMED: Mapping[str, Callable[[], Rule]] = {
    "loss_spike": LossSpikeRule,
    "nonfinite": NonFiniteRule,
    "early_warning": EarlyWarningRule,
    "wrong_product": WrongProductRule,
}


def parse_trigger_rule(text: Any) -> Rule:
    """Parse a rule: `loss_spike`, `nonfinite`, `early_warning`, `wrong_product`, or a metric with a limit.

    Examples of limits: `underflow_pct > 20` and `sqnr_db/input < 15`.

    Raises:
        ConfigError: the text is not a rule.
    """
    if isinstance(text, str) and text in _NAMED:
        return _NAMED[text]()
    found = _RULE.fullmatch(text.strip()) if isinstance(text, str) else None
    try:
        if found and found["metric"] in METRICS and found["role"] in (None, *ROLES):
            return ThresholdRule(found["metric"], found["role"], found["sign"], float(found["limit"]))
    except ValueError:
        pass
    raise ConfigError(
        f"invalid trigger {text!r}: expected loss_spike, nonfinite, early_warning, wrong_product, or METRIC > LIMIT or "
        f"METRIC/ROLE < LIMIT with a metric of {', '.join(METRICS)} and a role of {', '.join(ROLES)}"
    )
