"""Two runs side by side: their losses, and the tensors ranked by how far FP8's grip on them drifted apart."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from ..errors import RecordError
from ..names import fold_key, is_fold
from ..record.reader import find_run, read_fingerprint, read_table
from ..sample import SHOWN_AS
from ..shards import MIXED
from .loss import LossCurve
from .onset import onsets

#: per cent; ratios of underflow and overflow below this are noise
_FLOOR_PCT = 0.01
#: share of the matched steps, from the end, that the ranking looks at
_TAIL = 0.5
#: figures of either run that stand beside the ranking
_SHOWN = ("mse", "underflow_pct", "overflow_pct", "relative_error", "cosine", "amax", "scale_ratio_log2")
#: figures that are shown under other recipes
_WEIGHED = ("relative_error", "underflow_pct", "overflow_pct", "mse")


@dataclass(frozen=True)
class Run:
    """A record, read."""

    path: str
    fingerprint: dict[str, Any]
    figures: pl.DataFrame
    loss: LossCurve
    #: figures under recipes that were not in use, weighed in the run or added by replay
    others: pl.DataFrame

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Run:
        """
        Raises:
            RecordError: there is no record at `path`, or it cannot be read.
        """
        found = find_run(path)
        others = pl.concat([read_table(found, table) for table in ("what_if", "replayed")])
        losses = LossCurve.of(read_table(found, "steps"))
        return cls(str(found), read_fingerprint(found), read_table(found, "figures"), losses, others)


@dataclass(frozen=True)
class Comparison:
    """What sets a run apart from a good one."""

    good: Run
    bad: Run
    twin: Run | None
    #: a row a tensor, farthest drifted first; columns as in `drifts`; the experts of a layer are one
    tensors: pl.DataFrame
    #: the same of those experts one by one
    experts: pl.DataFrame
    #: since when tensors are out of the good run's band, earliest first; as in `onsets`, but the experts of a layer are one
    left: pl.DataFrame

    def verdict(self) -> str:
        """The comparison in a sentence or three."""
        since, worst = self.bad.loss.above(self.good.loss), self.tensors.row(0, named=True)
        sentences = []
        if self.good.loss.final is None or self.bad.loss.final is None:
            sentences.append("Not both records have losses, so only tensors are compared.")
        elif since is None:
            sentences.append("The second run's loss stays with the first run's.")
        else:
            fell = self.bad.loss.diverged_at
            how = f"and rises for good from step {fell}" if fell is not None else "but does not rise above its own minimum"
            sentences.append(f"The second run's loss stays above the first run's from step {since}, {how}.")
        sentences += self._first_out(since)
        sentences.append(_described(worst))
        sentences += self._expert_sentences(worst)
        sentences += self._what_if_sentences(worst)
        if self.twin is not None:
            sentences.append(self._twin_sentence())
        return " ".join(sentences)

    def _first_out(self, loss_left: int | None) -> list[str]:
        if self.left.is_empty():
            return ["No tensor leaves the good run's band."]
        first = self.left.row(0, named=True)
        before = "" if loss_left is None else f", {_steps_apart(first['onset'], loss_left)} the loss"
        what = f"{first['figure']} {number(first['expected'])} -> {number(first['value'])}"
        which = f"{first['tensor']} of {first['layer']}"
        return [f"First out of the good run's band is {which}, from step {first['onset']}{before}: {what}."]

    def what_if(self) -> pl.DataFrame:
        """The bad run's tensors under recipes that were weighed or replayed: medians over its later half, a row a recipe."""
        steps = self.bad.figures["step"].unique().sort()
        tail = steps.tail(max(1, round(len(steps) * _TAIL)))
        rows = self.bad.others.filter(pl.col("step").is_in(tail.implode()))
        return rows.group_by("layer", "role", "recipe", maintain_order=True).agg(pl.median(*_WEIGHED))

    def _expert_sentences(self, fold: Mapping[str, Any]) -> list[str]:
        """The worst of the experts, if there are any and one of them stands out."""
        for row in self.experts.iter_rows(named=True):
            if fold_key(row["layer"], row["role"]) == (fold["layer"], fold["role"]):
                tells = row["nonfinite_since"] is not None or row["drift_log2"] is not None
                described = _described(row)
                return [f"Of its experts, {described[0].lower()}{described[1:]}"] if tells else []
        return []

    def _what_if_sentences(self, worst: Mapping[str, Any]) -> list[str]:
        rows = self.what_if().filter(layer=worst["layer"], role=worst["role"]).sort("relative_error")
        before = number(worst["relative_error_bad"])
        return [
            f"Under {row['recipe']} its relative error would be {number(row['relative_error'])} instead of {before}, "
            f"its underflow {number(row['underflow_pct'], '%')}."
            for row in rows.iter_rows(named=True)
        ]

    def _twin_sentence(self) -> str:
        assert self.twin is not None
        since = self.twin.loss.above(self.good.loss)
        if self.twin.loss.final is None:
            return "Its twin's record has no losses, so it has nothing to tell."
        if self.bad.loss.above(self.good.loss) is None:
            return "With no divergence in the second run, the twin has nothing to tell."
        if since is None:
            return "Its twin does not diverge: what differs between them (quantisation, for a BF16 twin) is to blame."
        return f"Its twin's loss leaves too, from step {since}: FP8 is not all of the cause."

    def to_json(self) -> dict[str, Any]:
        """Plain values: the losses of each run, the verdict, the ranking."""
        runs = {"good": self.good, "bad": self.bad} | ({"twin": self.twin} if self.twin else {})
        plain = {
            "verdict": self.verdict(),
            "runs": {
                name: {
                    "path": run.path,
                    "final_loss": run.loss.final,
                    "lowest_loss": run.loss.lowest,
                    "diverged_at": run.loss.diverged_at,
                    "above_good_since": None if run is self.good else run.loss.above(self.good.loss),
                }
                for name, run in runs.items()
            },
            "tensors": self.tensors.to_dicts(),
            "experts": self.experts.to_dicts(),
            "left": self.left.to_dicts(),
            "what_if": self.what_if().to_dicts(),
        }
        result: dict[str, Any] = _jsonable(plain)
        return result


