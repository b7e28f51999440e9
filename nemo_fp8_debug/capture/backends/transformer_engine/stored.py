"""Decode weights that are stored in FP8 or FP4.

A tensor of Transformer Engine keeps codes and scales in attributes, whose layout depends on the tensor's class. We support
the classes below, but not scales that are swizzled for a kernel. We read row-wise copies, which fprop uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....numerics.formats import E2M1, E4M3, E5M2, DecodedCodes, FloatFormat
from ..base import CastInUse, UnknownCastError, read_raw_weight
from .casts import is_quantized_tensor
from .environment import explain_unsupported_release
from .quantizers import make_quantizer_cast

_PACKAGE = "transformer_engine.pytorch.tensor."
#: torch dtype and code of the largest value of each format, by Transformer Engine's name for the format
_TYPES = {"kFloat8E4M3": (torch.float8_e4m3fn, 0x7E), "kFloat8E5M2": (torch.float8_e5m2, 0x7B)}


@dataclass(frozen=True)
class StoredWeight:
    """A parameter that is stored as codes."""

    parameter: Any
    #: Transformer Engine's recipe. We name the cast after it
    te_recipe: Any = None

    def decode_values(self) -> DecodedCodes:
        """Return the values of the codes, float32 in the parameter's shape.

        Raises:
            UnknownCastError: the class or layout is not supported.
        """
        if why := explain_unsupported_release():
            raise UnknownCastError(why)
        kept = self._row_wise()
        read, kind = _reader(kept), type(kept)
        if read is None:
            raise UnknownCastError(f"it is stored as a {kind.__module__}.{kind.__qualname__}, which is not supported")
        with torch.no_grad():
            return read(kept)

    def find_cast(self) -> CastInUse:
        """Return how the codes were cast, from the quantizer that the parameter keeps.

        Raises:
            UnknownCastError: the quantizer is not supported.
        """
        use = make_quantizer_cast(self.parameter._quantizer, self.te_recipe, "weight")
        scale = getattr(self._row_wise(), "_scale_inv", None)
        if isinstance(scale, torch.Tensor) and scale.numel() == 1:
            return CastInUse(scale.detach().reshape(()).reciprocal(), use.format, use.recipe, "engine")
        return use

    def _row_wise(self) -> Any:
        """Return the tensor with the row-wise copy: the parameter, or a part of it under a HybridQuantizer."""
        return getattr(self.parameter, "_rowwise_storage", self.parameter)


def read_stored_weight(module: Any, name: str = "weight") -> StoredWeight | None:
    """Return the parameter of a module if it is stored as codes, otherwise None."""
    weight = read_raw_weight(module, name)
    return StoredWeight(weight, getattr(module, "fp8_meta", {}).get("recipe")) if is_quantized_tensor(weight) else None


def is_supported_storage(stored: StoredWeight | None) -> bool:
    """Return True if codes of this class are supported."""
    return stored is not None and _reader(stored._row_wise()) is not None


def _reader(kept: Any) -> Callable[[Any], DecodedCodes] | None:
    kind = type(kept)
    return _READERS.get(kind.__name__.removesuffix("Storage")) if kind.__module__.startswith(_PACKAGE) else None


def _codes(x: torch.Tensor | None, what: str) -> torch.Tensor:
    if x is None or not x.numel():
        raise UnknownCastError(f"its {what} are missing")
    return x.detach()


def _fp8(data: torch.Tensor, dtype: Any) -> tuple[torch.Tensor, torch.Tensor, FloatFormat]:
    name = getattr(dtype, "name", str(dtype).rpartition(".")[2])
    if name not in _TYPES:
        raise UnknownCastError(f"it is stored as {dtype!r}, which is not supported")
    kind, largest = _TYPES[name]
    return data.view(kind).float(), (data & 0x7F) == largest, E4M3 if kind == torch.float8_e4m3fn else E5M2


def _float8(x: Any) -> DecodedCodes:
    values, at_limit, fmt = _fp8(_codes(x._data, "row-wise codes"), x._fp8_dtype)
    scale_inv = x._scale_inv.detach().float().reshape(())
    return DecodedCodes(values * scale_inv, at_limit, fmt, lambda: scale_inv)


def _mxfp8(x: Any) -> DecodedCodes:
    values, at_limit, fmt = _fp8(_codes(x._rowwise_data, "row-wise codes"), x._fp8_dtype)
    _check_layout(x)
    # We use float64, because the smallest scale, 2^-127, is subnormal in float32.
    scales = torch.exp2(x._rowwise_scale_inv.detach().double() - 127)
    return _times(values, scales, (1, 32), at_limit, fmt)


def _blockwise(x: Any) -> DecodedCodes:
    values, at_limit, fmt = _fp8(_codes(x._rowwise_data, "row-wise codes"), x._fp8_dtype)
    scales = x._rowwise_scale_inv.detach()
    if not x._is_2D_scaled:
        return _times(values, scales.t(), (1, 128), at_limit, fmt)
    return _times(values, scales, (128, 128), at_limit, fmt)


def _nvfp4(x: Any) -> DecodedCodes:
    data = _codes(x._rowwise_data, "row-wise codes")
    _check_layout(x)
    codes = torch.stack([data & 0xF, data >> 4], -1).flatten(-2)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=data.device)
    values = table[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
    scales = x._rowwise_scale_inv.detach().view(torch.float8_e4m3fn).double()
    whole = x._amax_rowwise.detach().double().reshape(-1, 1) / (E2M1.max * getattr(x, "_nvfp4_e4m3_max", E4M3.max))
    return _times(values, scales * whole, (1, 16), (codes & 7) == 7, E2M1)


def _high_precision(x: Any) -> DecodedCodes:
    values = _codes(x._hp_data, "values").float()
    return DecodedCodes(values, torch.zeros_like(values, dtype=torch.bool))


def _check_layout(x: Any) -> None:
    if getattr(x, "_with_gemm_swizzled_scales", False):
        raise UnknownCastError("its scales are swizzled for a kernel, which is not supported")


def _times(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], at_limit: torch.Tensor, fmt: FloatFormat
) -> DecodedCodes:
    """Return each value multiplied by the scale of its block. The scales may be padded."""
    m = values.reshape(-1, values.shape[-1])

    def of_values() -> torch.Tensor:
        rows, columns = (torch.arange(n, device=m.device) // size for n, size in zip(m.shape, block, strict=True))
        return scales.double()[rows[:, None], columns].reshape(values.shape)

    return DecodedCodes((values.double() * of_values()).float(), at_limit, fmt, of_values)


_READERS: Mapping[str, Callable[[Any], DecodedCodes]] = {
    "Float8Tensor": _float8,
    "MXFP8Tensor": _mxfp8,
    "Float8BlockwiseQTensor": _blockwise,
    "NVFP4Tensor": _nvfp4,
    "IdentityTensor": _high_precision,
}
