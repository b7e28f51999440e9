"""How `nemo-fp8-debug rescue` hands a plan to the run that it starts: through the environment, which launchers pass on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..core.arguments import shown
from ..errors import ConfigError
from .plan import Plan

#: absolute path of the plan
PLAN = "NEMO_FP8_DEBUG_PLAN"
#: a file that the run makes once it has read the plan
TAKEN = "NEMO_FP8_DEBUG_PLAN_TAKEN"

AnyPlan = Plan | str | os.PathLike[str]


def is_rescue() -> bool:
    """Whether this process belongs to a run that `rescue` has started."""
    return bool(os.environ.get(PLAN))


def plan_in_force(own: AnyPlan | None = None) -> Plan | None:
    """The plan of `rescue`, which goes before `own`: it was given later.

    Raises:
        ConfigError: it cannot be read.
    """
    if is_rescue():
        plan = Plan.load(os.environ[PLAN])
        if taken := os.environ.get(TAKEN):
            with contextlib.suppress(OSError):  # on another host, perhaps
                Path(taken).touch()
        return plan
    return read_plan(own)


def read_plan(plan: AnyPlan | None) -> Plan | None:
    """A plan that may be given as a file.

    Raises:
        ConfigError: it cannot be read, or is neither a plan nor a path.
    """
    if plan is not None and not isinstance(plan, (Plan, str, os.PathLike)):
        raise ConfigError(f"plan is {shown(plan)}; it takes the path of a plan, or a Plan")
    return Plan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan
