"""Which layers of two runs are the same, where frameworks or versions name them differently."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import polars as pl

from ...errors import ConfigError, RecordError
from ..runs.run import Run
from .groups import kind_of

Names = Mapping[str, str]


def named_alike(good: Run, bad: Run, renames: Sequence[str] = ()) -> tuple[Run, list[str]]:
    """The bad run with the good run's names for its layers, and how they were found, in sentences.

    Args:
        renames: `REGEX=REPLACEMENT` each, as of `re.sub`, applied in turn to the bad run's names. Without them, and where no
            name is in common, names that differ by what comes before them are matched, or layers one to one by order, size
            and kind.

    Raises:
        ConfigError: an element of `renames` is not of that form, or gives two layers one name.
        RecordError: the layers have other sizes in the other run: it is of another model.
    """
    how: list[str] = []
    sizes = [sizes_of_weights(run.figures) for run in (good, bad)]
    names = _by_hand(list(sizes[1]), renames)
    if names:
        how.append(f"{len(names)} layers of the second run were renamed as told.")
    elif sizes[0] and sizes[1] and not sizes[0].keys() & sizes[1].keys():
        names, told = _by_prefix(list(sizes[0]), list(sizes[1]))
        if not names:
            names, told = _one_to_one(*sizes)
        how += [told] if names else []
    alike = bad.renamed(names) if names else bad
    bad_sizes = {names.get(name, name): n for name, n in sizes[1].items()}
    return _without_others_sizes(alike, sizes[0], bad_sizes, good.path, how), how + _alone(sizes[0], bad_sizes)


def sizes_of_weights(figures: pl.DataFrame) -> dict[str, int | None]:
    """How many values W has, by layer in order; None where that is not known."""
    n = pl.when(pl.col("role") == "weight").then(pl.col("n") + pl.col("nan") + pl.col("inf")).max()
    layers = figures.with_columns(pl.col("layer", "role").cast(pl.Categorical)).group_by("layer", maintain_order=True)
    return dict(layers.agg(n.alias("n")).iter_rows())


def _by_hand(names: Sequence[str], renames: Sequence[str]) -> Names:
    renamed = {name: name for name in names}
    for rename in renames:
        pattern, equals, replacement = rename.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(f"{rename!r} renames nothing; write REGEX=REPLACEMENT")
        try:
            renamed = {name: re.sub(pattern, replacement, new) for name, new in renamed.items()}
        except (re.error, IndexError) as error:
            raise ConfigError(f"{rename!r} cannot rename: {error}; write REGEX=REPLACEMENT, as of Python's re.sub") from None
    taken: dict[str, str] = {}
    for name, new in renamed.items():
        if new in taken:
            raise ConfigError(f"{taken[new]} and {name} would both be called {new}; make the pattern tell them apart")
        taken[new] = name
    changed = {name: new for name, new in renamed.items() if name != new}
    if renames and not changed:
        raise ConfigError(f"no layer of the second run matches {', '.join(renames)}; it has layers such as {_first(names)}")
    return changed


def _first(names: Sequence[str]) -> str:
    return next(iter(names), "-")


def _by_prefix(good: Sequence[str], bad: Sequence[str]) -> tuple[Names, str]:
    """Names that end alike, if one prefix in the place of another matches all layers of the run that has fewer."""
    for left in _prefixes(good[0]):
        for right in _prefixes(bad[0]):
            ours = {name[len(left) :]: name for name in good if name.startswith(left)}
            names = {n: ours[n[len(right) :]] for n in bad if n.startswith(right) and n[len(right) :] in ours}
            if len(names) == min(len(good), len(bad)):
                return names, f"Names were matched with {right!r} of the second run for {left!r} of the first."
    return {}, ""


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return ["".join(f"{part}." for part in parts[:i]) for i in range(len(parts))]


def _one_to_one(good: Mapping[str, int | None], bad: Mapping[str, int | None]) -> tuple[Names, str]:
    """All layers in their order, if each has as many weights as its like, and kinds go with kinds."""
    pairs = list(zip(bad, good, strict=False))
    kinds = {(kind_of(b), kind_of(g)) for b, g in pairs}
    one_to_one = len(kinds) == len({k for k, _ in kinds}) == len({k for _, k in kinds})
    if len(good) != len(bad) or None in good.values() or list(good.values()) != list(bad.values()) or not one_to_one:
        return {}, ""
    examples = ", ".join(f"{b} for {g}" for b, g in sorted(kinds))
    return dict(pairs), f"No name is in common: layers were matched one to one, by order and size of W ({examples})."


def _without_others_sizes(
    bad: Run, sizes: Mapping[str, int | None], bad_sizes: Mapping[str, int | None], good_path: str, how: list[str]
) -> Run:
    """The bad run without layers whose W has another size in the good one, as a padded output layer; told in `how`."""
    known = {name for name, n in bad_sizes.items() if n is not None and sizes.get(name) is not None}
    others = sorted(name for name in known if sizes[name] != bad_sizes[name])
    if not others:
        return bad
    example = f"W of {others[0]} has {sizes[others[0]]} values and {bad_sizes[others[0]]}"
    if 2 * len(others) > len(known):
        raise RecordError(f"{good_path} and {bad.path} are runs of different models: {example}")
    how.append(f"{len(others)} layers are left out, since they are of different size: {example}.")
    kept = ~pl.col("layer").is_in(others)
    return replace(bad, figures=bad.figures.filter(kept))


def _alone(good: Mapping[str, object], bad: Mapping[str, object]) -> list[str]:
    only = [(which, [n for n in a if n not in b]) for which, a, b in (("first", good, bad), ("second", bad, good))]
    return [f"{len(names)} layers are in the {which} run alone, as {names[0]}." for which, names in only if names]
