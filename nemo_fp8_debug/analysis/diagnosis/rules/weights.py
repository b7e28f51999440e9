"""Rules about weights that shrink faster than weight decay explains, or that do not change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import polars as pl

from ....core.layer_names import find_expert_aggregate
from ....core.text import format_count, format_number
from ... import thresholds
from ...comparison.drift import parse_layer_index
from ...runs.grid import Floats, Ints, split_into_constant_stretches
from ...runs.metrics import MetricsTable
from ...runs.run import Run
from ..facts import DiagnosedRecords, Facts, define_fact
from ..finding import Finding
from ..rule import register_rule

Result = TypeVar("Result")


class Level(NamedTuple):
    """A measure of the size of an operand's values."""

    columns: Sequence[str]
    #: expression for the natural log of the measure, for rows in which all columns are above 0
    log: pl.Expr


ROOT_MEAN_SQUARE = Level(["mse", "relative_error"], 0.5 * pl.col("mse").log() - pl.col("relative_error").log())


def moves_of_levels(operands: MetricsTable, level: Level, together: Callable[[Floats], Result]) -> tuple[Ints, list[Result]]:
    """Return the steps with a known level, and the result of `together` for the changes from each of these steps to the
    next.

    Args:
        operands: metrics of T operands.
        together: function that gets the change of each operand's level (natural log), float64 [T], NaN if unknown.

    Example:
        >>> rows = {"layer": "fc1", "role": "input", "step": [0, 5, 10], "relative_error": 0.5, "mse": [1.0, 4.0, 4.0]}
        >>> steps, moves = moves_of_levels(
        ...     MetricsTable.from_rows(pl.DataFrame(rows)), ROOT_MEAN_SQUARE, lambda moves: round(float(moves[0]), 2)
        ... )
        >>> steps.tolist(), moves
        ([0, 5, 10], [0.69, 0.0])
    """
    before, steps, moves = None, list[int](), list[Result]()
    for stretch in operands.map_step_ranges(partial(_of_stretch, level, together)):
        if stretch.steps and before is not None:
            moves.append(together(stretch.first - before))
        steps += stretch.steps
        moves += stretch.moves
        before = stretch.last if stretch.steps else before
    return np.array(steps, dtype=np.int64), moves


@dataclass(frozen=True)
class _Stretch(Generic[Result]):
    """Consecutive steps, the results for the changes between these steps, and the levels at the first and the last step."""

    steps: list[int]
    moves: list[Result]
    first: Floats
    last: Floats


def _of_stretch(level: Level, together: Callable[[Floats], Result], operands: MetricsTable) -> _Stretch[Result]:
    unknown = np.full(len(operands.tensors), np.nan)
    first, before, steps, moves = unknown, unknown, list[int](), list[Result]()
    for rows in operands.read_rows_in_batches(level.columns):
        known = rows.filter(*(pl.col(name) > 0 for name in level.columns)).sort("step", maintain_order=True)
        of_rows = known.select("tensor", level=level.log.cast(pl.Float64))
        tensor, levels = of_rows["tensor"].to_numpy(), of_rows["level"].to_numpy()
        for step, here in split_into_constant_stretches(known["step"].to_numpy()):
            now = unknown.copy()
            now[tensor[here]] = levels[here]
            moves += [together(now - before)] if steps else []
            first = first if steps else now
            steps.append(step)
            before = now
    return _Stretch(steps, moves, first, before)


_RANGE = "dynamic_range_log2"
#: to save memory, we keep the decrease of a single layer between two samples only if it is at least this (natural log)
_FALL = 0.01


# Decay ------------------------------------------------------------------------------------------------------------------


class Decays(NamedTuple):
    """Weight decays between consecutive samples, and the layers whose weight shrinks alone."""

    #: the later sample of each pair
    steps: Ints
    #: decay of most layers
    most: Floats
    #: layers that shrink to less than a quarter, but not in the baseline: name, and index of the pair at which this begins
    shrunk: Sequence[tuple[str, int]]
    #: decays of most layers in the baseline; empty without a baseline
    baseline: Floats


