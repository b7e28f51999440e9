"""What a step is recomputed from: its recorded histograms, or the tensors that it dumped."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ...core.keys import Key
from ...errors import warn
from ...numerics.formats import FORMATS
from ...numerics.histogram import DTYPES, Histogram
from ...numerics.recipe import BF16_RECIPE, Recipe, find_recipe
from ...record.dump import dumped_files, read_dump
from ...record.reader import read_table
from ...record.storage import Storage
from .job import OPERAND, Job, Part


def recorded_histograms(run: Storage, job: Job) -> list[Part]:
    """Return the histograms that were recorded of the step; under BF16 only those of values that were not rounded to it."""
    exact = {"rounded": False} if job.recipe == BF16_RECIPE else {}
    table = read_table(run, "histograms", where={"step": job.step, **exact})
    names = ("layer", "role", "dtype", "rounded", "bins", "counts", "recipe", "format", "scale")
    table = table.join(job.about.select(OPERAND), on=OPERAND, how="semi", maintain_order="left")
    parts = []
    for layer, role, dtype, rounded, bins, counts, *rest in table.select(names).iter_rows():
        histogram = Histogram(getattr(torch, dtype), rounded=bool(rounded))
        histogram.counts[torch.tensor(bins, dtype=torch.int64)] = torch.tensor(counts, dtype=torch.int64)
        parts.append(Part((layer, role), histogram, rest[0], FORMATS[rest[1]], math.nan if rest[2] is None else rest[2]))
    return parts


def dumped_tensors(run: Storage, job: Job) -> list[Part]:
    """The tensors that the first rank dumped, counted into histograms if these are enough."""
    from ...kernels import histogram_of  # compiles on import, which histograms do not need

    parts: dict[tuple[Key, int], Part] = {}
    under_blocks = in_blocks(job)
    recorded = {
        (layer, role): math.nan if s is None else s for layer, role, s in job.about.select(*OPERAND, "scale").iter_rows()
    }
    for attempt, step, rank, name in dumped_files(run):
        if (attempt, step, rank) != (job.about["attempt"][0], job.step, 0):
            continue
        try:
            about, tensors = read_dump(run, name)
        except (OSError, ValueError) as error:
            warn(f"{run.path(name)} is left out, it cannot be read: {error}")
            continue
        key, x, scale = (about.layer, about.role), tensors["value"], float(tensors["scale"])
        if not job.wants(key):
            continue
        if recipe := under_blocks.get(key):
            part = Part(key, x, recipe.name, recipe.format_of(about.role), math.nan)
        else:
            part = Part(key, histogram_of(x) if x.dtype in DTYPES else x, about.recipe, about.format, scale)
        if about.scale_source != "engine" and isinstance(part.values, Histogram):
            part = replace(part, scale=recorded.get(key, scale))
        # Calls under one scale are one histogram, as in the record.
        apart = about.scale_source == "engine" and about.recipe.startswith("current")
        group = key, about.call if apart or isinstance(part.values, torch.Tensor) else -1
        parts[group] = _together(parts[group], part) if group in parts else part
    return list(parts.values())


def in_blocks(job: Job) -> dict[Key, Recipe]:
    """The block recipes that operands are to be measured under."""
    found = {}
    for layer, role, name in job.about.select(*OPERAND, "recipe").iter_rows():
        recipe = job.recipe or find_recipe(name)
        if recipe and recipe.in_blocks:
            found[layer, role] = recipe
    return found


def _together(first: Part, second: Part) -> Part:
    assert isinstance(first.values, Histogram) and isinstance(second.values, Histogram)
    return replace(first, values=first.values + second.values)
