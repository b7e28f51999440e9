"""Check the release and the environment variables of Transformer Engine, because both may change casts."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version

from ..base import UnknownCastError

#: last supported release. We have read its sources, and compared its casts with the casts that we report
LAST_READ = Version("2.20")


def explain_unsupported_release() -> str:
    """Return why the casts of the installed release are unknown, or "" if it is supported."""
    module = sys.modules.get("transformer_engine")
    found = _installed(importlib.metadata.version, module, str(getattr(module, "__version__", "")))
    try:
        if Version(found).release[:2] <= LAST_READ.release:
            return ""
    except InvalidVersion:
        return f"the release of its Transformer Engine, {found or 'which has no version'}, is not supported"
    return f"Transformer Engine {found} is later than {LAST_READ}, the last supported release"


@functools.lru_cache(maxsize=1)
def _installed(look_up: Callable[[str], str], module: Any, says: str) -> str:
    """Return the version of an imported module. Look it up only once, because a look-up takes longer than our other work.

    Args:
        look_up: returns the version of a package.
        says: the version in the module itself, which we return if no package is found.
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
#: options of recipes. The effect of each is visible in the quantizers of a call
_RECIPES = """
    BACKWARD_OVERRIDE FP8_BLOCK_SCALING_FP32_SCALES FP8_CURRENT_SCALING_POWER_2_SCALES NVFP4_4OVER6
    NVFP4_4OVER6_E4M3_USE_256 NVFP4_4OVER6_ERR_MODE NVFP4_DISABLE_2D_QUANTIZATION NVFP4_DISABLE_RHT
    NVFP4_DISABLE_STOCHASTIC_ROUNDING NVFP4_ROW_SCALED_ACTIVATION"""
#: options of attention, which this backend does not observe
_ATTENTION = """
    ALLOW_NONDETERMINISTIC_ALGO APPLY_QK_LAYER_SCALING BATCH_MHA_P2P_COMM DPA_FP8CS_O_in_F16 DPA_FP8DS_AMAX_ALGO
    DPA_FP8DS_AMAX_HISTLEN DPA_FP8DS_REDUCE_AMAX DPA_FP8_FORMAT DPA_FP8_RECIPE DPA_FP8_RECIPE_DPA DPA_FP8_RECIPE_MHA
    FLASH_ATTN FLASH_ATTN_V2 FLASH_ATTN_V3 FLASH_ATTN_V4 FP8_DPA_BWD FUSED_ATTN FUSED_ATTN_USE_FAv2_BWD FUSED_MLA_Q_UPROJ
    FUSED_RING_ATTENTION_USE_SCAN MASKED_SOFTMAX_FUSION UNFUSED_ATTN UnfusedDPA_Emulate_FP8"""
#: options of modules that we do not observe (te.ops), and of fusions around GEMMs
_OPS = """
    BIAS_DROPOUT_FUSION BIAS_GELU_NVFUSION CUTEDSL_FUSED_GROUPED_MLP CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM
    DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP ENABLE_CUTEDSL_BACKEND GEMM_GELU_FUSION GROUPED_LINEAR_SINGLE_PARAM
    GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"""
#: options for how kernels are run, compiled and logged
_RUNNING = """
    ALLOW_UNSAFE_PICKLE_EXTRA_STATE BWD_LAYERNORM_SM_MARGIN COMPILE_OP_SIDE_EFFECTS CPU_OFFLOAD_V1 DEBUG DEBUG_LEVEL
    DISABLE_TRITON_AUTOTUNING EXT_MARGIN_SM FP8_GEMM_HIGH_PRECISION_ACCUMULATION FWD_LAYERNORM_SM_MARGIN
    INF_LAYERNORM_SM_MARGIN NORM_BWD_USE_CUDNN NVTX_ENABLED PRINT_LAYER_NUMBER PRINT_RANK TORCH_COMPILE UNFUSED_FP8_UPDATE"""
#: options of the norm that computes X, see `check_environment_variables`
_NORM = "NORM_FWD_USE_CUDNN ZERO_CENTERED_GAMMA_IN_WTYPE"
#: variables that change no cast of a linear layer, or whose effect is visible elsewhere
KNOWN_VARIABLES = frozenset(
    _PREFIX + name for group in (_BUILD, _RECIPES, _ATTENTION, _OPS, _RUNNING, _NORM) for name in group.split()
)
#: variables that may change casts in an unknown way
NOT_MEASURED = frozenset(("NVTE_USE_FAST_MATH",))


def check_environment_variables(module: Any, role: str) -> None:
    """Check that no environment variable changes the known casts of a module.

    Raises:
        UnknownCastError: a variable may change a cast. The message names this variable.
    """
    if strange := _strange_variables():
        raise UnknownCastError(f"the environment variable {strange[0]} is set, and its effect on casts is not supported")
    if role == "input" and hasattr(module, "layer_norm_weight"):
        for name, applies in (
            ("NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE", module.zero_centered_gamma),
            ("NVTE_NORM_FWD_USE_CUDNN", _casts_in_blocks(module)),
        ):
            if applies and os.environ.get(name, "0") not in ("0", ""):
                raise UnknownCastError(f"under the environment variable {name} its norm cannot be reproduced")


@dataclass
class _Asked:
    """The variables at the last check, in the form in which Python stores them, because comparing this form is fast."""

    variables: dict[Any, Any] | None = None
    strange: list[str] = field(default_factory=list)


_asked = _Asked()


def _strange_variables() -> list[str]:
    """Return unsupported variables.

    Called at every cast, because scripts may set and kernels may read variables at any time.
    """
    now = getattr(os.environ, "_data", None)
    if now is None or now != _asked.variables:
        before = None if now is None else dict(now)  # copied first, so that the next call notices later changes
        mine = {name for name, value in os.environ.items() if name.startswith(_PREFIX) and value not in ("0", "")}
        _asked.strange, _asked.variables = sorted(mine - KNOWN_VARIABLES), before
    return _asked.strange


def check_variable_option(variable: str, asked: bool) -> None:
    """Check that a quantizer has the option of an environment variable, if this variable is set.

    Args:
        asked: whether the quantizer has the option that the variable enables.

    Raises:
        UnknownCastError: the variable and the quantizer disagree, and it is unknown which of them the kernel follows.
    """
    if not asked and os.environ.get(variable, "0") not in ("0", ""):
        raise UnknownCastError(f"the environment variable {variable} is set, but its quantizer does not have this option")


def _casts_in_blocks(module: Any) -> bool:
    """Return True if the norm's output is cast in blocks. For MXFP8, cuDNN's norm casts values that are not rounded yet."""
    quantizers = getattr(module, "quantizers", {}).get("scaling_fwd") or [None]
    return module.fp8 and "Float8" not in type(quantizers[0]).__name__