@define_fact
def weight_decays(records: DiagnosedRecords) -> Decays:
    """Return the weight decay between consecutive samples: the decrease of the log of the root mean square, divided by the
    sum of the learning rates.
    """
    steps, most, shrunk = _decays(records.run)
    if records.baseline is None:
        return Decays(steps, most, shrunk, np.zeros(0))
    _, usual, theirs = _decays(records.baseline)
    return Decays(steps, most, [each for each in shrunk if each[0] not in dict(theirs)], usual)


@register_rule("weight decay", ("weight_decay", "shrinking_weight"), (weight_decays,), event="weights")
def find_decay(facts: Facts) -> Iterator[Finding]:
    """Name the weights of most layers, or of one layer, if they shrink faster than usual weight decays explain.

    Decoupled decay multiplies a weight by 1 - lr * decay in each step. Gradients change the root mean square very little.

    Example: a parameter group gets a decay of 10 instead of 0.01 from step 90 on.
    """
    steps, decays, shrunk, usual = weight_decays(facts)
    limit = max(thresholds.DECAY, thresholds.TIMES_USUAL * float(usual.max())) if len(usual) else thresholds.DECAY
    if len(steps) < thresholds.FEW:
        return
    shrinks = np.lib.stride_tricks.sliding_window_view(decays > limit, thresholds.FEW).all(-1)
    if not shrinks.any():
        for layer, at in sorted(shrunk, key=lambda each: each[1])[:1]:
            step = int(steps[at])
            evidence = f"its root mean square falls to less than a quarter from {facts.unit} {step} on"
            evidence += (
                f", as in {format_count(len(shrunk) - 1, 'other layer')}"
                if len(shrunk) > 1
                else "; no other layer shrinks as much"
            )
            yield Finding("weight decay", "shrinking_weight", "clear", evidence, layer, "weight", step)
        return
    first = int(np.argmax(shrinks))
    decay = float(np.median(decays[first:][decays[first:] > limit]))
    since = f"from {facts.unit} {steps[first]} on"
    evidence = f"weights of most layers shrink {since}, as under a weight decay of {format_number(decay)}"
    yield Finding("weight decay", "weight_decay", "clear", evidence, since=int(steps[first]))


def _decays(run: Run) -> tuple[Ints, Floats, list[tuple[str, int]]]:
    weights = run.metrics.select_roles("weight")
    steps, found = moves_of_levels(weights, ROOT_MEAN_SQUARE, _fall_of_most)
    falls = np.array([of_most for of_most, _ in found])
    if len(steps) < 2:
        return steps[:0], np.zeros(0), []
    rates = _sum_rates(run, steps)
    with np.errstate(invalid="ignore", divide="ignore"):
        decays = np.nan_to_num(falls / rates, nan=-np.inf, posinf=-np.inf)
    names = weights.tensors["layer"].to_list()
    shrunk = [
        (names[i], at) for i, at in _find_shrunk([fast for _, fast in found], rates) if not find_expert_aggregate(names[i])
    ]
    return steps[1:], decays, shrunk


def _find_shrunk(found: Sequence[Mapping[int, float]], rates: Floats) -> Iterator[tuple[int, int]]:
    """Yield each layer whose weight shrinks to less than a quarter, faster than under any usual weight decay, and the pair
    at which this begins.

    Args:
        found: decrease (natural log) of each layer that shrinks, by layer, for each pair of samples.
        rates: sum of the learning rates of each pair.
    """
    running = dict[int, tuple[int, float]]()
    done = set[int]()
    for at, (falls, rate) in enumerate(zip(found, rates, strict=True)):
        fast = {i: fall for i, fall in falls.items() if fall > thresholds.DECAY * rate}
        running = {i: (running[i][0], running[i][1] + fall) if i in running else (at, fall) for i, fall in fast.items()}
        for i, (first, fall) in running.items():
            if fall > np.log(thresholds.TIMES_USUAL) and at - first + 1 >= thresholds.FEW and i not in done:
                done.add(i)
                yield i, first


