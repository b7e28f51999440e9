"""The state of delayed scaling: the scales it gives, saved, resumed and carried over to another recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_fp8_debug.numerics.delayed_state import DelayedState
from nemo_fp8_debug.numerics.recipe import Recipe
from nemo_fp8_debug.numerics.tensor_scaling import (
    CurrentScaling,
    DelayedScaling,
)


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