def _jsonable(value: Any) -> Any:
    """JSON has neither NaN nor infinity: null."""
    if isinstance(value, Mapping):
        return {k: _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    good: str | os.PathLike[str], bad: str | os.PathLike[str], twin: str | os.PathLike[str] | None = None
) -> Comparison:
    """Compare the records of two runs, matched by step.

    Args:
        twin: a run that differs from `bad` in one thing, as BF16 instead of FP8.

    Raises:
        RecordError: a record is missing or unreadable, or the two have no sampled step and tensor in common.
    """
    runs = Run.read(good), Run.read(bad)
    ranked = experts_apart(drifts(*runs))
    left, _ = experts_apart(onsets(runs[0].figures, _quantised(runs[1].figures)))
    return Comparison(*runs, Run.read(twin) if twin is not None else None, *ranked, left)


def _quantised(figures: pl.DataFrame) -> pl.DataFrame:
    """Rows of operands that an engine quantises, where one does: the others cannot have done harm."""
    by_engine = figures.filter(pl.col("scale_source").is_in(["engine", MIXED]))
    return by_engine if len(by_engine) else figures


def experts_apart(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of tensors, and apart from them those of experts whose fold is among them."""
    keys = rows.select("layer", "role").rows()
    folds = {key for key in keys if is_fold(key[0])}
    apart = pl.Series([fold_key(*key) in folds for key in keys], dtype=pl.Boolean)
    return rows.filter(~apart), rows.filter(apart)


def drifts(good: Run, bad: Run) -> pl.DataFrame:
    """How far each tensor drifted, over the later half of the steps that both runs sampled.

    `drift_log2` takes the largest of three medians over those steps, each the log2 of a ratio bad / good: of the underflow
    ratio, of the overflow ratio (both floored at 0.01%), and of the relative error. None of them depends on how large the
    tensor's values are. It is capped by the log2 of the MSE ratio: the MSE alone cannot rank tensors of different scale, but
    where it fell, as in a gradient that vanishes because another tensor broke the run, the drift is a consequence.
    """
    key = ["step", "layer", "role"]
    both = good.figures.join(bad.figures, on=key, suffix="_bad")
    if both.is_empty():
        raise RecordError(_nothing_in_common(good, bad))
    steps = both["step"].unique().sort()
    tail = steps.tail(max(1, round(len(steps) * _TAIL)))

    def ratio(figure: str, floor: float = 0.0) -> pl.Expr:
        good_, bad_ = pl.col(figure) + floor, pl.col(f"{figure}_bad") + floor
        return pl.when((good_ > 0) & (bad_ > 0)).then((bad_ / good_).log(2))  # a ratio with a zero is absent

    medians = (
        both.filter(pl.col("step").is_in(tail.implode()))
        .with_columns(
            underflow_log2=ratio("underflow_pct", _FLOOR_PCT),
            overflow_log2=ratio("overflow_pct", _FLOOR_PCT),
            relative_error_log2=ratio("relative_error"),
            mse_log2=pl.coalesce(ratio("true_mse"), ratio("mse")),  # whatever the loss scale of either
        )
        .group_by("layer", "role", maintain_order=True)
        .agg(
            pl.median("underflow_log2", "overflow_log2", "relative_error_log2"),
            pl.median("mse_log2"),
            *(
                pl.median(f"{figure}{end}").alias(f"{figure}_{name}")
                for figure in _SHOWN
                for end, name in (("", "good"), ("_bad", "bad"))
            ),
        )
    )
    return (
        medians.with_columns(
            tensor=pl.col("role").replace_strict(SHOWN_AS),
            mse_ratio=2 ** pl.col("mse_log2"),
            drift_log2=pl.min_horizontal(
                pl.max_horizontal("underflow_log2", "overflow_log2", "relative_error_log2"), "mse_log2"
            ),
        )
        .join(_nonfinite_since(both), on=["layer", "role"], how="left")
        .sort(
            pl.col("nonfinite_since"),
            pl.col("nonfinite_order"),
            -pl.col("drift_log2"),
            -pl.col("mse_log2"),
            nulls_last=True,
            maintain_order=True,
        )
        .select("layer", "tensor", "role", "drift_log2", pl.exclude("layer", "tensor", "role", "drift_log2", "mse_log2"))
    )


def _nonfinite_since(both: pl.DataFrame) -> pl.DataFrame:
    """Since when a tensor of the bad run held NaN or infinity and the good run's did not, and its place in the order of
    execution at that step; only such tensors."""
    bad_only = (pl.col("nan_bad") + pl.col("inf_bad") > 0) & (pl.col("nan") + pl.col("inf") == 0)
    first = both.filter(bad_only).sort("step").group_by("layer", "role").first()
    return first.select("layer", "role", nonfinite_since="step", nonfinite_order="nonfinite_order_bad")


def _steps_apart(tensor: int, loss: int) -> str:
    if tensor == loss:
        return "with"
    return f"{abs(loss - tensor)} steps {'before' if tensor < loss else 'after'}"


def _nothing_in_common(good: Run, bad: Run) -> str:
    def described(run: Run) -> str:
        if run.figures.is_empty():
            return f"{run.path} has no sampled step"
        steps, layers = run.figures["step"], run.figures["layer"]
        return f"{run.path} has steps {steps[0]} to {steps[-1]} and layers such as {layers[0]!s}"

    return f"the runs have no sampled step and tensor in common: {described(good)}; {described(bad)}"


def _described(worst: Mapping[str, Any]) -> str:
    """The tensor at the top of the ranking, in a sentence."""
    name = f"{worst['tensor']} of {worst['layer']}"
    if worst["nonfinite_since"] is not None:
        return f"First to hold NaN or infinity is {name}, at step {worst['nonfinite_since']}."

    if worst["drift_log2"] is None:
        return "No figure that both records have tells their tensors apart."

    def pair(figure: str) -> str:
        return " -> ".join(number(worst[f"{figure}_{run}"], "%") for run in ("good", "bad"))

    ratio = number(worst["mse_ratio"], prefix="x ")
    return f"Farthest apart is {name}: MSE {ratio}, underflow {pair('underflow_pct')}, overflow {pair('overflow_pct')}."


def number(value: float | None, unit: str = "", prefix: str = "") -> str:
    """Three digits of a figure; `-` where it is absent."""
    return "-" if value is None else f"{prefix}{value:.3g}{unit}"