def _fall_of_most(moves: Floats) -> tuple[float, dict[int, float]]:
    """Return the decrease (natural log) that 75% of the layers exceed, and the decrease of each layer that shrinks fast."""
    enough = np.isfinite(moves).sum() >= thresholds.FEW
    fast = np.flatnonzero(moves < -_FALL)
    return float(np.nanquantile(-moves, 1 - thresholds.MOST)) if enough else 0.0, {int(i): -float(moves[i]) for i in fast}


def _sum_rates(run: Run, steps: Ints) -> Floats:
    """Return the sum of learning rates from each sampled step to the next; NaN if unknown."""
    rows = run.steps.select("step", pl.col("lr").fill_nan(None)).drop_nulls().unique("step", keep="last").sort("step")
    if rows.is_empty():
        return np.full(len(steps) - 1, np.nan)
    every = np.arange(steps[0], steps[-1])
    rates = np.interp(every, rows["step"].to_numpy(), rows["lr"].to_numpy())
    sums: Floats = np.diff(np.concatenate([[0.0], np.cumsum(rates)])[steps - steps[0]])
    return sums


# Weights that stop changing -----------------------------------------------------------------------------------------------


class StillLayer(NamedTuple):
    """A layer of the model in which most weights have stopped changing."""

    name: str
    since: int
    still: int
    weights: int


class StillWeights(NamedTuple):
    """Layers that have stopped learning, and weights that have never changed."""

    stopped: tuple[StillLayer, ...]
    #: weights that are equal in all samples, although the same weights change in the baseline
    never_moved: tuple[str, ...]
    #: number of weights in both runs
    weights: int


@define_fact
def still_weights(records: DiagnosedRecords) -> StillWeights:
    """Return layers and weights that do not change in the run but change in its baseline."""
    run, baseline = records.run, records.baseline
    usual = {} if baseline is None else _find_stopped(baseline)
    stopped = tuple(layer for name, layer in _find_stopped(run).items() if name not in usual)
    if baseline is None:
        return StillWeights(stopped, (), 0)
    mine = run.metrics.select_roles("weight")
    both = mine.tensors.join(baseline.metrics.tensors, on=["layer", "role"], how="semi", maintain_order="left")
    constant = _find_constant(mine.select_tensors_by_key(both))
    moving = (
        _find_constant(baseline.metrics.select_tensors_by_key(both.filter(pl.col("layer").is_in(constant))))
        if constant
        else []
    )
    return StillWeights(stopped, tuple(layer for layer in constant if layer not in moving), len(both))


@register_rule("frozen weights", ("frozen_weights",), (still_weights,), event="weights")
def find_still_weights(facts: Facts) -> Iterator[Finding]:
    """Name a layer in which weights have stopped changing, and weights that never change.

    An optimizer step changes the smallest value of nearly every W, and therefore the range of W. Weight decay alone hardly
    changes the range.

    Example: the optimizer writes to a copy, so 10 of 11 W are bit-identical in all samples.
    """
    still = still_weights(facts)
    if still.never_moved:
        first = still.never_moved[0]
        many = f"{len(still.never_moved)} of {still.weights} W are the same in all samples, first that of {first}"
        evidence = f"{many}; they move in the baseline"
        yield Finding("frozen weights", "frozen_weights", "clear", evidence, first, "weight", int(facts.steps[0]))
    elif still.stopped:
        layer = min(still.stopped, key=lambda each: each.since)
        evidence = (
            f"{layer.still} of {layer.weights} W of {layer.name} stand still since {facts.unit} {layer.since} or earlier, "
            "while those of other layers learn"
        )
        evidence += f"; so do those of {len(still.stopped) - 1} more layers" if len(still.stopped) > 1 else ""
        since, name = layer.since, layer.name
        # A loss that diverges for another reason can leave a layer without gradients, and weight decay keeps the range.
        yield Finding(
            *("frozen weights", "frozen_weights", "clear", evidence, name),
            since=since,
            may_follow_the_loss=True,
            or_earlier=facts.paired,
        )


