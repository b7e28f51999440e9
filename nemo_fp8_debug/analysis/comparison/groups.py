"""Where the tensors out of band are: by what their GEMM does, by depth, by role."""

from __future__ import annotations

import re

import polars as pl

from ...core.layer_names import aggregate_of, is_aggregate

#: models of more layers are looked at in thirds
_EACH = 8
# No more digits than the column holds.
_NUMBER = re.compile(r"(?:^|\.)(\d{1,18})(?=\.|$)")


def kind_of(layer: str) -> str:
    """What a GEMM does: `decoder.layers.3.mlp.linear_fc2` -> `linear_fc2`; of experts with `experts.` before it."""
    last = next((part for part in reversed(layer.split(".")) if not part.isdigit() and part != "*"), layer)
    return f"experts.{last}" if is_aggregate(layer) or aggregate_of(layer) else last


def depth_of(layer: str) -> int | None:
    """Index of the layer of the model that a GEMM is in; None for one that is outside of them, as an output layer."""
    found = around_depth(layer)
    return found[1] if found else None


def around_depth(layer: str) -> tuple[str, int, str] | None:
    """What comes before that index in a name, the index, and what comes behind it; None: the name has none.

    Example:
        >>> around_depth("decoder.layers.3.mlp.linear_fc2")
        ('decoder.layers.', 3, '.mlp.linear_fc2')
    """
    found = _NUMBER.search(layer)
    return (layer[: found.start(1)], int(found[1]), layer[found.end(1) :]) if found else None


def placed(tensors: pl.DataFrame) -> pl.DataFrame:
    """`tensors` with where each is: kind, depth (null outside of layers), part (of the model, in words)."""
    names = tensors["layer"].unique()
    depths = [depth_of(name) for name in names]
    places = pl.DataFrame(
        {"layer": names, "kind": [kind_of(name) for name in names], "depth": pl.Series(depths, dtype=pl.Int64)},
    )
    n = max((d for d in depths if d is not None), default=-1) + 1
    parts = [_part(depth, n) for depth in depths]
    return tensors.join(places.with_columns(part=pl.Series(parts, dtype=pl.String)), on="layer", how="left")


def _part(depth: int | None, n: int) -> str:
    if depth is None:
        return "outside of layers"
    if n <= _EACH:
        return f"layer {depth}"
    third = ("first", "middle", "last")[depth * 3 // n]
    return f"{third} third"


def groups(tensors: pl.DataFrame) -> pl.DataFrame:
    """A row a group: by (kind, depth or role), group, tensors, out_of_band (how many of them), onset (the earliest),
    drift_log2 (median).

    Args:
        tensors: layer, tensor, onset, drift_log2.
    """
    rows, tables = placed(tensors), []
    for by, column in (("kind", "kind"), ("depth", "part"), ("role", "tensor")):
        of_all = rows.group_by(column, maintain_order=True).agg(
            pl.len().cast(pl.Int64).alias("tensors"),
            pl.col("onset").is_not_null().sum().cast(pl.Int64).alias("out_of_band"),
            pl.col("onset").min(),
            pl.col("drift_log2").median(),
            pl.col("depth").min().alias("order"),
        )
        first = ["order"] if by == "depth" else ["onset"]
        ordered = of_all.sort(*first, column, nulls_last=True).drop("order").rename({column: "group"})
        tables.append(ordered.select(pl.lit(by).alias("by"), pl.all()))
    return pl.concat(tables)


def concentrated(tensors: pl.DataFrame) -> list[str]:
    """In a sentence what the tensors out of band have in common and others lack; nothing where that is nothing.

    Args:
        tensors: as for `groups`.
    """
    rows = placed(tensors)
    out_of_band = rows.filter(pl.col("onset").is_not_null())
    if len(out_of_band) < 2:
        return []

    what = " of ".join(out_of_band[c][0] for c in ("tensor", "kind") if _shared(c, out_of_band, rows))
    where = _where(out_of_band, rows)
    common = " ".join(filter(None, (what, where)))
    return [f"All {len(out_of_band)} tensors out of band are {common}."] if common else []


def _where(out_of_band: pl.DataFrame, rows: pl.DataFrame) -> str:
    if _shared("depth", out_of_band, rows):
        depth = out_of_band["depth"][0]
        ends = {rows["depth"].min(): ", the first", rows["depth"].max(): ", the last"}
        return f"in layer {depth}{ends.get(depth, '')}"
    if _shared("part", out_of_band, rows) and "third" in out_of_band["part"][0]:
        return f"in the {out_of_band['part'][0]} of the layers"
    return ""


def _shared(column: str, out_of_band: pl.DataFrame, rows: pl.DataFrame) -> bool:
    """Whether those out of band have one value, and others have another."""
    return out_of_band[column].n_unique() == 1 < rows[column].n_unique() and out_of_band[column].null_count() == 0
