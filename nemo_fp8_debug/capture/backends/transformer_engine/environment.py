"""Read the release and the environment of Transformer Engine: a variable or a later release may change casts unseen."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version

from ..base import UnknownCast

#: the last release whose sources were read, and whose casts were compared with those that are reported
LAST_READ = Version("2.20")


def unread_release() -> str:
    """Why nothing is known of the casts of the release that is installed; empty: it was read."""
    module = sys.modules.get("transformer_engine")
    found = _installed(importlib.metadata.version, module, str(getattr(module, "__version__", "")))
    try:
        if Version(found).release[:2] <= LAST_READ.release:
            return ""
    except InvalidVersion:
        return f"its release of Transformer Engine, {found or 'which does not tell its version'}, is not known here"
    return f"Transformer Engine {found} is later than {LAST_READ}, the last release whose casts are known here"


@functools.lru_cache(maxsize=1)
def _installed(look_up: Callable[[str], str], module: Any, says: str) -> str:
    """Looked up once for a module that is imported: that takes longer than all else that is asked in a step.

    Args:
        look_up: tells the version of a package.
        says: what it says itself, if packages do not tell.
    """
    for name in ("transformer_engine", "transformer-engine"):
        try:
            return look_up(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return says


_PREFIX = "NVTE_"
_BUILD = """
    CUDA_INCLUDE_DIR FRAMEWORK PLUGIN PROJECT_BUILDING PYTORCH_FORCE_BUILD PYTORCH_FORCE_CXX11_ABI PYTORCH_SKIP_CUDA_BUILD
    RELEASE_BUILD UB_WITH_MPI USE_PYTORCH_TRITON WITH_CUBLASMP"""
#: options of recipes, whose effect the quantizers of a call hold
_RECIPES = """
    BACKWARD_OVERRIDE FP8_BLOCK_SCALING_FP32_SCALES FP8_CURRENT_SCALING_POWER_2_SCALES NVFP4_4OVER6
    NVFP4_4OVER6_E4M3_USE_256 NVFP4_4OVER6_ERR_MODE NVFP4_DISABLE_2D_QUANTIZATION NVFP4_DISABLE_RHT
    NVFP4_DISABLE_STOCHASTIC_ROUNDING NVFP4_ROW_SCALED_ACTIVATION"""
#: attention, which is not observed
_ATTENTION = """
    ALLOW_NONDETERMINISTIC_ALGO APPLY_QK_LAYER_SCALING BATCH_MHA_P2P_COMM DPA_FP8CS_O_in_F16 DPA_FP8DS_AMAX_ALGO
    DPA_FP8DS_AMAX_HISTLEN DPA_FP8DS_REDUCE_AMAX DPA_FP8_FORMAT DPA_FP8_RECIPE DPA_FP8_RECIPE_DPA DPA_FP8_RECIPE_MHA
    FLASH_ATTN FLASH_ATTN_V2 FLASH_ATTN_V3 FLASH_ATTN_V4 FP8_DPA_BWD FUSED_ATTN FUSED_ATTN_USE_FAv2_BWD FUSED_MLA_Q_UPROJ
    FUSED_RING_ATTENTION_USE_SCAN MASKED_SOFTMAX_FUSION UNFUSED_ATTN UnfusedDPA_Emulate_FP8"""
#: modules that are not observed (te.ops), and what is fused beside GEMMs
_OPS = """
    BIAS_DROPOUT_FUSION BIAS_GELU_NVFUSION CUTEDSL_FUSED_GROUPED_MLP CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM
    DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP ENABLE_CUTEDSL_BACKEND GEMM_GELU_FUSION GROUPED_LINEAR_SINGLE_PARAM
    GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"""
#: how kernels are run, compiled and logged
_RUNNING = """
    ALLOW_UNSAFE_PICKLE_EXTRA_STATE BWD_LAYERNORM_SM_MARGIN COMPILE_OP_SIDE_EFFECTS CPU_OFFLOAD_V1 DEBUG DEBUG_LEVEL
    DISABLE_TRITON_AUTOTUNING EXT_MARGIN_SM FP8_GEMM_HIGH_PRECISION_ACCUMULATION FWD_LAYERNORM_SM_MARGIN
    INF_LAYERNORM_SM_MARGIN NORM_BWD_USE_CUDNN NVTX_ENABLED PRINT_LAYER_NUMBER PRINT_RANK TORCH_COMPILE UNFUSED_FP8_UPDATE"""
#: change a norm that X comes out of, see `check_environment`
_NORM = "NORM_FWD_USE_CUDNN ZERO_CENTERED_GAMMA_IN_WTYPE"
#: variables that change no cast of a linear layer, or whose effect is told otherwise
KNOWN_VARIABLES = frozenset(
    _PREFIX + name for group in (_BUILD, _RECIPES, _ATTENTION, _OPS, _RUNNING, _NORM) for name in group.split()
)
#: of whom it is known that casts may change, and not how
NOT_MEASURED = frozenset(("NVTE_USE_FAST_MATH",))


def check_environment(module: Any, role: str) -> None:
    """Whether what is known here of a module's casts holds under the variables that are set.

    Raises:
        UnknownCast: it may not; names the variable.
    """
    if strange := _strange_variables():
        raise UnknownCast(f"the environment variable {strange[0]} is set, and what it does to casts is not known here")
    if role == "input" and hasattr(module, "layer_norm_weight"):
        for name, applies in (
            ("NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE", module.zero_centered_gamma),
            ("NVTE_NORM_FWD_USE_CUDNN", _casts_in_blocks(module)),
        ):
            if applies and os.environ.get(name, "0") not in ("0", ""):
                raise UnknownCast(f"under the environment variable {name} its norm is not made again here")


@dataclass
class _Asked:
    """What was set when variables were read last, as Python keeps it, which is compared far faster than it is read."""

    variables: dict[Any, Any] | None = None
    strange: list[str] = field(default_factory=list)


_asked = _Asked()


def _strange_variables() -> list[str]:
    """Asked at every cast: a script may set one while it runs, and a kernel may ask for it at each cast."""
    now = getattr(os.environ, "_data", None)
    if now is None or now != _asked.variables:
        before = None if now is None else dict(now)  # one that is set while they are read differs from it next time
        mine = {name for name, value in os.environ.items() if name.startswith(_PREFIX) and value not in ("0", "")}
        _asked.strange, _asked.variables = sorted(mine - KNOWN_VARIABLES), before
    return _asked.strange


def check_option(variable: str, asked: bool) -> None:
    """Whether a variable that is set agrees with what a quantizer says.

    Args:
        asked: whether the quantizer has what the variable asks for.

    Raises:
        UnknownCast: it does not: which of the two the kernel follows is not known.
    """
    if not asked and os.environ.get(variable, "0") not in ("0", ""):
        raise UnknownCast(f"the environment variable {variable} is set, and its quantizer says otherwise")


def _casts_in_blocks(module: Any) -> bool:
    """A norm of cuDNN casts to MXFP8 what it has not rounded."""
    quantizers = getattr(module, "quantizers", {}).get("scaling_fwd") or [None]
    return module.fp8 and "Float8" not in type(quantizers[0]).__name__
