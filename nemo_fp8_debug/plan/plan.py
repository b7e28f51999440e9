"""Define plans: lists of changes to a run's quantization. `recommend` makes plans, interventions apply them, and files
store them as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..core.arguments import format_value
from ..core.keys import ROLES
from ..core.layer_names import compile_layer_patterns
from ..errors import ConfigError
from ..numerics.recipe import Recipe, RecipeReference

VERSION = 1


@dataclass(frozen=True)
class Change(RecipeReference):
    """A change to the cast of some operands.

    Args:
        layer: global name of a GEMM, or a pattern as in `Config.layers`.
        recipe: name of the recipe that casts the operands, perhaps with options (`current-e5m2`, `delayed(margin=1)`).
            `bf16` leaves the operands unquantized.
        roles: operands to change, a list of `input`, `weight` and `grad_output`. A GEMM runs in FP8 only if both of its
            operands are cast to FP8.
        multiply_in_bf16: whether to multiply quantized values in BF16. This shows whether a problem is caused by FP8
            rounding or by an FP8 kernel.
        why: the evidence for the change, in words.

    Raises:
        ConfigError: a value is invalid. The message names the value.

    Example:
        >>> Change("layers.3.fc2", "current", roles=["grad_output"]).recipe
        'current'
    """

    #: global name of a GEMM, or a pattern as in `Config.layers`
    layer: str
    #: name of a recipe, as `parse_recipe` reads it; `bf16` leaves the operands unquantized
    recipe: str
    #: operands to change; a GEMM runs in FP8 only if both of its operands are cast to FP8
    roles: Sequence[str] = ROLES
    #: whether to multiply quantized values in BF16, to show whether FP8 rounding or an FP8 kernel causes a problem
    multiply_in_bf16: bool = False
    #: the evidence for the change, in words
    why: str = ""

    def __post_init__(self) -> None:
        for name in ("layer", "recipe", "why"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} of a change is {getattr(self, name)!r}; it must be text")
        if not isinstance(self.multiply_in_bf16, bool):
            raise ConfigError(f"multiply_in_bf16 is {self.multiply_in_bf16!r}; it must be true or false")
        known = isinstance(self.roles, Sequence) and not isinstance(self.roles, str) and all(r in ROLES for r in self.roles)
        if not known or not self.roles:
            raise ConfigError(f"roles of a change are {self.roles!r}; choose from {', '.join(ROLES)}")
        object.__setattr__(self, "roles", tuple(self.roles))
        compile_layer_patterns([self.layer])
        _ = self.parsed_recipe


@dataclass(frozen=True)
class Plan:
    """Changes to a run's quantization. If several changes name the same operand, the last one applies.

    Args:
        changes: a list of `Change`. Later changes have precedence over earlier changes.

    Example:
        >>> plan = Plan([Change("layers.*", "current"), Change("layers.0.fc1", "bf16")])
        >>> plan.change_of("layers.0.fc1", "input").recipe
        'bf16'
    """

    changes: Sequence[Change] = ()

    def change_of(self, layer: str, role: str) -> Change | None:
        """Return the change that applies to an operand, or None if the plan does not change the operand.

        Args:
            layer: global name of a GEMM.
            role: `input`, `weight` or `grad_output`.
        """
        for change in reversed(self.changes):
            if role in change.roles and (change.layer == layer or compile_layer_patterns([change.layer])(layer)):
                return change
        return None

    def recipe_of(self, layer: str, role: str, otherwise: Recipe) -> Recipe:
        """Return the recipe that an operand has under this plan. This method is internal, because recipes are not public.

        Args:
            layer: global name of a GEMM.
            role: `input`, `weight` or `grad_output`.
            otherwise: the operand's recipe if the plan does not change it.
        """
        change = self.change_of(layer, role)
        return change.parsed_recipe if change else otherwise

    def text(self) -> str:
        """Return the plan as JSON text, as `save` writes it."""
        content = {"version": VERSION, "changes": [asdict(change) for change in self.changes]}
        return json.dumps(content, indent=2) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        Args:
            path: a file that does not exist yet.

        Raises:
            ConfigError: the file exists already, or cannot be written.

        Example:
            >>> Plan([Change("layers.0.fc1", "bf16")]).save("plan.json")
            >>> Plan.load("plan.json").changes[0].layer
            'layers.0.fc1'
        """
        try:
            with Path(path).open("x") as file:
                file.write(self.text())
        except FileExistsError:
            raise ConfigError(f"{path} exists and is not overwritten; name another file") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan.

        Args:
            path: a file written by `save` or `nemo-fp8-debug recommend --output`.

        Raises:
            ConfigError: the file cannot be read, or is not a plan. The message gives the reason.
        """
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not a plan of changes: {error}") from None
        is_plan = isinstance(content, dict) and content.get("version") == VERSION
        if not is_plan or not isinstance(content.get("changes"), list):
            raise ConfigError(f'{path} is not a plan of changes: {{"version": {VERSION}, "changes": [...]}} is expected')
        return cls(tuple(_change(path, given) for given in content["changes"]))


NO_CHANGES = Plan()


def _change(path: Any, given: Any) -> Change:
    known = {f.name for f in fields(Change)}
    if not isinstance(given, dict) or not {"layer", "recipe"} <= set(given) <= known:
        raise ConfigError(f"{path}: {given!r} is not a change; a change has the keys {', '.join(sorted(known))}")
    try:
        return Change(**given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


#: environment variable with the absolute path of the plan
PLAN = "NEMO_FP8_DEBUG_PLAN"
#: environment variable with the path of a file that the run creates after it has read the plan
TAKEN = "NEMO_FP8_DEBUG_PLAN_TAKEN"

AnyPlan = Plan | str | os.PathLike[str]


def is_rescue_run() -> bool:
    """Return whether `rescue` started this process."""
    return bool(os.environ.get(PLAN))


def read_plan_in_force(own: AnyPlan | None = None) -> Plan | None:
    """Return the plan of `rescue` if `rescue` started this process. Otherwise return the plan `own`.

    Raises:
        ConfigError: the plan cannot be read.
    """
    if is_rescue_run():
        plan = Plan.load(os.environ[PLAN])
        if taken := os.environ.get(TAKEN):
            with contextlib.suppress(OSError):  # the folder may not exist on this host
                Path(taken).touch()
        return plan
    return read_plan(own)


def read_plan(plan: AnyPlan | None) -> Plan | None:
    """Return a plan that is given as a `Plan` or as the path of its file. Return None for None.

    Raises:
        ConfigError: the plan cannot be read, or `plan` is neither a plan nor a path.
    """
    if plan is not None and not isinstance(plan, (Plan, str, os.PathLike)):
        raise ConfigError(f"plan is {format_value(plan)}; it takes the path of a plan, or a Plan")
    return Plan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan
