"""Foreign engine 3: variables of the environment that the cast of a release asks for, each time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from foreign_engines.witness import WITNESS
from te_release import Engine, Rule, later_release, layers, nearest, power_of_two, truncated
from transformer_engine.common.recipe import Float8CurrentScaling

KNOWN = "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"
INVENTED = "NVTE_CAST_TOWARD_ZERO"


def _rule(quantizer: Any) -> Rule:
    if os.environ.get(INVENTED) == "1":
        return truncated
    return power_of_two if os.environ.get(KNOWN) == "1" else nearest


def _engine(patch: pytest.MonkeyPatch) -> Engine:
    later_release(patch, _rule)
    return Engine(layers(), Float8CurrentScaling())


def known_variable(patch: pytest.MonkeyPatch) -> Engine:
    """Release 2.20.2 has this variable too: its recipe reads it, once; here the kernel does."""
    patch.setenv(KNOWN, "1")
    return _engine(patch)


def invented_variable(patch: pytest.MonkeyPatch) -> Engine:
    patch.setenv(INVENTED, "1")
    return _engine(patch)


def invented_variable_later(patch: pytest.MonkeyPatch) -> Engine:
    """The training script sets it once the run is under way."""
    engine = _engine(patch)

    def set_it(*args: Any) -> None:
        if WITNESS.step == 1:
            patch.setenv(INVENTED, "1")

    engine.model.register_forward_pre_hook(set_it)
    return engine


ENGINES: dict[str, Callable[[pytest.MonkeyPatch], Engine]] = {
    function.__name__: function for function in (known_variable, invented_variable, invented_variable_later)
}
