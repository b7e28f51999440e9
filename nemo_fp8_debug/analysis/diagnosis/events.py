"""What happened in a run, in order: an answer to what came first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .rules.finding import Finding

#: what a rule's finding is the beginning of; the rules that are left out are about the run as a whole
_BEGINS = {
    "learning rate": "the learning rate departs",
    "gradient norm": "the gradient norm grows",
    "weights": "the weights shrink",
    "optimizer steps": "the optimizer skips steps",
    "divergence": "the loss diverges",
    "reference": "the reference run's loss diverges",
    "multiplier": "gradients are multiplied by something else",
    "spikes": "the first spike of the loss",
}


def events(findings: Sequence[Finding], warning: tuple[int, float, str] | None = None) -> list[tuple[int, str]]:
    """Step, and what happened, the earliest first.

    Args:
        warning: step, score and operand of the first early warning.

    Example:
        >>> rise = Finding("learning rate", "learning_rate", "high", "...", since=130)
        >>> clipped = Finding("operand", "clipping", "medium", "...", layer="layers.0.fc1", role="input", since=160)
        >>> events([clipped, rise])
        [(130, 'the learning rate departs'), (160, 'X of layers.0.fc1: clipping')]
    """
    warned = [] if warning is None else [(warning[0], f"early warning: {warning[2]} is beyond what healthy runs do")]
    return sorted([*_events(findings), *warned], key=lambda event: event[0])


def _events(findings: Sequence[Finding]) -> Iterator[tuple[int, str]]:
    for found in findings:
        if found.since is None or found.cause == "none":
            continue
        if found.rule == "operand":
            yield found.since, f"{found.operand}: {found.cause.replace('_', ' ')}"
        elif found.rule == "product":
            yield found.since, f"a product of {found.layer} is wrong"
        elif found.rule == "replicas":
            yield found.since, f"ranks hold different copies of a tensor of {found.layer}"
        elif found.rule == "nonfinite":
            yield found.since, f"the first NaN or infinity, in {found.operand or 'no sampled operand'}"
        elif found.rule == "gradient norm" and found.cause == "multiplier":
            yield found.since, "the gradient norm moves to another level"
        elif found.rule in _BEGINS:
            yield found.since, _BEGINS[found.rule]
