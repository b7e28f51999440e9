"""What is said of operands that a sample lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.error_guard import ErrorGuard
from ..core.keys import SHOWN_AS, Key

#: operands that a warning names, at the most
_NAMED = 4


def warn_of_lost(errors: ErrorGuard, step: int, lost: Mapping[str, Sequence[Key]]) -> None:
    """Operands whose hooks failed.

    Args:
        lost: by why.
    """
    for why, keys in lost.items():
        named = ", ".join(f"{SHOWN_AS[role]} of {layer}" for layer, role in keys[:_NAMED])
        more = f" and {len(keys) - _NAMED} more operands" if len(keys) > _NAMED else ""
        those = f"{named}{more} {'is' if len(keys) == 1 else 'are'}"
        message = f"{those} missing from the sample of step {step}: {why}"
        kinds = [f"{layer} {role} {why.partition(':')[0]}" for layer, role in keys]
        errors.warn(message, kind=kinds)


def warn_of_late_compiling(errors: ErrorGuard, names: Sequence[str]) -> None:
    """Layers that torch.compile was called on since the monitor was attached."""
    errors.warn(
        f"torch.compile was called after the monitor was attached: {len(names)} layers (first {names[0]}) "
        "run inside it, where a hook would change the graph, and are left out; to have them measured, run with "
        "nemo_fp8_debug without compiling them, or compile other parts of the model only",
        kind="compiled",
    )


def warn_of_transformed(errors: ErrorGuard, layer: str) -> None:
    """A layer that was called under a transform of torch.func."""
    errors.warn(
        f"{layer} is called under a transform of torch.func (vmap, grad, jvp); its calls there are not measured, "
        "and the same holds for other layers",
        kind="torch.func",
    )


def warn_of_unknown_cast(errors: ErrorGuard, layer: str, role: str, error: Exception) -> None:
    """An operand that its engine casts in a way that is not known."""
    reason = f"{error}. It is measured as if it were not quantized, with scale_source 'unknown'"
    what = f"{SHOWN_AS[role]} of {layer}"
    errors.warn(f"how the engine casts {what} is unknown: {reason}, and so are others like it", kind=str(error))


def warn_of_unread_cast(errors: ErrorGuard, layer: str, role: str, error: Exception) -> None:
    """An operand whose cast could not be read."""
    message = f"could not read how the engine casts {SHOWN_AS[role]} of {layer}; its scale_source is 'unknown'"
    errors.warn(f"{message}: {type(error).__name__}: {error}", kind=f"{layer} {role} {type(error)}")