def _find_constant(weights: MetricsTable) -> list[str]:
    """Return the weights that have at least four samples, and the same range, outliers and kurtosis in all samples."""
    weights = _without_codes(weights)
    if len(weights.steps) < thresholds.LASTING or weights.tensors.is_empty():
        return []
    # Few weights are constant at the end of a run. Only for these weights, earlier samples are read too.
    at_the_end = _count_values(weights.select_samples(np.arange(len(weights.steps))[-thresholds.LASTING :]))
    moved = weights.tensors[at_the_end.filter(pl.col("values") > 1)["tensor"]]
    weights = weights.select_tensors_at_all_steps(
        weights.tensors.join(moved, on=["layer", "role"], how="anti", maintain_order="left")
    )
    if weights.tensors.is_empty():
        return []
    same = _count_values(weights).filter(pl.col("values") == 1, pl.col("samples") >= thresholds.LASTING)
    return weights.tensors["layer"].gather(same["tensor"].sort()).to_list()


def _count_values(weights: MetricsTable) -> pl.DataFrame:
    """For each tensor, return the number of different combinations of range, outliers and kurtosis, and the number of
    samples.
    """
    names = (_RANGE, "outlier_log2", "kurtosis")
    found = weights.reduce_rows(
        names, lambda rows: rows.group_by("tensor", *names, maintain_order=True).agg(pl.sum("count"))
    )
    return found.group_by("tensor", maintain_order=True).agg(values=pl.len(), samples=pl.sum("count"))


def _find_stopped(run: Run) -> dict[str, StillLayer]:
    """Return, by name, the layers in which most weights changed before but do not change any more.

    A single expert may get no tokens, so single experts do not count.
    """
    weights = _without_codes(run.metrics.select_roles("weight"))
    blocks = _blocks(weights.tensors["layer"].to_list())
    weights = weights.select_tensors_at_all_steps(weights.tensors.filter(pl.col("layer").is_in(list(blocks))))
    if len(weights.steps) <= thresholds.LASTING or not blocks:
        return {}
    # Weights rarely stop changing, so usually only the last samples are read.
    at_the_end = _measure_standing(weights.select_samples(np.arange(len(weights.steps))[-thresholds.LASTING :]))
    still = weights.tensors.filter(pl.Series((at_the_end.moves == 0) & (at_the_end.samples == thresholds.LASTING)))
    candidates = _most_of(blocks, still["layer"].to_list())
    if not candidates or len(candidates) > len(set(blocks.values())) / 2:
        return {}
    layers = [layer for of in candidates.values() for layer in of]
    before = weights.select_tensors_at_all_steps(still.filter(pl.col("layer").is_in(layers)))
    standing = _measure_standing(before)
    moved = {
        layer: int(since)
        for layer, since, moves in zip(before.tensors["layer"], standing.since, standing.moves, strict=True)
        if moves > 1
    }
    sizes = Counter(blocks.values())
    return {
        block: StillLayer(block, min(moved[layer] for layer in of), len(of), sizes[block])
        for block, of in _most_of(blocks, list(moved)).items()
    }


def _without_codes(weights: MetricsTable) -> MetricsTable:
    """Return the weights that are not stored as quantized codes, because most optimizer steps do not change such codes."""
    sources = weights.list_distinct_values("scale_source")
    kept = [source for source in sources if source is not None and source != "stored"]
    return weights.filter_rows("scale_source", kept) if "stored" in sources else weights


