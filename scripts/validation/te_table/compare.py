"""Each operand that was reported, beside what a kernel was given of it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from emulated_te import CASTS, Cast, casts_of
from pairs import Row
from torch import nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.numerics.block_scaling import BlockScalingRule
from nemo_fp8_debug.numerics.formats import FORMATS
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.record.dump import DumpedTensorInfo, dumped_files, read_dump
from nemo_fp8_debug.record.reader import read_table_rows
from nemo_fp8_debug.record.storage import FolderStorage

from .factors import NORMS
from .layers import SPLITS, STEPS, layer_of, recipe_of, step_of

SHOWN = {"input": "X", "weight": "W", "grad_output": "dY"}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass
class Result:
    """What came of a row."""

    #: operands of calls by `scale_source`
    sources: Counter[str] = field(default_factory=Counter)
    #: why casts were unknown
    reasons: Counter[str] = field(default_factory=Counter)
    #: what is reported of column-wise copies
    copies: Counter[str] = field(default_factory=Counter)
    #: reports that do not say what a kernel was given
    differing: list[str] = field(default_factory=list)


def result_of(name: str, row: Row, folder: Path) -> Result:
    """Train as a row says, and compare all that is reported with the kernels' casts."""
    torch.manual_seed(0)
    CASTS.clear()
    FP8GlobalStateManager.reset()
    recipe = recipe_of(name, row)
    model = layer_of(row, recipe)
    step, casts = step_of(row, recipe, model), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = Monitor(model, str(folder), interval=1, dump=["*"], dump_min_free_bytes=0, table_rows=0, copies=True)
        for number in range(STEPS):
            CASTS.clear()
            with monitor.step(number):
                step(number)
            casts.append(list(CASTS))
        monitor.close()
    result = Result()
    for warning in caught:
        text = str(warning.message)
        if issubclass(warning.category, FP8DebugWarning):
            if "is unknown: " in text:
                result.reasons[text.partition("is unknown: ")[2].partition(". ")[0]] += 1
            else:
                result.differing.append(f"warned: {text}")
    _compare(result, row, model, casts, folder)
    return result


def _compare(result: Result, row: Row, model: nn.Module, casts: Sequence[list[Cast]], folder: Path) -> None:
    place, seen = FolderStorage(folder), Counter[tuple[int, str, str]]()
    keys = ["step", "layer", "role", "scale_source", "recipe", "format", "mse", "n"]
    reported = {line[:3]: line[3:] for line in read_table_rows(folder, "metrics").select(keys).rows()}
    given: dict[tuple[int, str, str], list[Cast]] = {}
    for _, step, _, name in dumped_files(place):
        about, tensors = read_dump(place, name)
        seen[key := (step, about.layer, about.role)] += 1
        # What a dump says of itself is of its codes, which are never in blocks.
        source, recipe, fmt = reported[key][:3]
        result.sources[source] += 1
        where = f"step {step}, {SHOWN[about.role]} of {about.layer}, call {about.call}"
        if about.role == "weight" and row["weights_stored"] == "yes":
            if why := _difference_of_stored(model, replace(about, scale_source=source), tensors["value"]):
                result.differing.append(f"{where}: {why}")
            continue
        mine = _casts_of(model, casts, about, step)
        if why := _difference(row, mine, replace(about, scale_source=source, recipe=recipe, format=FORMATS[fmt]), tensors):
            result.differing.append(f"{where}: {why}")
        elif source == "engine":
            given.setdefault(key, []).append(mine[about.call])
    _compare_copies(result, row, model, casts, folder)
    for key, of_calls in given.items():
        error, count = reported[key][3:]
        kernels = sum(_squared_error(cast) for cast in of_calls) / count
        if abs(error / kernels - 1) > (1e-3 if _is_made_again(row, key[2]) else 1e-5):
            result.differing.append(f"{key}: mean squared error {error}, that of the kernels' codes is {kernels}")
    if (expected := _expected(row)) != seen:
        result.differing.append(f"not reported: {sorted((expected - seen).elements())}; too often: {seen - expected}")


