"""What the file of quantizers begins with, whatever a recommendation says."""

PROLOGUE = '''
from __future__ import annotations

import fnmatch
import re
import warnings

try:
    from transformer_engine.common.recipe import Format
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.quantization import DelayedScalingRequest
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
except ImportError as error:
    raise ImportError(f"{__name__} needs Transformer Engine 2.19 or later: {error}") from error


def high_precision():
    """Not quantized."""
    return IdentityQuantizer()


def current(fmt, power_of_two, epsilon):
    """One scale, from the tensor."""
    return Float8CurrentScalingQuantizer(
        _dtype(fmt), device="cuda", force_pow_2_scales=power_of_two, amax_epsilon=epsilon
    )


def delayed(fmt, margin, history, algorithm):
    """One scale, from the amaxes of earlier steps. HYBRID is E4M3 forward and E5M2 backward."""
    return DelayedScalingRequest(getattr(Format, fmt), margin, history, algorithm)


def blockwise(fmt, dimensions, power_of_two, epsilon):
    """A scale for 1x128 values, or for 128x128."""
    return Float8BlockQuantizer(
        _dtype(fmt),
        rowwise=True,
        columnwise=True,
        amax_epsilon=epsilon,
        force_pow_2_scales=power_of_two,
        block_scaling_dim=dimensions,
    )


def mxfp8(fmt, square):
    """A scale for 1x32 values, or for 32x32."""
    return MXFP8Quantizer(_dtype(fmt), with_2d_quantization=square)


def by_gemm(**quantizers):
    """A quantizer for each of the two GEMMs that read an operand: the row-wise copy, then the column-wise one."""
    row_wise, column_wise = quantizers.values()
    return HybridQuantizer(rowwise_quantizer=row_wise, columnwise_quantizer=column_wise)


def factory(role):
    """The quantizer of an operand of any module: modules are told apart by their names."""
    if not _is_operand(role):
        return _outside(role)
    if re.match(r"(Layer_\\d+)?(\\.|$)", role.name):  # which Transformer Engine makes up
        raise ValueError(
            f"a module of Transformer Engine has no name, so that {__name__} cannot tell which it is; "
            "call nemo_fp8_debug.name_modules(model) before the first step"
        )
    if not _in_record(role.name) and not _told:
        _told.append(role.name)
        warnings.warn(f"{role.name} is not in the record behind {__name__}: it is cast as most are", stacklevel=2)
    return _quantizer(role.name, role.tensor_type)


def factory_of(name):
    """The factory of one module, whatever it calls itself."""
    return lambda role: _quantizer(name, role.tensor_type) if _is_operand(role) else _outside(role)


def _is_operand(role):
    return role is not None and role.module_type in ("linear", "grouped_linear") and role.tensor_type in USUAL


def _quantizer(name, operand):
    for table in (CHANGED, OTHERS):
        for pattern, quantizers in table.items():
            if name == pattern or ("*" in pattern and fnmatch.fnmatchcase(name, pattern)):
                return _noted(quantizers[operand]())
    return _noted(USUAL[operand]())


def _noted(made):
    if isinstance(made, DelayedScalingRequest):
        _requests.append(made)
        del _requests[:-1]
    return made


def _outside(role):
    """Of what a module puts out, which is not cast unless a caller wants it in FP8; it is asked for after the operands.

    Transformer Engine takes histories in both directions of a module, or in neither, and all of a direction alike.
    """
    if role is not None and role.module_type not in ("", "linear", "grouped_linear"):
        return high_precision()  # attention, which CustomRecipe casts only with fp8_dpa
    if not _requests:
        for quantizers in (USUAL, *OTHERS.values(), *CHANGED.values()):
            for quantizer in quantizers.values():
                _noted(quantizer())
    return _requests[0] if _requests else current("E4M3", False, 0.0)


def _in_record(name):
    return re.sub(r"\\d+", "*", name) in {re.sub(r"\\d+", "*", known) for known in RECORDED}


def _dtype(fmt):
    return DType.kFloat8E5M2 if fmt == "E5M2" else DType.kFloat8E4M3


_told = []
#: the last request for a history
_requests = []
'''
