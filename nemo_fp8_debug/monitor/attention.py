"""FP8 attention in a sampled step: what is captured of it, and what is said if nothing is."""

from __future__ import annotations

from collections.abc import Collection

from ..capture.attention import AttentionCapture
from ..capture.backends.base import unknown_cast
from ..capture.dispatcher import Dispatcher
from ..capture.gemms import matching
from ..capture.operand_guard import Fault
from ..capture.operands import Operand
from ..core.error_guard import ErrorGuard
from ..core.keys import ATTENTION_BACKWARD, ATTENTION_FORWARD, Key
from ..options.config import Config
from .model_scan import ModelScan


def attention_capture(
    model: ModelScan,
    compiled: Collection[int],
    plan: Config,
    operands: dict[Key, Operand],
    lose: Fault,
    dispatcher: Dispatcher,
) -> AttentionCapture | None:
    """Look at attentions from now on; None: there is none to look at.

    Args:
        compiled: as `compiled_by_now` has them.
        operands: what is captured in the step; those of attention are added.
        lose: told of a fault.
        dispatcher: of the step.
    """
    if not (found := matching(model.attentions, plan.layers)):
        return None
    found = [gemm for gemm in found if id(gemm.module) not in compiled]
    roles = [*(ATTENTION_FORWARD if "input" in plan.roles else ())]
    roles += ATTENTION_BACKWARD if "grad_output" in plan.roles else ()
    sinks: dict[Key, Operand] = {}
    if model.scales.auto:
        sinks = {(g.name, role): Operand(g, role, unknown_cast(role)) for g in found for role in roles}
    operands |= sinks
    capture = AttentionCapture(found, sinks, lose, dispatcher)
    capture.subscribe()
    return capture


def warn_of_unseen(capture: AttentionCapture | None, errors: ErrorGuard) -> None:
    """Attentions that ran in FP8 and were not observed."""
    if capture is None or not (names := list(capture.unseen)):
        return
    why = "its kernels show no operand; NVTE_UnfusedDPA_Emulate_FP8=1 with NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0 does"
    errors.warn(
        f"attention of {len(names)} layers (first {names[0]}) runs in FP8: it is quantized and not observed, since {why}",
        kind="attention in FP8",
    )