def _compare_copies(result: Result, row: Row, model: nn.Module, casts: Sequence[list[Cast]], folder: Path) -> None:
    """What is reported of column-wise copies, beside what the codes of the kernels stand for."""
    columns = ["step", "layer", "role", "product", "scale_source", "recipe", "format", "mse", "n", "calls"]
    for step, layer, role, product, source, recipe, fmt, error, count, calls in (
        read_table_rows(folder, "copies").select(columns).rows() if (folder / "copies").exists() else ()
    ):
        where = f"step {step}, {SHOWN[role]} of {layer} for {product}"
        result.copies[f"{SHOWN[role]} {product} {recipe} {source}"] += 1
        if "*" in layer:
            continue
        mine = _copies_of(model, casts, layer, role, step, calls)
        if len(mine) < calls or any(c.format != fmt for c in mine):
            result.differing.append(f"{where}: {len(mine)} copies in {[c.format for c in mine]} were made, {fmt} is said")
            continue
        kernels = sum(map(_copy_error, mine)) / count
        off = abs(error / kernels - 1)
        if off > (0.25 if source == "expected" else 1e-3 if _is_made_again(row, role) else 1e-5):
            result.differing.append(f"{where}: mean squared error {error}, that of the kernels' codes is {kernels}")


def _copies_of(model: nn.Module, casts: Any, layer: str, role: str, step: int, calls: int) -> list[Cast]:
    """Those that the backward of a step multiplies: made again by recompute, or before the step of a W that is cached."""
    part = layer.rpartition(".")[2]
    gemm = int(part) if part.isdigit() else int(part == "fc2")
    CASTS[:] = casts[step]
    made = [c for c in casts_of(model.layer, SHOWN[role], gemm) if c.usage == "columnwise"]
    if not made and role == "weight":
        CASTS[:] = [cast for of_step in casts[:step] for cast in of_step]
        return [c for c in casts_of(model.layer, "W", gemm) if c.usage == "columnwise"][-1:]
    again = [c for c in made if c.recompute]
    return again if len(again) == calls else [c for c in made if not c.recompute][-calls:]


def _copy_error(cast: Cast) -> float:
    """Squared error of a column-wise copy; of one that was transformed, in the transformed values."""
    m = cast.source.reshape(-1, cast.source.shape[-1])
    stood_for = _decoded(cast).double() * _by_value(_kept(cast), cast.block, cast.codes.shape)
    if cast.amax is not None:
        stood_for *= cast.amax.double().reshape(-1, 1) / (6 * cast.quantizer.nvfp4_e4m3_max)
    right = m.t() if stood_for.shape != m.shape or cast.format == "e2m1" or cast.block == (1, 128) else m
    if getattr(cast.quantizer, "with_rht", False):
        groups = right.reshape(-1, 16).float() @ cast.quantizer.rht_matrix.float()
        right = groups.reshape(right.shape).to(m.dtype)
    return float((stood_for - right.double()).square().sum())


def _expected(row: Row) -> Counter[tuple[int, str, str]]:
    """How many calls of each operand are to be reported."""
    calls = int(row["micro_batches"])
    if "Grouped" in row["layer"]:
        gemms = {f"layer.{i}": ("input", "weight", "grad_output") for i in range(len(SPLITS))}
    elif row["layer"] == "LayerNormMLP":
        gemms = {"layer.fc1": ("input", "weight"), "layer.fc2": ("weight", "grad_output")}  # type: ignore[dict-item]
    else:
        gemms = {"layer": ("input", "weight", "grad_output")}
    return Counter(
        {
            (step, gemm, role): 1 if role == "weight" else calls
            for step in range(STEPS)
            for gemm, roles in gemms.items()
            for role in roles
        }
    )


def _difference(row: Row, mine: list[Cast], about: DumpedTensorInfo, tensors: Any) -> str | None:
    """What is wrong with a report; None: nothing."""
    source = about.scale_source
    if source == "unknown":
        return None
    if source == "not quantized":
        return f"said to be in high precision, but {len(mine)} casts were made" if mine else None
    if source not in ("engine", "expected"):
        return f"scale_source {source}"
    if about.call >= len(mine):
        return f"only {len(mine)} casts were made"
    return _of_cast(about, mine[about.call], tensors, parse_recipe(about.recipe).scaling, _is_made_again(row, about.role))


def _difference_of_stored(model: nn.Module, about: DumpedTensorInfo, value: torch.Tensor) -> str | None:
    """Of a weight in codes, whose master nobody keeps in the table, what the codes stand for is reported."""
    part = about.layer.rpartition(".")[2]
    name = f"weight{part}" if part.isdigit() else f"{part}_weight" if part in ("fc1", "fc2") else "weight"
    codes: Any = getattr(model.layer, name)
    as_it_is = "Identity" in type(getattr(codes, "_rowwise_storage", codes)).__name__
    if about.scale_source != ("not quantized" if as_it_is else "stored"):
        return f"scale_source {about.scale_source}"
    same = torch.allclose(codes.dequantize(dtype=torch.float32), value, rtol=1e-6, atol=0)
    return None if same else "its codes stand for something else"


