"""Scaling rules against plain transcriptions of Transformer Engine's, in NumPy float32; recipes; quantization."""

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

from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.errors import ConfigError
from nemo_fp8_debug.numerics.block_scaling import BlockScaling, MXFP8Scaling, NVFP4Scaling
from nemo_fp8_debug.numerics.delayed_state import DelayedState
from nemo_fp8_debug.numerics.formats import BF16, E2M1, E4M3, E5M2, FloatFormat
from nemo_fp8_debug.numerics.recipe import Recipe, parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import (
    CurrentScaling,
    DelayedScaling,
    Unscaled,
    amax_of,
    quantize,
    quantize_dequantize,
)

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
    @settings(deadline=None, max_examples=300)
    @given(amax=AMAX, limit=LIMITS, epsilon=st.sampled_from([0.0, 1e-12, 2.5]), power_of_two=st.booleans())
    def test_equals_the_transcription(self, amax: float, limit: float, epsilon: float, power_of_two: bool) -> None:
        rule = CurrentScaling(epsilon, power_of_two)
        want = current_scale(amax, limit, epsilon, power_of_two)
        assert rule.scale(torch.tensor(amax), limit).item() == want
        assert rule.scale(torch.tensor([amax]), torch.tensor([limit])).item() == want

    @pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan")])
    def test_is_one_where_there_is_nothing_to_scale_by(self, amax: float) -> None:
        assert CurrentScaling().scale(torch.tensor(amax), 448.0).item() == 1

    def test_stays_finite_for_the_smallest_amax(self) -> None:
        smallest = torch.tensor(2.0**-149)
        assert CurrentScaling().scale(smallest, 448.0).item() == FLT_MAX
        assert CurrentScaling(power_of_two=True).scale(smallest, 448.0).item() == 2.0**127


@st.composite
def delayed_runs(draw: st.DrawFn) -> tuple[DelayedScaling, list[float], list[list[float]]]:
    """A rule, the limit of each operand, and each step's amax of each operand."""
    rule = DelayedScaling(draw(st.integers(-2, 5)), draw(st.integers(1, 5)), draw(st.sampled_from(["max", "most_recent"])))
    limits = draw(st.lists(LIMITS, min_size=1, max_size=4))
    amax = st.just(0.0) | st.just(float("inf")) | st.floats(0, width=32)
    steps = draw(st.lists(st.lists(amax, min_size=len(limits), max_size=len(limits)), max_size=12))
    return rule, limits, steps


class TestDelayedScaling:
    @settings(deadline=None, max_examples=150)
    @given(delayed_runs())
    def test_equals_the_transcription_at_every_step(
        self, run: tuple[DelayedScaling, list[float], list[list[float]]]
    ) -> None:
        rule, limits, steps = run
        operands = [DelayedOperand(rule, limit) for limit in limits]
        history, scale = torch.zeros(rule.amax_history_len, len(limits)), torch.ones(len(limits))
        for amaxes in steps:
            history, scale = rule.update(history, scale, torch.tensor(amaxes), torch.tensor(limits))
            for operand, amax in zip(operands, amaxes, strict=True):
                operand.end_step(amax)
            assert scale.tolist() == [operand.scale for operand in operands]
            assert history.T.tolist() == [list(operand.window) for operand in operands]

    def test_a_large_amax_is_forgotten_with_the_window(self) -> None:
        rule, limit = DelayedScaling(amax_history_len=2), torch.tensor([448.0])
        history, scale = torch.zeros(2, 1), torch.ones(1)
        scales = []
        for amax in (7.0, 448.0, 7.0, 7.0):
            history, scale = rule.update(history, scale, torch.tensor([amax]), limit)
            scales.append(scale.item())
        assert scales == [64, 1, 1, 64]

    def test_an_operand_that_was_not_cast_keeps_history_and_scale(self) -> None:
        history, scale = torch.tensor([[7.0, 7.0]]), torch.tensor([5.0, 5.0])  # as of a run with another margin
        rule = DelayedScaling(amax_history_len=1)
        history, scale = rule.update(history, scale, torch.tensor([0.0, 14.0]), torch.tensor([448.0, 448.0]))
        assert history.tolist() == [[7, 14]]
        assert scale.tolist() == [5, 32]

    def test_leaves_what_it_is_given_unchanged(self) -> None:
        history, scale = torch.zeros(3, 2), torch.ones(2)
        DelayedScaling(amax_history_len=3).update(history, scale, torch.tensor([2.0, 0.0]), torch.tensor([448.0, 448.0]))
        assert not history.any()
        assert torch.equal(scale, torch.ones(2))


