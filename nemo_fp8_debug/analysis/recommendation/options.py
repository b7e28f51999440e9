"""The ladder: possible changes for an operand, in order of cost, with the operand's errors after each change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import polars as pl

from ...core.keys import Key
from ...core.text import format_number
from ...errors import ConfigError
from ...numerics.block_scaling import Float8BlockScaling, MXFP8Scaling
from ...numerics.limits import LEAST_VALUES
from ...numerics.metric_names import LABELS
from ...numerics.recipe import BF16_RECIPE, Recipe, RecipeReference, Scaling, find_recipe
from ...numerics.tensor_scaling import CurrentScaling, DelayedScaling
from ..replay.replay import replay_recipes
from ..runs.run import Run


@dataclass(frozen=True)
class RestoredSetting:
    """A recorded setting to restore for an operand."""

    #: the recorded recipe to restore; None: keep the recipe, and restore the FP8 state that was lost when the run was
    #: resumed
    recipe: str | None
    #: step at which the run changed; None if the run differs from the baseline from the start
    since: int | None
    #: whether the diagnosis blames this change; if so, undoing it helps, independent of the errors
    is_cause: bool = False


@dataclass(frozen=True)
class ChangeReason:
    """The reason for changing an operand."""

    why: str
    #: first and last step of the first interval in which the operand is out of the baseline's band; None if unknown
    out: tuple[int, int] | None = None
    #: recorded change of the operand, or None
    undo: RestoredSetting | None = None
    #: whether only the scale is wrong, so that a scale that follows the values helps
    only_scale: bool = False


#: scaling and format of an operand; recipes are compared by these
Cast = tuple[Scaling, str]

STAY, UNDO = "stay", "undo"
#: block recipes, in order of cost
BLOCKS = (Float8BlockScaling, MXFP8Scaling)
_KEY = ["layer", "role"]
_OTHER_FORMAT = {"e4m3": "e5m2", "e5m2": "e4m3"}


@dataclass(frozen=True)
class WorstErrors:
    """The worst value of each metric of an operand over the samples that count; None if no sample has the metric."""

    relative_error: float | None
    underflow_pct: float | None
    overflow_pct: float | None


_NONE = WorstErrors(0.0, 0.0, 0.0)
#: largest differences between recorded errors and replayed errors of the same recipe: percentage points of underflow or
#: overflow, and a factor of the relative error
_POINTS, _TIMES = 1.0, 1.5
_METRICS = ("relative_error", "underflow_pct", "overflow_pct")


@dataclass(frozen=True)
class Budget:
    """The largest errors that are allowed for an operand, in the worst of the samples that count.

    With the defaults, a bell-shaped tensor is within the budget in both formats: its relative error is 0.026 in E4M3 and
    0.052 in E5M2, an eighth below the limit. At most 1% of the values may become zero, and at most 0.01% may be clipped.

    Args:
        relative_error: root mean square of the cast's errors, relative to the root mean square of the values.
        underflow_pct: percent of the values that become zero.
        overflow_pct: percent of the values that are clipped.

    Raises:
        ConfigError: a limit is below zero.

    Example:
        >>> budget = Budget(relative_error=0.02)
        >>> budget.relative_error, budget.underflow_pct, budget.overflow_pct
        (0.02, 1.0, 0.01)

        Then call `recommend("runs/a", budget=budget)`.
    """

    relative_error: float = 0.06
    underflow_pct: float = 1.0
    overflow_pct: float = 0.01

    def __post_init__(self) -> None:
        for name in _METRICS:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"the limit of {name} must not be below 0: {getattr(self, name)}")

    def describe_exceeded_limits(self, errors: WorstErrors) -> list[str]:
        """Describe the exceeded limits. Internal."""
        pairs = [(name, getattr(errors, name), getattr(self, name)) for name in _METRICS]
        return [_exceeded(name, value, limit) for name, value, limit in pairs if value is not None and value > limit]

    def find_most_exceeded_metric(self, errors: WorstErrors | None) -> str | None:
        """Return the metric that exceeds its limit most, or None if no known metric exceeds its limit. Internal."""
        values = {name: getattr(errors, name) for name in _METRICS} if errors is not None else {}
        over = {name: value / (getattr(self, name) or 1e-9) for name, value in values.items() if value is not None}
        worst = max(over, key=over.__getitem__, default=None)
        return worst if worst is not None and over[worst] > 1 else None

    def is_met_by_errors(self, errors: WorstErrors | None) -> bool:
        """Return True if the errors are known and within all limits. Internal."""
        return errors is not None and errors != WorstErrors(None, None, None) and not self.describe_exceeded_limits(errors)


def _exceeded(metric: str, value: float, limit: float) -> str:
    label, unit = LABELS[metric]
    return f"{label} {format_number(value, unit)} > {format_number(limit, unit)}"


@dataclass(frozen=True)
class CastOption(RecipeReference):
    """A possible cast of an operand."""

    #: stay, undo, margin, history, current, format, block or bf16
    kind: str
    #: name of the recipe as in `parse_recipe`; for `stay`, the name in the record
    recipe: str
    #: errors under the recipe; None if the run did not try the recipe and histograms do not show the errors
    errors: WorstErrors | None
    #: whether the option is within the budget, as far as errors are known
    meets: bool
    #: whether errors are approximate, because float32 values were rounded to bfloat16
    approximate: bool = False


def resolve_recipe_cast(recipe: Recipe, role: str) -> Cast:
    """Return the scaling and the format of an operand under a recipe."""
    return recipe.scaling, recipe.get_format(role).name


class CurrentCast(NamedTuple):
    """The current cast of an operand."""

    #: the recorded recipe; None if it is a framework's own recipe that we cannot read
    in_use: Recipe | None
    #: format of the cast
    format: str
    role: str
    #: recorded change of the operand, or None
    undo: RestoredSetting | None = None

    @property
    def ladder_start(self) -> Recipe:
        """Return the recipe from which the ladder starts."""
        return self.in_use or _current_in(self.format, self.role)


def _undo(given: CurrentCast) -> Iterator[tuple[str, Recipe]]:
    undo, recipe = given.undo, given.in_use
    if undo is not None and undo.recipe is not None:
        before = find_recipe(undo.recipe)
        is_same = before and recipe and resolve_recipe_cast(before, given.role) == resolve_recipe_cast(recipe, given.role)
        recipe = None if is_same else before
    if undo is not None and recipe is not None:
        yield UNDO, recipe


def _rescale(given: CurrentCast) -> Iterator[tuple[str, Recipe]]:
    recipe, scaling = given.ladder_start, given.ladder_start.scaling
    if isinstance(scaling, DelayedScaling):
        for more in (1, 2):
            yield "margin", replace(recipe, scaling=replace(scaling, margin=scaling.margin + more))
        if scaling.amax_compute_algo == "max" and scaling.amax_history_len > 16:
            yield "history", replace(recipe, scaling=replace(scaling, amax_history_len=16))
        if scaling.amax_compute_algo == "max" and scaling.amax_history_len > 1:
            yield "history", replace(recipe, scaling=replace(scaling, amax_compute_algo="most_recent"))
    if isinstance(scaling, (DelayedScaling, CurrentScaling)):
        current = replace(recipe, scaling=CurrentScaling())
        if current != given.in_use:
            yield "current", current


def _use_other_format(given: CurrentCast) -> Iterator[tuple[str, Recipe]]:
    scaling, other = given.ladder_start.scaling, _OTHER_FORMAT.get(given.format)
    if isinstance(scaling, (DelayedScaling, CurrentScaling)) and other:
        for one in dict.fromkeys([scaling, CurrentScaling()]):
            yield "format", Recipe(one, other)


def _scale_blocks(given: CurrentCast) -> Iterator[tuple[str, Recipe]]:
    for block in BLOCKS:
        for choice in ("e4m3", "hybrid") if given.role == "grad_output" else ("e4m3",):
            if Recipe(block(), choice) != given.in_use:
                yield "block", Recipe(block(), choice)


def _leave_fp8(given: CurrentCast) -> Iterator[tuple[str, Recipe]]:
    yield "bf16", BF16_RECIPE


#: the rungs of the ladder, in order of cost; we recommend the first change that helps
LADDER = (_undo, _rescale, _use_other_format, _scale_blocks, _leave_fp8)


def candidates(given: CurrentCast) -> Iterator[tuple[str, Recipe]]:
    """Yield kinds of changes and their recipes, in order of cost. If a recipe already occurred as `undo`, do not repeat it.

    Example:
        >>> given = CurrentCast(find_recipe("delayed(margin=4)"), "e4m3", "input", RestoredSetting("delayed", since=80))
        >>> [(kind, recipe.name) for kind, recipe in candidates(given)][:2]
        [('undo', 'delayed-hybrid'), ('margin', 'delayed-hybrid(margin=5)')]
    """
    undone = None
    for propose in LADDER:
        for kind, recipe in propose(given):
            if kind == UNDO:
                undone = recipe
            if kind in (UNDO, "bf16") or recipe != undone:
                yield kind, recipe


def list_recipes_to_replay(given: CurrentCast) -> Iterator[Recipe]:
    """Yield the recipes to replay before choosing: the operand's own recipe, and the candidates."""
    if given.in_use:
        yield given.in_use
    for _, recipe in candidates(given):
        yield recipe


