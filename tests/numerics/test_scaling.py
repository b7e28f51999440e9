"""Scaling rules against plain transcriptions of Transformer Engine's, in NumPy float32; amax; quantization."""

from __future__ import annotations

from collections import deque
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import KINDS, SIXTEEN_BIT, all_patterns

from nemo_fp8_debug.numerics.formats import E4M3, E5M2, FloatFormat
from nemo_fp8_debug.numerics.metrics import compute_amax
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling, DelayedScaling, quantize, quantize_dequantize

FLT_MAX = np.finfo(np.float32).max
AMAX = st.floats(0, width=32) | st.just(float("nan"))
LIMITS = st.sampled_from([448.0, 57344.0])


def current_scale(amax: float, limit: float, epsilon: float, power_of_two: bool) -> np.float32:
    """`compute_scale_from_amax` of recipe/recipe_common.cuh."""
    value = np.float32(amax)
    if value < np.float32(epsilon):
        value = np.float32(epsilon)
    if value == 0 or np.isinf(value) or np.isnan(value):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(limit) / value
    if np.isinf(scale):
        scale = FLT_MAX
    if power_of_two:
        scale = (np.array(scale, np.float32).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)[()]
    return scale


class DelayedOperand:
    """One operand under `kernel_bulk` of recipe/delayed_scaling.cu, the history as a window of what was seen."""

    def __init__(self, rule: DelayedScaling, limit: float) -> None:
        self.rule = rule
        self.scaled_max = np.float32(limit * 2.0**-rule.margin)
        self.window: deque[np.float32] = deque([np.float32(0)] * rule.amax_history_len, rule.amax_history_len)
        self.scale = np.float32(1)

    def end_step(self, amax: float) -> None:
        if amax == 0:
            return
        self.window.append(np.float32(amax))
        reference = max(self.window) if self.rule.amax_compute_algo == "max" else self.window[-1]
        if np.isinf(reference):
            return
        with np.errstate(over="ignore"):
            self.scale = min(self.scaled_max / reference, FLT_MAX)


class TestCurrentScaling:
    @settings(max_examples=300)
    @given(amax=AMAX, limit=LIMITS, epsilon=st.sampled_from([0.0, 1e-12, 2.5]), power_of_two=st.booleans())
    def test_equals_the_transcription(self, amax: float, limit: float, epsilon: float, power_of_two: bool) -> None:
        rule = CurrentScaling(epsilon, power_of_two)
        want = current_scale(amax, limit, epsilon, power_of_two)
        assert rule.compute_scale(torch.tensor(amax), limit).item() == want
        assert rule.compute_scale(torch.tensor([amax]), torch.tensor([limit])).item() == want

    @pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan")])
    def test_is_one_where_there_is_nothing_to_scale_by(self, amax: float) -> None:
        assert CurrentScaling().compute_scale(torch.tensor(amax), 448.0).item() == 1

    def test_stays_finite_for_the_smallest_amax(self) -> None:
        smallest = torch.tensor(2.0**-149)
        assert CurrentScaling().compute_scale(smallest, 448.0).item() == FLT_MAX
        assert CurrentScaling(power_of_two=True).compute_scale(smallest, 448.0).item() == 2.0**127


@st.composite
def delayed_runs(draw: st.DrawFn) -> tuple[DelayedScaling, list[float], list[list[float]]]:
    """A rule, the limit of each operand, and each step's amax of each operand."""
    rule = DelayedScaling(draw(st.integers(-2, 5)), draw(st.integers(1, 5)), draw(st.sampled_from(["max", "most_recent"])))
    limits = draw(st.lists(LIMITS, min_size=1, max_size=4))
    amax = st.just(0.0) | st.just(float("inf")) | st.floats(0, width=32)
    steps = draw(st.lists(st.lists(amax, min_size=len(limits), max_size=len(limits)), max_size=12))
    return rule, limits, steps