class TestDelayedState:
    COLUMNS = (("a", "input"), ("a", "grad_output"), ("b", "input"))
    RECIPE = Recipe(DelayedScaling(amax_history_len=3))

    def trained(self, columns: tuple[tuple[str, str], ...] = COLUMNS) -> DelayedState:
        state = DelayedState(self.RECIPE, columns)
        for step in range(1, 5):
            state.amax = torch.arange(1.0, len(columns) + 1) * step
            state.update()
        return state

    def test_casts_each_role_to_its_own_format(self) -> None:
        assert DelayedState(self.RECIPE, self.COLUMNS).limit.tolist() == [448, 57344, 448]

    def test_scales_by_the_amax_gathered_and_starts_anew(self) -> None:
        state = DelayedState(self.RECIPE, self.COLUMNS)
        state.amax = torch.tensor([7.0, 7.0, 0.0])
        state.update()
        assert state.scale.tolist() == [64, 8192, 1]
        assert not state.amax.any()

    def test_a_resumed_run_goes_on_with_the_same_scales(self) -> None:
        state, resumed = self.trained(), DelayedState(self.RECIPE, self.COLUMNS)
        resumed.load_state_dict(state.state_dict())
        for amax in (0.5, 3.0, 0.0, 1.0, 1.0, 1.0):
            assert torch.equal(resumed.scale, state.scale)
            assert torch.equal(resumed.history, state.history)
            for each in (state, resumed):
                each.amax = torch.full((3,), amax)
                each.update()

    def test_operands_are_found_by_name_and_new_ones_start_anew(self) -> None:
        state = self.trained()
        resumed = DelayedState(self.RECIPE, [("b", "input"), ("c", "input"), ("a", "input")])
        resumed.load_state_dict(state.state_dict())
        assert resumed.scale.tolist() == [state.scale[2], 1, state.scale[0]]
        assert torch.equal(resumed.history, torch.stack([state.history[:, 2], torch.zeros(3), state.history[:, 0]], 1))

    def test_a_saved_state_survives_the_disk(self, tmp_path: Any) -> None:
        state, resumed = self.trained(), DelayedState(self.RECIPE, self.COLUMNS)
        torch.save(state.state_dict(), tmp_path / "state.pt")
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert torch.equal(resumed.scale, state.scale)

    def test_a_saved_state_does_not_move_with_the_run(self) -> None:
        state = self.trained()
        saved = state.state_dict()
        before = saved["scale"].clone(), saved["history"].clone()
        state.amax = torch.full((3,), 100.0)
        state.update()
        state.load_state_dict(self.trained(self.COLUMNS[::-1]).state_dict())
        assert torch.equal(saved["scale"], before[0])
        assert torch.equal(saved["history"], before[1])

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"amax_history_len": 2}, [448 / 4, 57344 / 8, 448 / 12]),
            ({"amax_history_len": 5, "margin": 1}, [448 / 8, 57344 / 16, 448 / 24]),
            ({"amax_history_len": 3, "margin": -1}, [448 / 2, 57344 / 4, 448 / 6]),
        ],
    )
    def test_of_a_history_under_another_recipe_the_newest_amaxes_go_on(
        self, options: dict[str, int], expected: list[float]
    ) -> None:
        resumed = DelayedState(Recipe(DelayedScaling(**options)), self.COLUMNS)
        resumed.load_state_dict(self.trained().state_dict())
        assert resumed.scale.tolist() == pytest.approx(expected, rel=1e-6)
        kept = min(3, len(resumed.history))
        assert torch.equal(resumed.history[-kept:], self.trained().history[-kept:])
        assert not resumed.history[:-kept].any()

    def test_a_state_without_a_history_leaves_all_as_it_is(self) -> None:
        resumed = DelayedState(self.RECIPE, self.COLUMNS)
        resumed.load_state_dict(DelayedState(Recipe(CurrentScaling()), self.COLUMNS).state_dict())
        assert torch.equal(resumed.scale, torch.ones(3))

    def test_is_empty_under_current_scaling(self) -> None:
        state = DelayedState(Recipe(CurrentScaling()), self.COLUMNS)
        state.amax = torch.ones(3)
        state.update()
        assert state.history.numel() == 0
        assert torch.equal(state.scale, torch.ones(3))


