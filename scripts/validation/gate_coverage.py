"""How often the gate's interval holds the gap, and how often it decides and is wrong, on losses made from real clean runs:
`gate_coverage.py --output gate_coverage.json`. Trains nothing; the runs are those of `fault_injection/records`.

Noise is what the losses of clean runs scatter by around their running median, in blocks of random length that keep what
depends on what came before (Politis and Romano, JASA 89, 1994). The run and its baseline share blocks if they are to have
seen the same batches. A gap is an exact factor.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
from fault_injection.judge import baseline_of
from fault_injection.records import read_run, truths
from scipy.special import stdtrit

from nemo_fp8_debug.analysis.loss.curve import LossCurve, compute_running_median
from nemo_fp8_debug.analysis.loss.gate import CANNOT_TELL, ERROR, FAIL, PASS, LossGate, gate

Floats = npt.NDArray[np.float64]

GAPS, LENGTHS, LIMIT = (0.0, 0.25, 0.5, 1.0, 2.0), (1_000, 5_000, 20_000), 0.5
#: steps of warm-up that are left out, half the running median, and the mean length of a block
_WARM_UP, _HALF, _BLOCK = 60, 12, 25
#: of the `PASS` and `FAIL` shares, and of what is decided
_DECIDED = 0.9


@dataclass(frozen=True)
class Noise:
    """What the losses of a clean run, and of its baseline, scatter by; [n] each, relative, of mean 0."""

    run: Floats
    baseline: Floats


def noises(kind: str) -> list[Noise]:
    """Of all pairs of clean runs: `near` (the same batches) or `other`."""
    clean = {(told["part"], told["name"]): told for told in truths("tune") if told["kind"] == "none"}
    found = []
    for (part, _), told in clean.items():
        name = baseline_of(told, kind)
        if name is not None and (part, name) in clean:
            found.append(Noise(_scatter(told), _scatter(clean[part, name])))
    return found


def _scatter(told: dict[str, object]) -> Floats:
    losses = read_run(told).loss.losses[_WARM_UP:]
    relative = losses / compute_running_median(losses, _HALF) - 1
    result: Floats = relative - relative.mean()
    return result


def series(noise: Noise, n: int, gap: float, paired: bool, rng: np.random.Generator) -> tuple[LossCurve, LossCurve]:
    """A run and its baseline of `n` steps on a loss that falls as a power of the step."""
    falls = 2 + 4 * (np.arange(n) + 10.0) ** -0.4
    places = _blocks(len(noise.run), n, rng)
    others = places if paired else _blocks(len(noise.baseline), n, rng)
    losses = falls * (1 + noise.run[places]) * (1 + gap / 100), falls * (1 + noise.baseline[others])
    run, baseline = (LossCurve.from_steps_table(pl.DataFrame({"step": np.arange(n), "loss": each})) for each in losses)
    return run, baseline


def _blocks(length: int, n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Places whose neighbors are neighbors, but where a new block begins."""
    begins = rng.random(n) < 1 / _BLOCK
    begins[0] = True
    starts = rng.integers(0, length, n)
    first = np.maximum.accumulate(np.where(begins, np.arange(n), 0))
    return (starts[first] + np.arange(n) - first) % length


def measured(kind: str, each: int) -> Iterator[dict[str, float | int | str | bool]]:
    """A row a series."""
    rng, sources = np.random.default_rng(2026), noises(kind)
    for n in LENGTHS:
        for gap in GAPS:
            for i in range(each):
                run, baseline = series(sources[i % len(sources)], n, gap, kind == "near", rng)
                found = gate([run], [baseline], LIMIT)
                assert found is not None
                yield {"kind": kind, "n": n, "gap": gap} | _row(found, gap)


def _row(found: LossGate, gap: float) -> dict[str, float | str | bool]:
    low, high = found.gaps[0].compute_confidence_interval()
    decided = found.error * float(stdtrit(found.freedom, 1 - ERROR) + stdtrit(found.freedom, _DECIDED))
    return {"outcome": found.outcome, "held": low <= gap <= high, "decided": decided}


def summary(rows: pl.DataFrame) -> dict[str, object]:
    """What the issue asks for, by kind of baseline."""
    told: dict[str, object] = {"series": len(rows), "limit": LIMIT}
    for kind, name in (("near", "the same batches"), ("other", "other batches")):
        of = rows.filter(kind=kind)
        told[name] = {
            "interval holds the gap, %": _percent(of["held"]),
            "pass at or above the limit, %": _percent(of.filter(pl.col("gap") >= LIMIT)["outcome"] == PASS),
            "fail at or below the limit, %": _percent(of.filter(pl.col("gap") <= LIMIT)["outcome"] == FAIL),
            "by steps": {str(n): _of_length(of.filter(n=n)) for n in LENGTHS},
        }
    return told


def _of_length(rows: pl.DataFrame) -> dict[str, float]:
    half_a_point = rows.filter(pl.col("gap").is_in([LIMIT - 0.5, LIMIT + 0.5]))
    return {
        "cannot tell half a point from the limit, %": _percent(half_a_point["outcome"] == CANNOT_TELL),
        "points from the limit that are decided in 90 of 100": round(float(np.median(rows["decided"].to_numpy())), 3),
    }


def _percent(true: pl.Series) -> float:
    return round(100 * float(true.cast(pl.Float64).mean() or 0.0), 1)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--each", type=int, default=80, help="series of each length, gap and kind")
    options = parser.parse_args()
    rows = pl.DataFrame([row for kind in ("near", "other") for row in measured(kind, options.each)])
    clean = sum(told["kind"] == "none" for told in truths("tune"))
    told = {"clean runs": clean} | summary(rows)
    options.output.write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
