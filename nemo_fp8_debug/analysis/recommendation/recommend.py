"""Choose the cheapest change for each operand that exceeds the budget, and compute how much FP8 coverage remains."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import polars as pl

from ...core.keys import ROLES, SHOWN_AS, Key
from ...core.layer_names import compile_layer_patterns, is_expert_aggregate
from ...core.scale_sources import HIGH_PRECISION, NOT_READ, QUANTIZED, describe_quantization
from ...core.text import format_number
from ...errors import RecordError
from ...numerics.recipe import BF16_RECIPE, find_recipe
from ...plan.plan import Change, Plan
from ..comparison.compare import select_quantized_operands
from ..formatting import make_jsonable
from ..runs.grid import Ints
from ..runs.metrics import MetricsTable
from ..runs.run import Run
from .options import (
    STAY,
    UNDO,
    Budget,
    CastOption,
    ChangeReason,
    CurrentCast,
    RecipeErrors,
    RestoredSetting,
    WorstErrors,
    list_cast_options,
    list_recipes_to_replay,
)

#: operands of each of the three GEMMs of a linear layer: Y = X W, dX = dY W, dW = dY X
OPERANDS: Mapping[str, tuple[str, str]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
#: the GEMMs that read an operand
READERS: Mapping[str, tuple[str, ...]] = {
    role: tuple(gemm for gemm, operands in OPERANDS.items() if role in operands) for role in ROLES
}


def flops_of(metrics: MetricsTable) -> dict[str, float]:
    """Return the mean FLOPs of each layer's forward GEMM over the sampled steps. Each backward GEMM needs the same number.

    With T tokens, K inputs and N outputs, X has TK values, W has KN values and dY has TN values. So the FLOPs, 2TKN, are
    twice the square root of the product of these three sizes. Sizes are as in the record: for X and dY,
    the sum over micro-batches and over ranks with other data; for W, the size of one copy.

    Returns:
        FLOPs by layer, for layers with samples of all three operands. There are entries for single experts, but not for
        aggregates.
    """
    single = metrics.select_tensors(metrics.tensors.filter(~pl.col("layer").map_elements(is_expert_aggregate, pl.Boolean)))
    layers = single.tensors["layer"].unique(maintain_order=True)
    place = single.tensors["layer"].replace_strict(layers, range(len(layers)), return_dtype=pl.Int64).to_numpy()
    roles = single.tensors["role"].replace_strict(ROLES, [1 << i for i in range(len(ROLES))], default=0).to_numpy()
    sums, steps = np.zeros(len(layers)), np.zeros(len(layers), dtype=np.int64)
    for rows in single.read_rows_in_batches(["n", "nan", "inf"]):
        found = _of_steps(rows, place, roles)
        sums[found["layer"]] += found["size"].to_numpy()
        steps[found["layer"]] += found["steps"].to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        means = 2 * sums / steps
    return {layer: flops for layer, flops in zip(layers, means.tolist(), strict=True) if math.isfinite(flops)}


def _of_steps(rows: pl.DataFrame, place: Ints, roles: Ints) -> pl.DataFrame:
    """Return a table with layer (index), size (square root of the product of the layer's operand sizes, summed over steps)
    and steps (number of steps that are summed).

    Args:
        place: index of each operand's layer, int64 [T].
        roles: a bit for each operand's role, int64 [T].
    """
    tensors = rows["tensor"].to_numpy()
    step, layer = rows["step"].to_numpy(), place[tensors]
    order = np.lexsort((layer, step))
    step, layer = step[order], layer[order]
    firsts = np.flatnonzero(np.append(True, (step[1:] != step[:-1]) | (layer[1:] != layer[:-1]))[: len(order)])
    size = rows.select(pl.sum_horizontal(pl.col("n", "nan", "inf").fill_null(0)).cast(pl.Float64)).to_series().to_numpy()
    # numpy is many times faster here than groups of polars, one for each layer and step.
    of_steps = pl.DataFrame({"layer": layer[firsts], "size": np.sqrt(np.multiply.reduceat(size[order], firsts))})
    whole = np.bitwise_or.reduceat(roles[tensors[order]], firsts) == (1 << len(ROLES)) - 1
    of_layers = of_steps.filter(pl.Series(whole)).group_by("layer", maintain_order=True)
    return of_layers.agg(pl.col("size").sum(), pl.len().alias("steps"))


def compute_fp8_coverage(flops: Mapping[str, float], in_fp8: Callable[[Key], bool]) -> float | None:
    """Return the share of all GEMM FLOPs in FP8. A GEMM counts if both of its operands are cast to FP8.

    Args:
        flops: the result of `flops_of`.
        in_fp8: function that takes an operand (layer, role) and returns whether it is cast to FP8.

    Returns:
        The share from 0 to 1, or None if no layer's FLOPs are known.
    """
    gemms = [(f, all(in_fp8((layer, role)) for role in pair)) for layer, f in flops.items() for pair in OPERANDS.values()]
    total = math.fsum(f for f, _ in gemms)
    return math.fsum(f for f, fp8 in gemms if fp8) / total if total else None


#: largest share of the model's blocks, at both ends together, that may stay in BF16
_AT_THE_ENDS = 0.25


@dataclass(frozen=True)
class TensorFix:
    """An operand, and the options to fix it."""

    layer: str
    role: str
    why: str
    #: options in order of cost; the first option is no change
    options: tuple[CastOption, ...]
    #: share of all GEMM FLOPs that this change alone takes out of FP8; None if shapes are unknown
    cost: float | None
    #: metric that exceeds the budget most; None if no known metric exceeds the budget
    metric: str | None = None
    #: recorded change that the first change on the ladder undoes, or None
    undo: RestoredSetting | None = None

    @property
    def chosen_option(self) -> CastOption:
        """Return the cheapest option within the budget."""
        return next(option for option in self.options if option.meets)

    @property
    def changes_cast(self) -> bool:
        """Return True if the recommendation changes the operand's cast."""
        return self.chosen_option.kind != STAY and not self.needs_fp8_state

    @property
    def needs_fp8_state(self) -> bool:
        """Return True if the operand keeps its recipe but needs the FP8 state that was lost when the run was resumed."""
        return self.chosen_option.kind == UNDO and self.undo is not None and self.undo.recipe is None

    @property
    def change_description(self) -> str:
        """Describe the change in a few words, for a cell of a table."""
        if self.needs_fp8_state:
            return "none: restore its FP8 state"
        return self.chosen_option.recipe if self.changes_cast else "none: within the limits"

    @property
    def changed_scale_settings(self) -> dict[str, tuple[Any, Any]]:
        """Return the settings of the scale that the change modifies, before and after. Return an empty dict if
        the change replaces the kind of scaling or the format.
        """
        now, then = find_recipe(self.options[0].recipe), self.chosen_option.parsed_recipe
        if now is None or type(now.scaling) is not type(then.scaling):
            return {}
        if now.get_format(self.role) != then.get_format(self.role):
            return {}
        names = [each.name for each in fields(now.scaling)]
        pairs = {name: (getattr(now.scaling, name), getattr(then.scaling, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def tensor_name(self) -> str:
        """Return the usual name of the operand."""
        return f"{SHOWN_AS[self.role]} of {self.layer}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields, the chosen option, and the change as text, for `make_jsonable`."""
        return vars(self) | {"chosen": self.chosen_option, "change": self.change_description}


@dataclass(frozen=True)
class BF16EndBlocks:
    """The numbers of whole blocks in BF16 at either end of the model, if all operands that leave FP8 are in such blocks."""

    start: int
    end: int
    #: number of the model's blocks
    blocks: int
    #: share of FLOPs that stay in FP8
    coverage: float | None


@dataclass(frozen=True)
class Recommendation:
    """The recommended changes to a run."""

    run: Run
    budget: Budget
    findings: tuple[TensorFix, ...]
    plan: Plan
    #: share of all GEMM FLOPs in FP8, now and under the plan; None if shapes are unknown. A run without quantization counts
    #: as if all measured operands were quantized
    before: float | None
    after: float | None
    ends: BF16EndBlocks | None
    #: sentences about options that could not be tried, and how to try them
    notes: tuple[str, ...]

    @property
    def is_run_quantized(self) -> bool:
        """Return True if the run quantizes. If so, the first option of each finding is the cast in use."""
        return self.run.quantization == QUANTIZED

    @property
    def fixes_to_apply(self) -> list[TensorFix]:
        """Return the findings that need a change."""
        return [finding for finding in self.findings if finding.changes_cast]

    def to_json(self) -> dict[str, Any]:
        """Return the recommendation as plain values."""
        plain: dict[str, Any] = make_jsonable(
            {
                "run": self.run.path,
                "quantization": self.run.quantization,
                "budget": self.budget,
                "findings": self.findings,
                "plan": self.plan.changes,
                "fp8_coverage": {"before": self.before, "after": self.after},
                "ends": self.ends,
                "notes": self.notes,
            }
        )
        return plain


def recommend(
    run: Run, flagged: Sequence[Key], budget: Budget | None = None, flags: Mapping[Key, ChangeReason] | None = None
) -> Recommendation:
    """For each operand, choose the cheapest change that is within the budget.

    Args:
        run: the run to fix.
        flagged: operands, (layer, role) each. An aggregate of experts selects all experts of a layer.
        budget: largest errors allowed. They apply to the later half of an operand's samples, and to its samples out of band.
        flags: for some operands, the reason to change them, and recorded changes.

    Returns:
        The recommendation, with the layer names of the record, because its plan is for the recorded model.

    Raises:
        RecordError: the record has no such operand, or no sampled step.
    """
    if run.metrics.is_empty():
        raise RecordError(f"{run.path} has no sampled step")
    budget, own = budget or Budget(), run.recorded_names
    run = run.restore_recorded_names()
    flags = {(own.get(layer, layer), role): flag for (layer, role), flag in (flags or {}).items()}
    # A plan cannot change operands of attention.
    flagged = [(own.get(layer, layer), role) for layer, role in flagged if role in ROLES]
    about = _about(run, flagged)
    judged = RecipeErrors(run, flagged, {key: flag.out for key, flag in flags.items() if flag.out})
    now = judged.collect_errors_in_use()
    unknown = [key for key, (recipe, *_) in about.items() if recipe is None]
    about = {key: what for key, what in about.items() if key not in unknown}
    flag_of = {key: flags.get(key) or ChangeReason(_reason(now.get(key), budget)) for key in about}
    too_bad = [key for key in about if not budget.is_met_by_errors(now.get(key)) or _is_cause(flag_of[key])]
    given = {key: CurrentCast(find_recipe(about[key][0]), about[key][1], key[1], flag_of[key].undo) for key in about}
    judged.compute_replayed_errors({key: list(list_recipes_to_replay(given[key])) for key in too_bad})
    flops, in_fp8 = flops_of(run.metrics), _in_fp8(run)
    before = compute_fp8_coverage(flops, in_fp8.__contains__)

    def left(plan: Plan) -> float | None:
        return compute_fp8_coverage(flops, (in_fp8 - _taken_out(plan, in_fp8)).__contains__)

    findings = []
    for key, (recipe, _, dtype) in about.items():
        flag, stay = flag_of[key], CastOption(STAY, recipe, now.get(key), key not in too_bad)
        options = (stay, *(list_cast_options(key, given[key], dtype, judged, budget, flag) if key in too_bad else ()))
        finding = TensorFix(*key, flag.why, options, None, budget.find_most_exceeded_metric(now.get(key)), flag.undo)
        alone = left(_plan([finding]))
        cost = before - alone if before is not None and alone is not None and _known(key[0], flops) else None
        findings.append(replace(finding, cost=cost))
    plan = _plan(findings)
    after = left(plan)
    return Recommendation(
        run,
        budget,
        tuple(findings),
        plan,
        before,
        after,
        _ends(run, plan, left),
        (*_of_unknown_recipes(unknown, now), *_notes(run, findings)),
    )


def _of_unknown_recipes(keys: Sequence[Key], now: Mapping[Key, WorstErrors]) -> list[str]:
    """Return a sentence about operands without a recorded recipe, for which no change can be tried."""
    if not keys:
        return []
    (layer, role), errors = keys[0], now.get(keys[0])
    known = errors is not None and errors.underflow_pct is not None
    lost = f" (underflow {format_number(errors.underflow_pct, '%')})" if errors is not None and known else ""
    return [
        f"The record has no recipe of {len(keys)} operands, so no change can be tried for them. The first is "
        f"{SHOWN_AS[role]} of {layer}{lost}."
    ]


def find_operands_over_budget(run: Run, budget: Budget) -> list[Key]:
    """Return the operands that exceed a budget, for a run without a baseline. The experts of a layer count as one
    operand.
    """
    keys = sorted(_in_fp8(run))
    aggregates = [key for key in keys if is_expert_aggregate(key[0])]
    in_a_fold = {
        key for key in keys for layer, role in aggregates if role == key[1] and compile_layer_patterns([layer])(key[0])
    }
    kept = [key for key in keys if key in aggregates or key not in in_a_fold]
    return [
        key for key, errors in RecipeErrors(run, kept).collect_errors_in_use().items() if not budget.is_met_by_errors(errors)
    ]


def _about(run: Run, flagged: Sequence[Key]) -> dict[Key, tuple[str, str, str]]:
    """Return the recipe and format in use, and the dtype, of each operand in its last sample."""
    of_keys = pl.DataFrame(list(flagged), dict.fromkeys(("layer", "role"), pl.String), orient="row")
    rows = {
        row[:2]: row[2:]
        for row in run.metrics.select_tensors_by_key(of_keys).read_last_samples(["recipe", "format", "dtype"]).iter_rows()
    }
    if unknown := next((key for key in flagged if key not in rows), None):
        some = ", ".join(f"{layer}:{role}" for layer, role in run.metrics.tensors.head(3).rows())
        raise RecordError(f"{run.path} has no operand {':'.join(unknown)}; it has {some or 'none'} ...")
    return {key: rows[key] for key in dict.fromkeys(flagged)}


def _in_fp8(run: Run) -> set[Key]:
    metrics = select_quantized_operands(run.metrics)
    times = sum(times for recipe, times in metrics.count_rows_by_value("recipe").items() if recipe != BF16_RECIPE.name)
    return set(metrics.tensors.filter(pl.Series(np.zeros(len(metrics.tensors)) + times > 0)).rows())


def _known(layer: str, flops: Collection[str]) -> bool:
    return layer in flops or (is_expert_aggregate(layer) and any(map(compile_layer_patterns([layer]), flops)))


def _is_cause(flag: ChangeReason) -> bool:
    return flag.undo is not None and flag.undo.is_cause


def _reason(errors: WorstErrors | None, budget: Budget) -> str:
    if errors is None:
        return "it has no metrics"
    return ", ".join(budget.describe_exceeded_limits(errors)) or "within the budget"


def _taken_out(plan: Plan, keys: Collection[Key]) -> set[Key]:
    """Return the operands that a plan leaves in BF16. The result agrees with `Plan.change_of`, but each pattern is
    compiled only once.
    """
    out: set[Key] = set()
    for change in plan.changes:
        chosen = compile_layer_patterns([change.layer])
        named = {(layer, role) for layer, role in keys if role in change.roles and (layer == change.layer or chosen(layer))}
        out = out | named if change.recipe == BF16_RECIPE.name else out - named
    return out


def _plan(findings: Sequence[TensorFix]) -> Plan:
    """Return a plan with one change for each operand.

    If two operands of a layer leave FP8, no GEMM of the layer can run in FP8, so the plan changes the whole layer.
    """
    layers: dict[str, list[TensorFix]] = {}
    for finding in findings:
        if finding.changes_cast:
            layers.setdefault(finding.layer, []).append(finding)
    changes: list[Change] = []
    for layer, mine in layers.items():
        whys = [f"{SHOWN_AS[f.role]}: {f.why}" for f in mine]
        if sum(f.chosen_option.recipe == BF16_RECIPE.name for f in mine) > 1:
            changes.append(Change(layer, BF16_RECIPE.name, ROLES, why="; ".join(whys)))
        else:
            changes += [Change(layer, f.chosen_option.recipe, (f.role,), why=w) for f, w in zip(mine, whys, strict=True)]
    return Plan(tuple(changes))


_BLOCK = re.compile(r"decoder\.layers\.(\d+)\.")


def find_decoder_block_index(layer: str) -> int | None:
    """Return the index of the decoder block that contains a GEMM, or None if no block contains the GEMM."""
    found = _BLOCK.match(layer)
    return int(found[1]) if found else None


def _ends(run: Run, plan: Plan, left: Callable[[Plan], float | None]) -> BF16EndBlocks | None:
    """Return the blocks at either end of the model if they contain all operands that leave FP8 under the plan, otherwise
    None.
    """
    at = [find_decoder_block_index(change.layer) for change in plan.changes if change.recipe == BF16_RECIPE.name]
    known = [
        block for layer in run.metrics.tensors["layer"].unique() if (block := find_decoder_block_index(layer)) is not None
    ]
    n = run.fingerprint.get("backend_options", {}).get("num_layers") or max(known, default=-1) + 1
    if not at or None in at:
        return None
    blocks = [block for block in at if block is not None]
    start = max((b + 1 for b in blocks if b < n / 2), default=0)
    end = max((n - b for b in blocks if b >= n / 2), default=0)
    if start + end > max(1, n * _AT_THE_ENDS):
        return None
    whole = [*range(start), *range(n - end, n)]
    return BF16EndBlocks(
        start, end, n, left(Plan(tuple(Change(f"re:^decoder[.]layers[.]{b}[.]", BF16_RECIPE.name) for b in whole)))
    )


def _notes(run: Run, findings: Sequence[TensorFix]) -> list[str]:
    notes = list(filter(None, [describe_quantization(run.quantization)]))
    changed = [f for f in findings if f.changes_cast]
    in_bf16 = [f for f in changed if f.chosen_option.kind == "bf16"]
    if in_bf16 and not any(o.errors for f in in_bf16 for o in f.options if o.kind == "block"):
        notes.append('Block recipes were not tried: a run with what_if=["blockwise", "mxfp8"] shows their errors.')
    unknown = [
        f.tensor_name for f in changed if not any(o.errors for o in f.options if o.kind not in (STAY, "block", "bf16"))
    ]
    if unknown:
        notes.append(
            f"No recipe with one scale per tensor could be tried for {_few(unknown)}: the record has no histograms for "
            "this. If these steps were dumped, `nemo-fp8-debug replay --source dumps` adds the missing errors."
        )
    if about := [f.tensor_name for f in changed if f.chosen_option.approximate]:
        notes.append(f"Errors of {_few(about)} after the change are approximate: float32 values were rounded to BF16.")
    gaps = max(np.diff(run.metrics.steps).tolist(), default=0)
    if gaps > 1 and any(o.recipe.startswith("delayed") for f in changed for o in f.options[1:]):
        notes.append("Not every step was sampled, so replayed histories of delayed scaling use only the sampled steps.")
    if changed and (reason := why_none(run)):
        notes.append(reason)
    return notes


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


TORCHAO, TRANSFORMER_ENGINE, MEGATRON = "torchao", "Transformer Engine", "Megatron"


def find_cast_engines(run: Run) -> frozenset[str]:
    """Return the frameworks that control the casts of a run by their configuration; empty if there are none, or if unknown.

    If a record does not name the sampled backends, it was imported from a log of Transformer Engine, or is from an old
    version.
    """
    if run.quantization in (HIGH_PRECISION, NOT_READ):
        return frozenset()
    backends = _backends(run)
    if backends is None:
        return frozenset((MEGATRON, TRANSFORMER_ENGINE))
    found = {engine for engine in (TORCHAO, TRANSFORMER_ENGINE, MEGATRON) if any(b.startswith(engine) for b in backends)}
    if run.fingerprint.get("backend_options") and (found != {TORCHAO} or run.fingerprint["backend_options"].get("fp8")):
        found |= {MEGATRON, TRANSFORMER_ENGINE}
    return frozenset(found)


def why_none(run: Run) -> str | None:
    """Return a sentence with the reason why we write no engine configuration for a run, or None if we write one."""
    if find_cast_engines(run):
        return None
    return f"No engine configuration is written: {_reason_without_engine(run)}."


def _reason_without_engine(run: Run) -> str:
    if run.quantization == HIGH_PRECISION:
        return "nothing in the run is quantized"
    if run.quantization == NOT_READ:
        return "the record does not say whether the run quantizes, and in which engine"
    kinds = ", ".join(sorted(_backends(run) or ())) or "no layers"
    return f"the run emulates FP8 in layers that no engine quantizes ({kinds})"


def _backends(run: Run) -> list[str] | None:
    sampled: Any = run.fingerprint.get("sampled")
    return list(map(str, sampled["backends"])) if isinstance(sampled, Mapping) and "backends" in sampled else None
