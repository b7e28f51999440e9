"""Match the layers of two runs that differ in framework, version or depth."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import polars as pl

from ...core.keys import GRADIENTS
from ...errors import ConfigError, RecordError
from ..runs.metrics import MetricsTable
from ..runs.run import Run
from .drift import parse_gemm_kind, parse_layer_index, split_at_layer_index
from .onset import OF_GRADIENTS, OF_OTHER_MODELS

_KEY = ["layer", "role"]


def count_layers(layers: Iterable[str]) -> int:
    """Count the layers of a model from the names of its GEMMs. Return 0 if the names have no indices."""
    return len({parse_layer_index(name) for name in layers} - {None})


def has_other_layer_count(baseline: Iterable[str], run: Iterable[str]) -> bool:
    """Return True if the names show that the two models have different depths."""
    depths = count_layers(baseline), count_layers(run)
    return all(depths) and depths[0] != depths[1]


def match_layers_from_output(baseline: Iterable[str], run: Iterable[str]) -> dict[str, str]:
    """Map each layer of the run to the baseline's layer at the same distance from the output, if their names differ.

    Example:
        >>> match_layers_from_output(["layers.0.fc1", "layers.1.fc1"], ["layers.0.fc1", "layers.1.fc1", "layers.2.fc1"])
        {'layers.1.fc1': 'layers.0.fc1', 'layers.2.fc1': 'layers.1.fc1'}
    """
    theirs, mine = set(baseline), dict.fromkeys(run)
    last = [_last_of(each) for each in (theirs, mine)]
    found = {}
    for name in mine:
        if (parts := split_at_layer_index(name)) is None:
            continue
        before, at, behind = parts
        shift = last[0].get(before, 0) - last[1][before]
        other = f"{before}{at + shift}{behind}"
        if shift and other in theirs:
            found[name] = other
    return found


def _last_of(layers: Iterable[str]) -> dict[str, int]:
    """Return the highest index in each stack of layers, by the prefix of the layers' names."""
    last: dict[str, int] = {}
    for name in layers:
        if (parts := split_at_layer_index(name)) is not None:
            last[parts[0]] = max(last.get(parts[0], 0), parts[1])
    return last


def filter_onsets_for_other_depth(
    out_of_band: pl.DataFrame, names: Mapping[str, str], beside: Callable[[pl.DataFrame], pl.DataFrame]
) -> pl.DataFrame:
    """Select the rows that count as out of band if the baseline has another depth. The limits are higher than for equal
    models.

    Gradients flow back from the output. So a gradient must also leave the band of the baseline's layer at the same distance
    from the output.

    Args:
        out_of_band: the result of `find_onsets`.
        names: the result of `match_layers_from_output`.
        beside: function that takes tensors (layer and role, with the run's names) and returns the result of `find_onsets`
            against the baseline's layers in `names`.
    """
    strong = _strong(out_of_band)
    asked = strong.filter(_IS_GRADIENT, pl.col("layer").cast(pl.String).is_in(list(names))).select(_KEY).unique()
    if asked.is_empty():
        return strong
    within = asked.join(_strong(beside(asked)), on=_KEY, how="anti").select(*_KEY, within=True)
    told = strong.join(within, on=_KEY, how="left", maintain_order="left")
    return told.filter(pl.col("within").is_null() | ~_IS_GRADIENT).drop("within")


_IS_GRADIENT = pl.col("role").is_in(GRADIENTS) & (pl.col("metric") != "nonfinite")


def _strong(rows: pl.DataFrame) -> pl.DataFrame:
    least = pl.when(pl.col("role").is_in(GRADIENTS)).then(OF_GRADIENTS).otherwise(OF_OTHER_MODELS)
    return rows.filter((pl.col("metric") == "nonfinite") | (pl.col("excess") >= least))


Names = Mapping[str, str]
#: number of values of W by layer; None if unknown
Sizes = Mapping[str, int | None]


def rename_layers_to_baseline(baseline: Run, run: Run, renames: Sequence[str] = ()) -> tuple[Run, list[str]]:
    """Rename the run's layers to the baseline's names. Return the run, and sentences that say how the names were matched.

    Args:
        renames: rules `REGEX=REPLACEMENT`, as in `re.sub`, applied in turn to the run's names. If there are no rules and the
            runs have no name in common, we match names that differ only in their prefix, or else layers one to one by order,
            size and kind.

    Raises:
        ConfigError: a rule in `renames` is malformed, or gives two layers the same name.
        RecordError: the layers' sizes differ, so the models are different.
    """
    sizes = [read_weight_sizes(run.metrics) for run in (baseline, run)]
    names, told = map_layers_to_baseline(list(sizes[0]), list(sizes[1]), renames, lambda: (sizes[0], sizes[1]))
    how = [told] if names else []
    alike = run.rename_layers(names) if names else run
    run_sizes = {names.get(name, name): n for name, n in sizes[1].items()}
    return _without_others_sizes(alike, sizes[0], run_sizes, baseline.path, how), how + _alone(sizes[0], run_sizes)