def _is_made_again(row: Row, role: str) -> bool:
    """Of an X that a layer normalizes itself: unless rounded to BF16, its last bits may be others than the kernel's."""
    fused = row["dtype"] != "bfloat16" or row.get("amax_history_len") or row.get("qfactory") == "delayed_scaling"
    return role == "input" and row["layer"] in NORMS and bool(fused)


def _casts_of(model: nn.Module, casts: Any, about: DumpedTensorInfo, step: int) -> list[Cast]:
    """Row-wise casts of an operand in a step; of a W that was cached before it the last one that was made."""
    part = about.layer.rpartition(".")[2]
    gemm = int(part) if part.isdigit() else int(part == "fc2")
    CASTS[:] = casts[step]
    mine = [c for c in casts_of(model.layer, SHOWN[about.role], gemm) if c.usage != "columnwise" and not c.recompute]
    # Not those made again in the backward: by recompute, or of an operand that was saved in high precision.
    mine = [c for c in mine if c.in_backward == (about.role == "grad_output")]
    if mine or about.role != "weight":
        return mine
    CASTS[:] = [cast for of_step in casts[:step] for cast in of_step]
    return [c for c in casts_of(model.layer, "W", gemm) if c.usage != "columnwise"][-1:]


def _of_cast(about: DumpedTensorInfo, cast: Cast, tensors: Any, rule: Any, again: bool) -> str | None:
    if about.format.name != cast.format:
        return f"said to be {about.format.name}, cast to {cast.format}"
    source, value = cast.source.float(), tensors["value"].float()
    source = source.reshape(value.shape)
    last_bit = 1e-5 if cast.fused or cast.source.dtype == torch.float32 else 2.0**-9
    if not torch.equal(source, value) and not (again and torch.allclose(source, value, rtol=last_bit, atol=1e-6)):
        return f"another tensor was cast: up to {float((source - value).abs().max())} off"
    if isinstance(rule, BlockScalingRule):
        return _of_blocks(about, cast, rule)
    if cast.block:
        return "said to have one scale, cast in blocks"
    scale = float(tensors["scale"])
    if scale != float(cast.scale) and not (again and abs(scale / float(cast.scale) - 1) < last_bit):
        return f"said to have scale {scale}, cast with {float(cast.scale)}"
    codes = tensors["codes"].view(torch.uint8).reshape(-1)
    return None if again or torch.equal(codes, cast.codes.reshape(-1)) else "its codes are others"


def stood_for(cast: Cast) -> torch.Tensor:
    """What a kernel's codes stand for, float64; of a cast in blocks as a matrix, laid out as the codes are kept."""
    if cast.block is None:
        return _decoded(cast).double() / float(cast.scale)
    values = _decoded(cast).double() * _by_value(_kept(cast), cast.block, cast.codes.shape)
    if cast.amax is not None:
        values *= cast.amax.double().reshape(-1, 1) / (6 * cast.quantizer.nvfp4_e4m3_max)
    return values


def _squared_error(cast: Cast) -> float:
    return float((stood_for(cast).reshape(cast.source.shape) - cast.source.double()).square().sum())


def _of_blocks(about: DumpedTensorInfo, cast: Cast, rule: BlockScalingRule) -> str | None:
    if cast.block is None:
        return "said to be cast in blocks, cast with one scale"
    made = rule.quantize(cast.source, about.role, about.format)
    codes = made.codes.float().reshape(cast.codes.shape)
    if not rule.rounds_stochastically and not torch.equal(codes, _decoded(cast)):
        return "its codes are others"
    stored = made.scales.stored if about.format.name == "e2m1" else made.scales.scale_inv
    of_mine = _by_value(stored.double(), made.block, cast.codes.shape)
    if not torch.allclose(of_mine, _by_value(_kept(cast), cast.block, cast.codes.shape), rtol=1e-6, atol=0):
        return "its scales are others"
    return None


def _decoded(cast: Cast) -> torch.Tensor:
    if cast.format == "e2m1":
        magnitude = E2M1[(cast.codes % 8).long()]
        return torch.where(cast.codes >= 8, -magnitude, magnitude)
    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[cast.format]
    return cast.codes.view(kind).float()


def _kept(cast: Cast) -> torch.Tensor:
    """float64: what multiplies a code; of NVFP4 its first level."""
    if cast.format == "e2m1":
        return cast.scale.view(torch.float8_e4m3fn).double()
    return cast.scale.double() if cast.scale.is_floating_point() else torch.exp2(cast.scale.double() - 127)


def _by_value(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    wide = scales.repeat_interleave(block[0], 0)[: shape[0]]
    return wide.repeat_interleave(block[1], 1)[:, : shape[1]]
