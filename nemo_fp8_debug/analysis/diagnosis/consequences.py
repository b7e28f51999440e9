"""What operands show after the loss has diverged for another reason."""

from __future__ import annotations

from collections.abc import Sequence

from .rules.finding import Finding


def consequences(findings: Sequence[Finding], divergence_step: int | None, unit: str) -> list[str]:
    """That all operands are out of band after the loss, in a sentence; none if one is before.

    Args:
        divergence_step: step from which the loss diverges; None: it does not.
        unit: what steps are counted in.
    """
    since = [f.since for f in findings if f.rule == "operand" and f.since is not None]
    if divergence_step is None or not since or min(since) <= divergence_step:
        return []
    return [
        f"The first operand is out of band at {unit} {min(since)}, {min(since) - divergence_step} {unit}s after the loss: "
        "what operands show follows from the divergence."
    ]