def map_layers_to_baseline(
    baseline: Sequence[str], run: Sequence[str], renames: Sequence[str], sizes: Callable[[], tuple[Sizes, Sizes]]
) -> tuple[Names, str]:
    """Map layers of the run to the baseline's names if the names differ. Also return sentences that say how they were
    matched.

    Args:
        baseline: layers of the baseline, in the order of the record.
        run: layers of the run, in the order of the record.
        renames: as in `rename_layers_to_baseline`.
        sizes: function that returns the number of values of W in both runs, by layer. It is called only if names alone do
            not match.

    Raises:
        ConfigError: as in `rename_layers_to_baseline`.

    Example:
        >>> map_layers_to_baseline(["0.fc1", "0.fc2"], ["model.0.fc1", "model.0.fc2"], (), sizes=lambda: ({}, {}))[0]
        {'model.0.fc1': '0.fc1', 'model.0.fc2': '0.fc2'}
    """
    if renames:
        names = _by_hand(run, renames)
        return names, f"{len(names)} layers of the run were renamed as asked."
    if not baseline or not run or set(baseline) & set(run):
        return {}, ""
    names, told = _by_prefix(baseline, run)
    return (names, told) if names else _one_to_one(*sizes())


def read_weight_sizes(metrics: MetricsTable) -> dict[str, int | None]:
    """Return the number of values of W by layer, in order, or None if unknown."""
    return dict.fromkeys(metrics.tensors["layer"]) | metrics.weight_sizes


def _by_hand(names: Sequence[str], renames: Sequence[str]) -> Names:
    renamed = {name: name for name in names}
    for rename in renames:
        pattern, equals, replacement = rename.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(f"{rename!r} is no renaming rule: write REGEX=REPLACEMENT")
        try:
            renamed = {name: re.sub(pattern, replacement, new) for name, new in renamed.items()}
        except (re.error, IndexError) as error:
            raise ConfigError(f"invalid rule {rename!r}: {error}. Write REGEX=REPLACEMENT, as in Python's re.sub") from None
    taken: dict[str, str] = {}
    for name, new in renamed.items():
        if new in taken:
            raise ConfigError(f"{taken[new]!r} and {name!r} would both be named {new!r}: make the pattern more specific")
        taken[new] = name
    changed = {name: new for name, new in renamed.items() if name != new}
    if not changed:
        raise ConfigError(f"no layer of the run matches {', '.join(renames)}. It has layers such as {_first(names)!r}")
    return changed


def _first(names: Sequence[str]) -> str:
    return next(iter(names), "-")


def _by_prefix(baseline: Sequence[str], run: Sequence[str]) -> tuple[Names, str]:
    """Match names that differ only in a prefix. All layers of the smaller run must match after one prefix is replaced."""
    for left in _prefixes(baseline[0]):
        for right in _prefixes(run[0]):
            ours = {name[len(left) :]: name for name in baseline if name.startswith(left)}
            names = {n: ours[n[len(right) :]] for n in run if n.startswith(right) and n[len(right) :] in ours}
            if len(names) == min(len(baseline), len(run)):
                return names, f"Names were matched after replacing the run's prefix {right!r} with the baseline's {left!r}."
    return {}, ""


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return ["".join(f"{part}." for part in parts[:i]) for i in range(len(parts))]


def _one_to_one(baseline: Sizes, run: Sizes) -> tuple[Names, str]:
    """Match all layers in order, if matched layers have weights of equal size, and each kind always matches the same
    kind.
    """
    pairs = list(zip(run, baseline, strict=False))
    kinds = {(parse_gemm_kind(b), parse_gemm_kind(g)) for b, g in pairs}
    one_to_one = len(kinds) == len({k for k, _ in kinds}) == len({k for _, k in kinds})
    if (
        len(baseline) != len(run)
        or None in baseline.values()
        or list(baseline.values()) != list(run.values())
        or not one_to_one
    ):
        return {}, ""
    examples = ", ".join(f"{b} for {g}" for b, g in sorted(kinds))
    return dict(pairs), f"No name is in common, so layers were matched one to one by order and size of W ({examples})."


def _without_others_sizes(run: Run, sizes: Sizes, run_sizes: Sizes, baseline_path: str, how: list[str]) -> Run:
    """Return the run without layers that differ in the size of W, such as a padded output layer. Add a note to `how`."""
    known = {name for name, n in run_sizes.items() if n is not None and sizes.get(name) is not None}
    others = sorted(name for name in known if sizes[name] != run_sizes[name])
    if not others:
        return run
    example = f"W of {others[0]} has {sizes[others[0]]} values in the baseline and {run_sizes[others[0]]} in the run"
    if 2 * len(others) > len(known):
        raise RecordError(f"{baseline_path} and {run.path} are runs of different models: {example}")
    how.append(f"{len(others)} layers are left out because they differ in size: {example}.")
    kept = run.metrics.tensors.filter(~pl.col("layer").is_in(others))
    return replace(run, metrics=run.metrics.select_tensors(kept))


def _alone(baseline: Mapping[str, object], run: Mapping[str, object]) -> list[str]:
    only = [(which, [n for n in a if n not in b]) for which, a, b in (("baseline", baseline, run), ("run", run, baseline))]
    return [f"{len(names)} layers are only in the {which}, for example {names[0]}." for which, names in only if names]