def _most_of(blocks: Mapping[str, str], still: Sequence[str]) -> dict[str, list[str]]:
    """Return the layers in which most W are in `still`, and these W."""
    of_blocks, sizes = defaultdict[str, list[str]](list), Counter(blocks.values())
    for layer in still:
        of_blocks[blocks[layer]].append(layer)
    return {block: of for block, of in of_blocks.items() if len(of) >= thresholds.IN_A_ROW and 2 * len(of) > sizes[block]}


def _blocks(layers: Sequence[str]) -> dict[str, str]:
    """Return for each GEMM the layer that contains it: the common prefix of all names with the same layer number."""
    of_depth: dict[int, list[str]] = defaultdict(list)
    for layer in layers:
        depth = parse_layer_index(layer)
        if depth is not None and not find_expert_aggregate(layer):
            of_depth[depth].append(layer)
    return {layer: _shared_name(of) for of in of_depth.values() for layer in of}


def _shared_name(layers: Sequence[str]) -> str:
    parts = [layer.split(".") for layer in layers]
    return ".".join(each[0] for each in takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False)))


@dataclass
class ConstantRangeState:
    """The step from which the range of each of T weights is constant; all fields have shape [T]."""

    #: log2 of the range at the weight's first and last sample; NaN without samples
    first: Floats
    last: Floats
    #: first step with the latest range, number of samples with this range, and number of changes of the range
    since: Ints
    samples: Ints
    moves: Ints

    @classmethod
    def make_unsampled(cls, tensors: int) -> ConstantRangeState:
        """Return the state of weights without a sample."""
        none = np.zeros(tensors, dtype=np.int64)
        return cls(np.full(tensors, np.nan), np.full(tensors, np.nan), none, none.copy(), none.copy())

    def add(self, step: int, of_range: Floats) -> None:
        """Add a sample: log2 ratio of the largest to the smallest nonzero value of each weight, or NaN if it was not
        sampled.
        """
        there = np.isfinite(of_range)
        moved, new = np.abs(of_range - self.last) > thresholds.RANGE_MOVES, there & np.isnan(self.last)
        self.since[moved | new] = step
        self.samples = np.where(moved | new, 1, self.samples + there)
        self.moves += moved
        self.first, self.last = np.where(new, of_range, self.first), np.where(there, of_range, self.last)

    def __add__(self, later: ConstantRangeState) -> ConstantRangeState:
        """Return the state after these samples and the samples of `later`."""
        there = np.isfinite(later.last)
        moved = np.abs(later.first - self.last) > thresholds.RANGE_MOVES
        goes_on = np.isfinite(self.last) & ~moved & (later.moves == 0)
        return ConstantRangeState(
            np.where(np.isfinite(self.first), self.first, later.first),
            np.where(there, later.last, self.last),
            np.where(there & ~goes_on, later.since, self.since),
            np.where(there & ~goes_on, later.samples, self.samples + later.samples),
            self.moves + later.moves + moved,
        )


def _measure_standing(weights: MetricsTable) -> ConstantRangeState:
    found = ConstantRangeState.make_unsampled(len(weights.tensors))
    for stretch in weights.map_step_ranges(partial(_measure_stretch)):
        found += stretch
    return found


def _measure_stretch(weights: MetricsTable) -> ConstantRangeState:
    found = ConstantRangeState.make_unsampled(len(weights.tensors))
    for rows in weights.read_rows_in_batches([_RANGE]):
        ordered = rows.sort("step", maintain_order=True)
        tensor, value = ordered["tensor"].to_numpy(), ordered[_RANGE].cast(pl.Float64).to_numpy()
        for step, here in split_into_constant_stretches(ordered["step"].to_numpy()):
            of_range = np.full(len(weights.tensors), np.nan)
            of_range[tensor[here]] = value[here]
            found.add(step, of_range)
    return found