def _current_in(fmt: str, role: str) -> Recipe:
    usual = Recipe(CurrentScaling())
    return Recipe(CurrentScaling(), fmt) if fmt in _OTHER_FORMAT and usual.get_format(role).name != fmt else usual


class RecipeErrors:
    """Errors of operands under the recipes in use, under what-if recipes, and under replayed recipes.

    Two kinds of samples count: the later half of an operand's samples, and samples in which the operand was out of band.
    Each error is the worst of these samples. So an option is within the budget only if all of these samples are. We
    know the errors under a recipe only if it was measured in all of these samples.
    """

    def __init__(self, run: Run, keys: Sequence[Key], out: Mapping[Key, tuple[int, int]] | None = None) -> None:
        """
        Args:
            out: first and last step at which each operand was out of band, if known.
        """
        self._run = run
        of_keys = pl.DataFrame(list(keys), schema=dict.fromkeys(_KEY, pl.String), orient="row")
        known = run.metrics.select_tensors_by_key(of_keys).read_all_rows([*_METRICS, "n"])
        known = known.filter(pl.any_horizontal(pl.col(_METRICS).is_not_null()))
        rank, n = pl.col("step").rank().over(_KEY), pl.len().over(_KEY)
        known = known.join(_stretches(out or {}), on=_KEY, how="left", maintain_order="left")
        was_out = pl.col("step").is_between("out_first", "out_last").fill_null(False)
        looked_at = known.with_columns(was_out=was_out).filter((rank > n // 2) | was_out).drop("out_first", "out_last")
        self._looked_at = _without_few(_without_rare_clipping(looked_at).drop("was_out"))
        self._samples = {key: n for key, (n,) in _by_key(self._looked_at.group_by(_KEY).len())}
        self._errors: dict[tuple[Key, Cast], WorstErrors] = {}
        self._approximate: set[tuple[Key, Cast]] = set()
        self._note(run.unused_recipe_metrics)

    def collect_errors_in_use(self) -> dict[Key, WorstErrors]:
        """Return the errors under the scales in use, for all operands that have metrics."""
        return {key: WorstErrors(*metrics) for key, metrics in _by_key(_worst(self._looked_at, _KEY))}

    def compute_replayed_errors(self, wanted: Mapping[Key, Iterable[Recipe]]) -> None:
        """Recompute unknown errors of per-tensor recipes, if the record has histograms."""
        missing: dict[Recipe, list[Key]] = {}
        for key, recipes in wanted.items():
            for recipe in recipes:
                if (
                    key in self._samples
                    and self.look_up_errors(key, recipe) is None
                    and not recipe.uses_block_scaling
                    and recipe != BF16_RECIPE
                ):
                    missing.setdefault(recipe, []).append(key)
        together: dict[tuple[Key, ...], list[Recipe]] = {}
        for recipe, keys in missing.items():
            together.setdefault(tuple(keys), []).append(recipe)
        for operands, of_operands in together.items():
            for rows in replay_recipes(self._run.path, of_operands, steps=self._steps(operands), only=set(operands)):
                self._note(rows)

    def look_up_errors(self, key: Key, recipe: Recipe) -> WorstErrors | None:
        """Return the errors under a recipe, or None if they are unavailable."""
        return self._errors.get((key, resolve_recipe_cast(recipe, key[1])))

    def is_approximate(self, key: Key, recipe: Recipe) -> bool:
        """Return True if errors under a recipe are computed from float32 values that were first rounded to bfloat16."""
        return (key, resolve_recipe_cast(recipe, key[1])) in self._approximate

    def _steps(self, keys: Sequence[Key]) -> set[int]:
        of_keys = pl.DataFrame(keys, schema=_KEY, orient="row")
        return set(self._looked_at.join(of_keys, on=_KEY, how="semi")["step"])

    def _note(self, rows: pl.DataFrame) -> None:
        rows = rows.select(*_KEY, "step", "recipe", *_METRICS, pl.col("rounded").fill_null(False))
        # Rows that were measured in the run are exact and take precedence.
        rows = rows.unique([*_KEY, "step", "recipe"], keep="first", maintain_order=True)
        rows = rows.join(self._looked_at.select(*_KEY, "step", "n"), on=[*_KEY, "step"], maintain_order="left")
        counted = _worst(_without_few(rows), [*_KEY, "recipe"], pl.len(), pl.col("rounded").any())
        for layer, role, name, *metrics, samples, is_rounded in counted.iter_rows():
            recipe, key = find_recipe(name), (layer, role)
            if recipe is not None and samples == self._samples[key]:
                self._errors[key, resolve_recipe_cast(recipe, role)] = WorstErrors(*metrics)
                if is_rounded:
                    self._approximate.add((key, resolve_recipe_cast(recipe, role)))


def _stretches(out: Mapping[Key, tuple[int, int]]) -> pl.DataFrame:
    """Return a table with layer, role, and the first and last step out of band (out_first, out_last)."""
    schema = dict.fromkeys(_KEY, pl.String) | dict.fromkeys(("out_first", "out_last"), pl.Int64)
    return pl.DataFrame([(*key, *steps) for key, steps in out.items()], schema=schema, orient="row")


def _without_few(rows: pl.DataFrame) -> pl.DataFrame:
    """Set percentages that correspond to fewer than `LEAST_VALUES` values to 0, like the limits of `diagnose`.

    The standard deviation of a count is its square root (5 for a count of 24), so a smaller count gives no reliable
    percentage. Clean runs with delayed scaling sometimes clip 1 to 23 values. In the later half, only 2 of 78 clean runs
    clip more.
    """
    shares = ("underflow_pct", "overflow_pct")
    return rows.with_columns(pl.when(_values(name) < LEAST_VALUES).then(0.0).otherwise(name).alias(name) for name in shares)


def _without_rare_clipping(rows: pl.DataFrame) -> pl.DataFrame:
    """If a sample clips fewer than `LEAST_VALUES` values, leave out its relative error, which the clipped values dominate.

    A delayed scale reacts late to a batch with larger gradients, and the next samples are normal again. So keep the error if
    at least half of the samples clip a few values, or if the operand is known to be out of band in this sample.
    """
    few = _values("overflow_pct").is_between(1, LEAST_VALUES - 1).fill_null(False)
    rare = few & ~pl.col("was_out") & (few.mean().over(_KEY) < 0.5)
    return rows.with_columns(relative_error=pl.when(~rare).then("relative_error"))


def _values(share: str) -> pl.Expr:
    """Convert a percentage of a tensor's values to the number of values; null if the total is unknown."""
    return (pl.col(share) * pl.col("n") / 100).round()


def _worst(rows: pl.DataFrame, by: list[str], *more: pl.Expr) -> pl.DataFrame:
    return rows.group_by(by, maintain_order=True).agg(pl.max(*_METRICS), *more)


def _by_key(rows: pl.DataFrame) -> Iterator[tuple[Key, tuple[float, ...]]]:
    for layer, role, *values in rows.iter_rows():
        yield (layer, role), tuple(values)


def list_cast_options(
    key: Key, given: CurrentCast, dtype: str, judged: RecipeErrors, budget: Budget, flag: ChangeReason
) -> tuple[CastOption, ...]:
    """Return all options for an operand that exceeds the budget, in order of cost. The last option is BF16."""
    options = []
    astray = _astray(key, given.in_use, judged)
    for kind, recipe in candidates(given):
        if astray and isinstance(recipe.scaling, DelayedScaling) and kind != UNDO:
            continue
        errors = None if kind == UNDO and given.undo and given.undo.recipe is None else judged.look_up_errors(key, recipe)
        if recipe == BF16_RECIPE:
            errors = errors or (_NONE if dtype != "float32" else None)  # with 16 bits, BF16 is the run's own precision
        meets = recipe == BF16_RECIPE or budget.is_met_by_errors(errors) or _helps_anyway(kind, errors, flag)
        options.append(CastOption(kind, recipe.name, errors, meets, judged.is_approximate(key, recipe)))
    return tuple(options)


def _helps_anyway(kind: str, errors: WorstErrors | None, flag: ChangeReason) -> bool:
    """Return True if a change helps although its errors are unknown, because it undoes the cause or because only the scale
    is wrong.
    """
    if kind == UNDO and flag.undo is not None:
        return flag.undo.is_cause or errors is None
    return kind == "current" and flag.only_scale and errors is None


def _astray(key: Key, in_use: Recipe | None, judged: RecipeErrors) -> bool:
    """Return True if errors under the scale in use are much larger than its recipe explains, so that no delayed scale is
    reliable.

    A replayed amax history contains only the sampled steps, so small differences do not count.
    """
    now = judged.collect_errors_in_use().get(key)
    own = judged.look_up_errors(key, in_use) if in_use is not None and isinstance(in_use.scaling, DelayedScaling) else None
    if own is None or now is None:
        return False
    more = [(getattr(now, name) or 0.0) - (getattr(own, name) or 0.0) for name in ("underflow_pct", "overflow_pct")]
    return max(more) > _POINTS or (now.relative_error or 0.0) > _TIMES * (own.relative_error or 0.0)
