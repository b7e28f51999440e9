"""Do the weights of a layer stand still while those of the others learn?

A step moves the smallest value of nearly every W, and so its range. Weight decay hardly does: it multiplies all values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import polars as pl

from ....core.layer_names import aggregate_of
from ...comparison.groups import depth_of
from ...runs.grid import Floats, Ints, stretches
from ...runs.metrics import Metrics
from ...runs.run import Run
from .finding import Finding

_RANGE = "dynamic_range_log2"
#: by which the range of a weight that learns moves, at the least: a step of BF16 is 2^-8, and decay moves it by less
_MOVES = 1e-3
#: samples up to the end that a W must stand still in
_IN_A_ROW = 4
#: share of a layer's W that must, and the least number of them
_SHARE_OF_W, _FEWEST_W = 0.5, 2
#: share of the layers that may: if more do, nothing learns
_SHARE_OF_LAYERS = 0.5
_ADVICE = (
    "Look at whether the gradients of these weights arrive (their reduction, `requires_grad`), at the learning rate of "
    "their parameter group, and at whether what the optimizer writes gets back to the model."
)


def still_weights(run: Run, baseline: Run | None) -> list[Finding]:
    """The first layer of the model of which most W no longer change, in a run and not in its baseline."""
    usual = {} if baseline is None else _still(baseline)
    found = [layer for name, layer in _still(run).items() if name not in usual]
    if not found:
        return []
    first = min(found, key=lambda layer: layer.since)
    told = (
        f"{first.still} of {first.weights} W of {first.name} stand still, from {run.unit} {first.since} on at the latest, "
        "while those of other layers learn"
    )
    told += f"; so do those of {len(found) - 1} more layers" if len(found) > 1 else ""
    return [Finding("still weights", "software", "medium", told, _ADVICE, first.name, since=first.since, severity=2)]


class _Layer(NamedTuple):
    """A layer of the model most of whose weights stand still."""

    name: str
    since: int
    #: how many W do, and how many it has
    still: int
    weights: int


def _still(run: Run) -> dict[str, _Layer]:
    """By name, layers whose weights have moved and no longer do. A single expert may get no tokens, so it does not count."""
    weights = _in_high_precision(run.metrics.with_role("weight"))
    blocks = _blocks(weights.tensors["layer"].to_list())
    weights = weights.narrowed(weights.tensors.filter(pl.col("layer").is_in(list(blocks))))
    if len(weights.steps) <= _IN_A_ROW or not blocks:
        return {}
    # Hardly ever does any stand still, and then the last samples are all that is read.
    at_the_end = _standing(weights.at(np.arange(len(weights.steps))[-_IN_A_ROW:]))
    still = weights.tensors.filter(pl.Series((at_the_end.moves == 0) & (at_the_end.samples == _IN_A_ROW)))
    suspects = _most_of(blocks, still["layer"].to_list())
    if not suspects or len(suspects) > _SHARE_OF_LAYERS * len(set(blocks.values())):
        return {}
    before = weights.narrowed(still.filter(pl.col("layer").is_in([layer for of in suspects.values() for layer in of])))
    standing = _standing(before)
    moved = {
        layer: int(since)
        for layer, since, moves in zip(before.tensors["layer"], standing.since, standing.moves, strict=True)
        if moves > 1
    }
    sizes = Counter(blocks.values())
    return {
        block: _Layer(block, min(moved[layer] for layer in of), len(of), sizes[block])
        for block, of in _most_of(blocks, list(moved)).items()
    }


def _in_high_precision(weights: Metrics) -> Metrics:
    """Without those that are stored in codes: most steps leave these as they are."""
    sources = weights.unique("scale_source")
    kept = [source for source in sources if source is not None and source != "stored"]
    return weights.only("scale_source", kept) if "stored" in sources else weights


def _most_of(blocks: Mapping[str, str], still: Sequence[str]) -> dict[str, list[str]]:
    """Layers of the model of which most W are among some, with those."""
    of_blocks, sizes = defaultdict[str, list[str]](list), Counter(blocks.values())
    for layer in still:
        of_blocks[blocks[layer]].append(layer)
    return {block: of for block, of in of_blocks.items() if len(of) >= _FEWEST_W and len(of) > _SHARE_OF_W * sizes[block]}


def _blocks(layers: Sequence[str]) -> dict[str, str]:
    """The layer of the model that each is in: what the names of all with the same number begin with."""
    of_depth: dict[int, list[str]] = defaultdict(list)
    for layer in layers:
        depth = depth_of(layer)
        if depth is not None and not aggregate_of(layer):
            of_depth[depth].append(layer)
    return {layer: _shared(of) for of in of_depth.values() for layer in of}


def _shared(layers: Sequence[str]) -> str:
    parts = [layer.split(".") for layer in layers]
    return ".".join(of_all[0] for of_all in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))


@dataclass
class Standing:
    """Of each weight, since when it stands still, as far as its range tells; [T] each."""

    #: log2 of its range at its first and its last sample; NaN: it has none
    first: Floats
    last: Floats
    #: the first step of its last range, samples that have that one, and how often it came to another
    since: Ints
    samples: Ints
    moves: Ints

    @classmethod
    def of(cls, tensors: int) -> Standing:
        """Of weights that have no sample yet."""
        none = np.zeros(tensors, dtype=np.int64)
        return cls(np.full(tensors, np.nan), np.full(tensors, np.nan), none, none.copy(), none.copy())

    def add(self, step: int, of_range: Floats) -> None:
        """A sample: log2 of the largest by the smallest value that is not 0; NaN: it has none of that weight."""
        there = np.isfinite(of_range)
        moved, new = np.abs(of_range - self.last) > _MOVES, there & np.isnan(self.last)
        self.since[moved | new] = step
        self.samples = np.where(moved | new, 1, self.samples + there)
        self.moves += moved
        self.first, self.last = np.where(new, of_range, self.first), np.where(there, of_range, self.last)

    def __add__(self, later: Standing) -> Standing:
        """This, and what comes later."""
        there = np.isfinite(later.last)
        moved = np.abs(later.first - self.last) > _MOVES
        goes_on = np.isfinite(self.last) & ~moved & (later.moves == 0)
        return Standing(
            np.where(np.isfinite(self.first), self.first, later.first),
            np.where(there, later.last, self.last),
            np.where(there & ~goes_on, later.since, self.since),
            np.where(there & ~goes_on, later.samples, self.samples + later.samples),
            self.moves + later.moves + moved,
        )


def _standing(weights: Metrics) -> Standing:
    found = Standing.of(len(weights.tensors))
    for stretch in weights.over_steps(_of_stretch):
        found += stretch
    return found


def _of_stretch(weights: Metrics) -> Standing:
    found = Standing.of(len(weights.tensors))
    for rows in weights.scan([_RANGE]):
        ordered = rows.sort("step", maintain_order=True)
        tensor, value = ordered["tensor"].to_numpy(), ordered[_RANGE].cast(pl.Float64).to_numpy()
        for step, here in stretches(ordered["step"].to_numpy()):
            of_range = np.full(len(weights.tensors), np.nan)
            of_range[tensor[here]] = value[here]
            found.add(step, of_range)
    return found