class TestParseRecipe:
    @pytest.mark.parametrize(
        ("value", "recipe"),
        [
            ("delayed", Recipe(DelayedScaling())),
            ("current", Recipe(CurrentScaling())),
            ({"name": "current", "power_of_two": True, "epsilon": 1e-6}, Recipe(CurrentScaling(1e-6, True))),
            (
                {"name": "delayed", "fp8_format": "e4m3", "margin": 1, "amax_history_len": 16},
                Recipe(DelayedScaling(1, 16), "e4m3"),
            ),
            (
                {"name": "delayed", "amax_compute_algo": "most_recent"},
                Recipe(DelayedScaling(amax_compute_algo="most_recent")),
            ),
            (Recipe(CurrentScaling(), "e5m2"), Recipe(CurrentScaling(), "e5m2")),
            ("blockwise", Recipe(BlockScaling(), "e4m3")),
            ("blockwise-hybrid(power_of_two=False)", Recipe(BlockScaling(False), "hybrid")),
            ("mxfp8", Recipe(MXFP8Scaling(), "e4m3")),
            ({"name": "mxfp8", "fp8_format": "hybrid"}, Recipe(MXFP8Scaling(), "hybrid")),
            ("nvfp4", Recipe(NVFP4Scaling(), "e2m1")),
            ("bf16", Recipe(Unscaled(), "bf16")),
        ],
        ids=str,
    )
    def test_reads(self, value: Any, recipe: Recipe) -> None:
        assert parse_recipe(value) == recipe

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            ("delaid", ["'delaid'", "delayed", "current"]),
            ({"margin": 1}, ["None", "delayed", "current"]),
            ({"name": "delayed", "epsilon": 1.0}, ["'epsilon'", "amax_history_len", "amax_compute_algo", "margin"]),
            ({"name": "current", "margin": 1, "foo": 2}, ["'foo', 'margin'", "epsilon", "power_of_two", "fp8_format"]),
            ({"name": "current", "fp8_format": "e3m4"}, ["'e3m4'", "'hybrid'", "'e4m3'", "'e5m2'"]),
            ("mxfp8-e5m2", ["'e5m2'", "'e4m3'", "'hybrid'"]),
            ("nvfp4-e4m3", ["'e4m3'", "'e2m1'"]),
            ("mxfp8(power_of_two=False)", ["'power_of_two'", "fp8_format"]),
            ({"name": "delayed", "amax_compute_algo": "mean"}, ["'mean'", "'max'", "'most_recent'"]),
            ({"name": "delayed", "amax_history_len": 0}, ["amax_history_len", "0", "at least 1"]),
            ({"name": "delayed", "amax_history_len": 99999999999}, ["amax_history_len", "99999999999", "at most 1000000"]),
        ],
        ids=str,
    )
    def test_says_what_is_wrong_and_what_would_be_right(self, value: Any, named: list[str]) -> None:
        with pytest.raises(ConfigError) as error:
            parse_recipe(value)
        assert [part for part in named if part not in str(error.value)] == []

    @pytest.mark.parametrize(
        ("name", "option", "value"),
        [
            ("delayed", "amax_history_len", "16"),
            ("delayed", "amax_history_len", 1.5),
            ("delayed", "margin", "1"),
            ("current", "epsilon", "1e-6"),
        ],
    )
    def test_names_an_option_whose_value_is_of_the_wrong_kind(self, name: str, option: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=option):
            parse_recipe({"name": name, option: value})

    @pytest.mark.parametrize(
        ("value", "name"),
        [
            ("delayed", "delayed-hybrid"),
            ({"name": "current", "fp8_format": "e4m3"}, "current-e4m3"),
            ({"name": "delayed", "margin": 1, "amax_history_len": 16}, "delayed-hybrid(margin=1,amax_history_len=16)"),
            ({"name": "delayed", "amax_history_len": 1024}, "delayed-hybrid"),
            ("blockwise(epsilon=1e-6)", "blockwise-e4m3(epsilon=1e-06)"),
            ({"name": "mxfp8", "fp8_format": "hybrid"}, "mxfp8-hybrid"),
            ("nvfp4-e2m1", "nvfp4"),
            ("bf16", "bf16"),
        ],
        ids=str,
    )
    def test_names_leave_defaults_out_and_are_read_back(self, value: Any, name: str) -> None:
        recipe = parse_recipe(value)
        assert recipe.name == name
        assert parse_recipe(name) == recipe

    @pytest.mark.parametrize(
        ("fp8_format", "formats"),
        [("hybrid", [E4M3, E4M3, E5M2]), ("e4m3", [E4M3] * 3), ("e5m2", [E5M2] * 3)],
    )
    def test_format_of_each_role(self, fp8_format: str, formats: list[FloatFormat]) -> None:
        recipe = Recipe(CurrentScaling(), fp8_format)
        assert [recipe.format_of(role) for role in ROLES] == formats

    @pytest.mark.parametrize(
        ("name", "formats"),
        [
            ("mxfp8", [E4M3] * 3),
            ("blockwise-hybrid", [E4M3, E4M3, E5M2]),
            ("nvfp4", [E2M1] * 3),
            ("bf16", [BF16] * 3),
        ],
    )
    def test_format_of_each_role_under_other_recipes(self, name: str, formats: list[FloatFormat]) -> None:
        assert [parse_recipe(name).format_of(role) for role in ROLES] == formats


class TestAmax:
    @pytest.mark.parametrize("dtype", [*SIXTEEN_BIT, torch.float32], ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_the_largest_magnitude_that_is_not_nan(self, kind: str, dtype: torch.dtype) -> None:
        x = KINDS["heavy-tailed" if kind == "subnormal" else kind](dtype)
        magnitude = np.abs(x.detach().float().numpy())
        got = amax_of(x)
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