class TestDelayedScaling:
    @settings(max_examples=150)
    @given(delayed_runs())
    def test_equals_the_transcription_at_every_step(
        self, run: tuple[DelayedScaling, list[float], list[list[float]]]
    ) -> None:
        rule, limits, steps = run
        operands = [DelayedOperand(rule, limit) for limit in limits]
        history, scale = torch.zeros(rule.amax_history_len, len(limits)), torch.ones(len(limits))
        for amaxes in steps:
            history, scale = rule.update_history_and_scale(history, scale, torch.tensor(amaxes), torch.tensor(limits))
            for operand, amax in zip(operands, amaxes, strict=True):
                operand.end_step(amax)
            assert scale.tolist() == [operand.scale for operand in operands]
            assert history.T.tolist() == [list(operand.window) for operand in operands]

    def test_a_large_amax_is_forgotten_with_the_window(self) -> None:
        rule, limit = DelayedScaling(amax_history_len=2), torch.tensor([448.0])
        history, scale = torch.zeros(2, 1), torch.ones(1)
        scales = []
        for amax in (7.0, 448.0, 7.0, 7.0):
            history, scale = rule.update_history_and_scale(history, scale, torch.tensor([amax]), limit)
            scales.append(scale.item())
        assert scales == [64, 1, 1, 64]

    def test_an_operand_that_was_not_cast_keeps_history_and_scale(self) -> None:
        history, scale = torch.tensor([[7.0, 7.0]]), torch.tensor([5.0, 5.0])  # as of a run with another margin
        rule = DelayedScaling(amax_history_len=1)
        history, scale = rule.update_history_and_scale(
            history, scale, torch.tensor([0.0, 14.0]), torch.tensor([448.0, 448.0])
        )
        assert history.tolist() == [[7, 14]]
        assert scale.tolist() == [5, 32]

    def test_leaves_what_it_is_given_unchanged(self) -> None:
        history, scale = torch.zeros(3, 2), torch.ones(2)
        DelayedScaling(amax_history_len=3).update_history_and_scale(
            history, scale, torch.tensor([2.0, 0.0]), torch.tensor([448.0, 448.0])
        )
        assert not history.any()
        assert torch.equal(scale, torch.ones(2))


class TestAmax:
    @pytest.mark.parametrize("dtype", [*SIXTEEN_BIT, torch.float32], ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_the_largest_magnitude_that_is_not_nan(self, kind: str, dtype: torch.dtype) -> None:
        x = KINDS["heavy-tailed" if kind == "subnormal" else kind](dtype)
        magnitude = np.abs(x.detach().float().numpy())
        got = compute_amax(x)
        assert got.dtype == torch.float32
        assert got.item() == magnitude[~np.isnan(magnitude)].max(initial=0)


def codes(x: torch.Tensor, scale: float, target: type) -> npt.NDArray[Any]:
    """ml_dtypes' codes of x * scale, saturated."""
    limit = np.float32(ml_dtypes.finfo(target).max)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.clip(x.float().numpy() * np.float32(scale), -limit, limit).astype(target)


NUMPY = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


@pytest.mark.parametrize("scale", [1.0, 0.3, 1234.5, 2.0**-30, 3e38])
@pytest.mark.parametrize(
    ("fmt", "target"), [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)], ids=["e4m3", "e5m2"]
)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
class TestQuantize:
    def test_codes_equal_ml_dtypes(self, dtype: torch.dtype, fmt: FloatFormat, target: type, scale: float) -> None:
        x = all_patterns(dtype)
        got = quantize(x, torch.tensor(scale), fmt)
        want = codes(x, scale, target)
        real = ~np.isnan(want.astype(np.float32))
        assert np.array_equal(got.float().isnan().numpy(), ~real)
        assert np.array_equal(got.view(torch.uint8).numpy()[real], want.view(np.uint8)[real])

    def test_values_equal_ml_dtypes(self, dtype: torch.dtype, fmt: FloatFormat, target: type, scale: float) -> None:
        x = all_patterns(dtype)
        got = quantize_dequantize(x, torch.tensor(scale), fmt)
        with np.errstate(over="ignore", invalid="ignore"):
            reciprocal = np.float32(1) / np.float32(scale)
            want = (codes(x, scale, target).astype(np.float32) * reciprocal).astype(NUMPY[dtype])
        real = ~np.isnan(want.astype(np.float32))
        assert got.dtype == dtype
        assert np.array_equal(got.isnan().numpy(), ~real)
        assert np.array_equal(got.view(torch.int16).numpy()[real], want.view(np.int16)[real])


def test_float32_values_are_codes_times_the_reciprocal_of_the_scale() -> None:
    x, scale = torch.linspace(-500, 500, 1001), 1.7
    want = codes(x, scale, ml_dtypes.float8_e4m3fn).astype(np.float32) * (np.float32(1) / np.float32(scale))
    assert np.array_equal(quantize_dequantize(x, torch.tensor(scale), E4M3).numpy(), want)


def test_quantize_takes_a_scale_for_each_row() -> None:
    x = KINDS["random"](torch.bfloat16)
    scale = torch.linspace(1, 50, len(x))[:, None]
    rows = [quantize(row, s, E4M3) for row, s in zip(x, scale[:, 0], strict=True)]
    assert torch.equal(quantize(x, scale, E4M3).float(), torch.stack([row.float() for row in rows]))
