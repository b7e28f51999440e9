"""Trains clean runs of further seeds and keeps their losses: `fault_injection/other_seeds.py --family llama --first 300`.

They stand beside the baseline of another seed (`judge.py --baselines three five`). The losses alone are kept: the records
of all would be 50 MB. Those that are there already are left alone. Parts below 300 have two, the others four.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import polars as pl

from fault_injection.records import FOLDER, StoredRun
from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.runs.metrics import Metrics
from nemo_fp8_debug.record.schema import SCHEMAS

LOSSES = Path(__file__).parent / "other_seeds"
NAMES = ("c", "d", "e", "f")
_SCHEMA = {"part": pl.String, "name": pl.String, "losses": pl.List(pl.Float32)}


def further_seeds(part: str, count: int) -> Iterator[StoredRun]:
    """The first clean runs of further seeds of a part, without samples; fewer if there are not so many.

    Args:
        part: as `llama-300`.
    """
    for name in NAMES[:count]:
        if (losses := _kept(part.rpartition("-")[0]).get((part, name))) is not None:
            yield _of_losses(f"{part}/{name}", losses)


def _of_losses(path: str, losses: pl.Series) -> StoredRun:
    curve = LossCurve.of(pl.DataFrame({"step": range(len(losses)), "loss": losses}))
    metrics, steps = (pl.DataFrame(schema=SCHEMAS[table]) for table in ("metrics", "steps"))
    return StoredRun(path=path, fingerprint={}, metrics=Metrics.of(metrics), loss=curve, table_of_steps=steps)


@cache
def _kept(family: str) -> dict[tuple[str, str], pl.Series]:
    """By part and name."""
    table = _read(LOSSES / f"{family}.parquet")
    return dict(zip(zip(table["part"], table["name"], strict=True), table["losses"], strict=True))


def _read(path: Path) -> pl.DataFrame:
    return pl.read_parquet(path) if path.exists() else pl.DataFrame(schema=_SCHEMA)


def train_others(family: str, first: int, count: int) -> None:
    """Of the parts of a family from one on, so many of each, if they are not there yet."""
    from fault_injection.cases import cases
    from fault_injection.fault import Fault
    from fault_injection.training import train

    path = LOSSES / f"{family}.parquet"
    path.parent.mkdir(exist_ok=True)
    for record in sorted(FOLDER.glob(f"{family}-*.parquet")):
        part, number = record.stem, int(record.stem.rpartition("-")[2])
        table = _read(path)
        missing = [name for name in NAMES[:count] if table.filter(part=part, name=name).is_empty()]
        if number < first or not missing:
            continue
        setup = cases(family, number)[0].setup
        for name in missing:
            seed = random.Random(f"{family} {number} {name}").randrange(1, 1 << 30)
            losses = train(replace(setup, seed=seed, order=seed), Fault(), None)
            row = pl.DataFrame({"part": [part], "name": [name], "losses": [losses]}, _SCHEMA)
            table = pl.concat([table, row]).sort("part", "name")
        table.write_parquet(path, compression="zstd")
        print(f"{part}: {', '.join(missing)}", flush=True)


def main() -> None:
    import torch

    from fault_injection.families import FAMILIES
    from fault_injection.run_part import surroundings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--first", type=int, default=0, help="part from which on runs are trained")
    parser.add_argument("--count", type=int, choices=range(1, len(NAMES) + 1), default=2, help="runs of a part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with surroundings(options.family):
        train_others(options.family, options.first, options.count)


if __name__ == "__main__":
    main()
