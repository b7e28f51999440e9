"""The options of a run: plain values that are checked before the first step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core.arguments import check_choices, check_number, check_strings, format_value, reject_unknown_arguments
from ..core.keys import ACTIVATIONS, ROLES, STATES
from ..core.layer_names import compile_layer_patterns
from ..errors import ConfigError
from ..numerics.recipe import Recipe, parse_recipe
from .loggers import LoggerChoice, parse_loggers
from .trigger_rules import parse_trigger_rule

#: options that are whole numbers, and the smallest valid value of each
_NUMBERS = {
    "interval": 1,
    "first_step": -(1 << 62),
    "last_step": -(1 << 62),
    "dump_max_bytes": 0,
    "dump_min_free_bytes": 0,
    "trigger_steps": 1,
    "max_tags": 0,
    "table_rows": 0,
    "output_rows": 0,
    "verify_rows": 0,
    "histogram_interval": 1,
}
#: largest number of what-if recipes
MOST_WHAT_IF = 16
#: options that must be the same on all ranks, because they decide when and what ranks communicate
SAME_ON_ALL_RANKS = (
    *("interval", "first_step", "last_step", "triggers", "trigger_steps"),
    *("output_rows", "verify_rows", "replicas", "states", "gradients", "activations"),
    *("copies", "block_scales", "eager"),
)


@reject_unknown_arguments()
@dataclass(frozen=True)
class Config:
    """The options of `Monitor` and all callbacks: what to sample, when, and where to write samples.

    Args:
        interval: number of steps from one sampled step to the next. A step is sampled if its number is divisible by
            `interval`. An int, at least 1. Default: `100`.
        first_step: the first step that may be sampled. An int. Default: `0`.
        last_step: the last step that may be sampled, itself included. An int, not less than `first_step`, or None for no
            limit. Default: `None`.
        layers: GEMMs to measure. A list of patterns for their global names. A pattern is a glob (`decoder.layers.3.*`,
            `linear_fc2`), or `re:` and a regular expression. None: all GEMMs. Default: `None`.
        roles: operands to measure. A list of `input` (X), `weight` (W) and `grad_output` (dY). Default: `("input", "weight",
            "grad_output")`.
        recipe: the FP8 recipe under which errors are measured. "auto": the run's own recipe. Otherwise a name, perhaps with
            options (`current-e4m3`, `delayed(margin=1)`, `mxfp8`), or a dict (`{"name": "delayed", "margin": 1}`). Default:
            `"auto"`.
        what_if: what-if recipes. We also measure each sample under these recipes, although the run does not use them. A list
            of at most 16 names or dicts as in `recipe`. Default: `()`.
        dump: layers whose tensors are dumped at each sampled step. A list of patterns as in `layers`. Default: `()`.
        dump_max_bytes: largest total size of a rank's dumps in bytes, including dumps from before a restart of the run. An
            int, at least 0. Default: `10 << 30` (10 GiB).
        dump_min_free_bytes: bytes to leave free on the disk. An int, at least 0. Default: `20 << 30` (20 GiB).
        triggers: conditions that cause the next steps to be sampled. A list of `loss_spike`, `nonfinite`, `early_warning`,
            and limits of metrics (`underflow_pct/input > 20`). Default: `()`.
        trigger_steps: number of consecutive steps to sample after a trigger. An int, at least 1. Default: `5`.
        trigger_dump: layers whose tensors are dumped at the steps sampled after a trigger. A list of patterns as in
            `layers`. Default: `()`.
        output: folder of the run record, a path or any fsspec address. None is for callbacks and adapters only, and means
            `fp8_debug` next to the run's TensorBoard events or in its output folder. Default: `None`.
        on_error: what happens after an error in the monitor. "warn": a sample is lost, and we warn once. "raise": the run
            stops, which is useful in tests. Default: `"warn"`.
        max_tags: largest number of scalar tags for single tensors in TensorBoard. If this is not enough for all tensors,
            only the worst tensors of each role get tags. An int, at least 0. Default: `5000`.
        table_rows: number of rows of the table that is printed at each sampled step. It shows the worst operands first. An
            int, at least 0. 0: print no table. Default: `5`.
        output_rows: number of rows, and of columns, in which we measure the error of each GEMM's outputs. An int, at least
            0. 0: measure no outputs. Default: `0`.
        verify_rows: number of rows, and of columns, in which we compare each GEMM's results (Y, dX, dW) with the exact
            product of the operands. An int, at least 0. 0: verify nothing. If `output_rows` is set too, the larger number
            applies to both. Default: `0`.
        replicas: whether to compare different ranks' copies of the same tensor bit by bit. The tensors are W, its gradient
            and, under tensor parallelism, X. A sampled step reads these tensors one additional time. Default: `False`.
        states: optimizer tensors to measure for the weights of all GEMMs. A list of `weight_gradient`, `first_moment`,
            `second_moment`, `master_weight` and `update`. Default: `()`.
        gradients: whether to record the norm of each weight's gradient, and how many values of the gradient are zero or not
            finite. A sampled step reads each gradient one additional time. Default: `True`.
        activations: tensors between GEMMs to measure. A list of `norm` (inputs and outputs of norms; the input of a pre-norm
            is the residual stream), `router` (logits of a mixture of experts) and `attention` (logits of some rows).
            Default: `()`.
        copies: whether to measure the copies of operands that are quantized separately for dgrad and wgrad under some block
            recipes. A sampled step reads these operands one additional time, and keeps one transposed operand in memory at a
            time. Default: `False`.
        block_scales: whether to record the distribution of block scales, for operands that are cast in blocks. A sampled
            step reads these operands two additional times. Default: `False`.
        histogram_interval: record histograms only in samples whose step number is divisible by this number. An int, at least
            1. Samples with NaN or infinity, and samples due to a trigger or to `steps` in the control file, always have
            histograms. Metrics are recorded in every sample. Default: `1`.
        eager: whether to measure layers inside torch.compile. Sampled steps then run in eager mode, so the last bits of
            their results may differ from the results of compiled graphs. Default: `False`.
        loggers: experiment trackers that also get a summary, in addition to the loggers of a Lightning trainer. A list of
            `wandb`, `mlflow` and `comet`, of mappings with settings to start a run (`{"wandb": {"project": "fp8"}}`), or of
            your own runs and loggers. Default: `()`.
        log_every_tensor: whether loggers also get the metrics of single tensors, up to `max_tags` scalars. Otherwise loggers
            get a summary of at most 60 scalars. Default: `False`.
        report_baseline: record of a baseline run. At the end, loggers get an HTML page that compares the run with the
            baseline. A path, or None for no page. Default: `None`.

    Raises:
        ConfigError: a value is invalid. The message names the value and the reason.

    Example:
        >>> config = Config(interval=100, first_step=1000, layers=["layers.*.fc2"])
        >>> config.samples(900), config.samples(1100)
        (False, True)
    """

    interval: int = 100
    first_step: int = 0
    last_step: int | None = None
    layers: Sequence[str] | None = None
    roles: Sequence[str] = ROLES
    recipe: str | Mapping[str, Any] = "auto"
    what_if: Sequence[str | Mapping[str, Any]] = ()
    dump: Sequence[str] = ()
    dump_max_bytes: int = 10 << 30
    dump_min_free_bytes: int = 20 << 30
    triggers: Sequence[str] = ()
    trigger_steps: int = 5
    trigger_dump: Sequence[str] = ()
    output: str | None = None
    on_error: str = "warn"
    max_tags: int = 5000
    table_rows: int = 5
    output_rows: int = 0
    verify_rows: int = 0
    replicas: bool = False
    states: Sequence[str] = ()
    gradients: bool = True
    activations: Sequence[str] = ()
    copies: bool = False
    block_scales: bool = False
    histogram_interval: int = 1
    eager: bool = False
    loggers: Sequence[Any] = ()
    log_every_tensor: bool = False
    report_baseline: str | None = None

    def __post_init__(self) -> None:
        for name, least in _NUMBERS.items():
            value = getattr(self, name)
            if name != "last_step" or value is not None:
                object.__setattr__(self, name, check_number(name, value, least))
        for name in ("layers", "roles", "states", "activations", "dump", "triggers", "trigger_dump"):
            if name != "layers" or self.layers is not None:
                check_strings(name, getattr(self, name))
        if not isinstance(self.what_if, Sequence) or isinstance(self.what_if, str):
            raise ConfigError(f"what_if is {format_value(self.what_if)}; it takes a list of recipes")
        if len(self.what_if) > MOST_WHAT_IF:
            raise ConfigError(f"what_if has {len(self.what_if)} recipes; it takes at most {MOST_WHAT_IF}")
        for name in ("output", "report_baseline"):
            value = getattr(self, name)
            if not isinstance(value, (str, os.PathLike, type(None))) or value == "":
                raise ConfigError(f"{name} is {format_value(value)}; it must be a path")
        if self.last_step is not None and self.last_step < self.first_step:
            raise ConfigError(f"last_step {self.last_step} is before first_step {self.first_step}: nothing is sampled")
        for name, known in {"roles": ROLES, "states": STATES, "activations": ACTIVATIONS}.items():
            if name == "roles" or getattr(self, name):
                check_choices(name, getattr(self, name), known)
        for name in ("replicas", "gradients", "copies", "block_scales", "eager", "log_every_tensor"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {format_value(getattr(self, name))}; it must be True or False")
        if self.on_error not in ("warn", "raise"):
            raise ConfigError(f"on_error is {self.on_error!r}; use 'warn' or 'raise'")
        for patterns in (self.layers, self.dump, self.trigger_dump):
            compile_layer_patterns(patterns)
        _ = self.what_if_recipes, self.parsed_recipe, self.logger_choices
        for trigger in self.triggers:
            parse_trigger_rule(trigger)

    @cached_property
    def what_if_recipes(self) -> tuple[Recipe, ...]:
        """The parsed recipes of `what_if`."""
        return tuple(map(parse_recipe, self.what_if))

    @cached_property
    def parsed_recipe(self) -> Recipe | None:
        """The parsed `recipe`, or None for "auto"."""
        return None if self.recipe == "auto" else parse_recipe(self.recipe)

    @cached_property
    def logger_choices(self) -> tuple[LoggerChoice, ...]:
        """The parsed `loggers`."""
        return parse_loggers(self.loggers)

    def samples(self, step: int) -> bool:
        """Return whether `step` is sampled. The result depends only on the step's number, so it is the same on all ranks.

        Args:
            step: number of a training step.
        """
        in_window = self.first_step <= step and (self.last_step is None or step <= self.last_step)
        return in_window and step % self.interval == 0

    def samples_any(self, first: int, last: int) -> bool:
        """Return whether any step from `first` to `last` is sampled.

        Args:
            first: the first step.
            last: the last step, itself included.

        Example:
            >>> Config(interval=100).samples_any(101, 199)
            False
        """
        first = max(first, self.first_step)
        next_one = -(-first // self.interval) * self.interval
        return next_one <= (last if self.last_step is None else min(last, self.last_step))

    def describe_schedule(self) -> str:
        """Describe in words which steps are sampled, such as `every 100 steps from step 500 on`."""
        every = "every step" if self.interval == 1 else f"every {self.interval} steps"
        first = f" from step {self.first_step}{' on' if self.last_step is None else ''}" if self.first_step > 0 else ""
        return every + first + ("" if self.last_step is None else f" up to step {self.last_step}")
