"""The state of delayed scaling: amax histories, and the scales computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core.keys import ATTENTION_BACKWARD, ATTENTION_FORWARD, ROLES, Key
from ..errors import ConfigError
from .block_scaling import BlockScalingRule
from .formats import FloatFormat
from .recipe import Recipe
from .tensor_scaling import CurrentScaling, DelayedScaling, Unscaled, compute_cast_scales

#: how much memory the histories of all recipes may take, in bytes
MOST_BYTES = 256 << 20


def check_history_memory(recipes: Iterable[Recipe], operands: int) -> None:
    """Raise an error if the histories of these recipes would take too much memory.

    Raises:
        ConfigError: the histories exceed `MOST_BYTES`.
    """
    entries = sum(r.scaling.amax_history_len for r in recipes if isinstance(r.scaling, DelayedScaling))
    if (needed := 4 * entries * operands) > MOST_BYTES:
        raise ConfigError(
            f"histories of {entries:,} steps of {operands:,} operands take {needed >> 20:,} MiB of memory, more than the "
            f"limit of {MOST_BYTES >> 20} MiB; use fewer recipes with delayed scaling, or a smaller amax_history_len"
        )


class DelayedState:
    """Histories and scales of many operands under one recipe with delayed scaling, one column for each operand."""

    def __init__(self, recipe: Recipe, columns: Sequence[tuple[str, str]], device: torch.device | None = None) -> None:
        """
        Args:
            recipe: the recipe. If it has no delayed scaling, the state stays empty.
            columns: (layer, role) of each operand.
        """
        self.columns = list(columns)
        self.index = {column: i for i, column in enumerate(self.columns)}
        n = len(self.columns)
        self._recipe, self._scaling = recipe, recipe.scaling
        kind: Any = {"dtype": torch.float32, "device": device}
        length = recipe.scaling.amax_history_len if isinstance(recipe.scaling, DelayedScaling) else 0
        self.limit = torch.tensor([recipe.get_format(role).max for _, role in self.columns], **kind)
        self.scale = torch.ones(n, **kind)
        self.amax = torch.zeros(n, **kind)
        self.history = torch.zeros(length, n, **kind)

    def update(self) -> None:
        """End a step: update the scales with the amaxes of this step, and start the next step."""
        if isinstance(self._scaling, DelayedScaling):
            self.history, self.scale = self._scaling.update_history_and_scale(
                self.history, self.scale, self.amax, self.limit
            )
            self.amax = torch.zeros_like(self.amax)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue with the same scales."""
        return {"recipe": self._recipe.name, "columns": self.columns, "scale": self.scale, "history": self.history}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the operands that are in the saved state. Other operands start with an empty history.

        If the state was saved under another recipe, we take the newest saved amaxes and compute this recipe's scales.
        """
        if not isinstance(self._scaling, DelayedScaling):
            return
        entries = min(len(saved["history"]), len(self.history))
        if not entries:
            return
        known = [(i, j) for j, column in enumerate(saved["columns"]) if (i := self.index.get(tuple(column))) is not None]
        for i, j in known:
            self.scale[i] = saved["scale"][j]
            self.history[-entries:, i] = saved["history"][-entries:, j]
        same = len(saved["history"]) == len(self.history) and saved.get("recipe", self._recipe.name) == self._recipe.name
        if known and not same:
            mine = torch.tensor([i for i, _ in known], device=self.scale.device)
            self.scale[mine] = self._scaling.compute_scale(
                self.history[:, mine], torch.ones_like(self.scale[mine]), self.limit[mine]
            )


class EmulatedScales:
    """The scales that a recipe would choose at each sample, computed only from the amax of each operand."""

    def __init__(self, recipe: Recipe, keys: Sequence[Key]) -> None:
        self.recipe = recipe
        self._state = DelayedState(recipe, keys)
        self._seen: set[Key] = set()

    def is_measured_role(self, role: str) -> bool:
        """Return True if tensors of this role are measured under the recipe. Only operands of GEMMs have histories."""
        if role in (*ATTENTION_FORWARD, *ATTENTION_BACKWARD):
            return False
        return role in ROLES or not isinstance(self.recipe.scaling, DelayedScaling)

    def next_scale(self, key: Key) -> torch.Tensor | CurrentScaling | BlockScalingRule:
        """Return the next scale of an operand: a float32 scalar tensor, or the rule that chooses scales from the tensor.

        Under delayed scaling, an operand without history uses its own amax.
        """
        rule = self.recipe.scaling
        if isinstance(rule, (CurrentScaling, BlockScalingRule)):
            return rule
        if isinstance(rule, Unscaled):
            return torch.ones(())
        if isinstance(rule, DelayedScaling) and key not in self._seen:
            return CurrentScaling()
        return self._state.scale[self._state.index[key]]

    def compute_scales(self, keys: Sequence[Key], amax: torch.Tensor) -> torch.Tensor:
        """Return the scales of operands with this amax, both float32 [B]. The scales are NaN under a block rule."""
        held = [by if isinstance(by := self.next_scale(key), (torch.Tensor, CurrentScaling)) else None for key in keys]
        return compute_cast_scales(held, self.list_formats(keys), amax)

    def list_formats(self, keys: Sequence[Key]) -> list[FloatFormat]:
        """Return the format that each operand is cast to."""
        return [self.recipe.get_format(role) for _, role in keys]

    def update_amax_histories(self, keys: Sequence[Key], amax: torch.Tensor) -> None:
        """End a sample: add the amax, float32 [B], of each operand to its history."""
        if isinstance(self.recipe.scaling, DelayedScaling):
            self._state.amax[torch.tensor([self._state.index[key] for key in keys], dtype=torch.int64)] = amax
            self._seen.update(key for key, top in zip(keys, amax.tolist(), strict=True) if top > 0)
            self._state.update()
