"""What a GPU's GEMMs return, beside the exact product of their operands, and a kernel that multiplies wrongly.

A GPT in real FP8: no product may be beyond its bound, and one whose result is off by a factor has to be named. Which factor
an fprop without a split accumulator leaves room for depends on how far its terms cancel: on Hopper 257 additions of 14 bits
come to 1.6% of the sum of their magnitudes. So the larger factors are tried where the least is not named.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl

from nemo_fp8_debug.record.reader import read_table_rows

from .gpt import SIZES, Setup, megatron
from .measures import Measure, Piece, all_of, measure
from .parts import Part
from .training import RATE, train, watch

STEPS, FAULTY_STEP = 4, 1
ROWS = 64
#: by which a product is wrong: the least is promised to be named, and of an fprop on a device any of them
FACTORS = (1 + 2.0**-5, 1.25, 2.0)
PRODUCTS = ("fprop", "dgrad", "wgrad")


def run(part: Part, emulate: bool) -> Iterator[Piece]:
    """A line for each product, and promises about all of them."""
    with megatron(emulate) as device, tempfile.TemporaryDirectory() as folder:
        setup, root = Setup.of(part, device), Path(folder)
        found = checked(setup, root / "clean", STEPS)
        looked_at = found.filter(pl.col("outcome") != "unknown")
        within = looked_at.filter(pl.col("outcome") == "within")
        lines = [_line(found.filter(product=product), product) for product in PRODUCTS]
        yield {"measures": [all_of("products that are within their bounds", len(within), len(looked_at))], "lines": lines}
        for product in PRODUCTS:
            most = FACTORS[-1] if product == "fprop" and not emulate else FACTORS[0]
            yield {"measures": [_named(setup, root, product, most)]}


def _named(setup: Setup, root: Path, product: str, most: float) -> Measure:
    """The least factor by which a product can be wrong and is named, and no other is; and the most that it may be."""
    tried = (factor for factor in FACTORS if _is_named(setup, root / f"{product}-{factor:g}", product, factor))
    least = next(tried, None)
    return measure(
        f"{product} that is wrong by a factor is named, and no other",
        "by no factor" if least is None else least,
        limit=f"at most {most:g}",
        kept=least is not None and least <= most,
    )


def checked(setup: Setup, folder: Path, steps: int) -> pl.DataFrame:
    """The outcome of every product of every step."""
    train(setup, steps, RATE, watch(folder, interval=1, verify_rows=ROWS))
    return read_table_rows(folder, "verification").filter(pl.col("product") != "reduction")


def _line(found: pl.DataFrame, product: str) -> dict[str, Any]:
    of = {outcome: found.filter(outcome=outcome) for outcome in ("within", "beyond", "unknown")}
    return {
        "product": product,
        **{outcome: len(rows) for outcome, rows in of.items()},
        "why unknown": "; ".join(sorted(set(of["unknown"]["reason"].drop_nulls()))),
        "error_over_bound": found["error_over_bound"].drop_nans().max(),
        "relative_error": found["relative_error"].drop_nans().median(),
    }


def _is_named(setup: Setup, folder: Path, product: str, factor: float) -> bool:
    """Whether one wrong product of one step is what the record tells."""
    layers = SIZES[setup.size][0]
    # Of a layer, a plain `Linear` multiplies twice in a forward pass, and as many products of each kind in a backward.
    call = {"fprop": 2 * layers - 1, "dgrad": 2 * layers, "wgrad": 2 * layers + 1}[product]
    with _wrong(FAULTY_STEP * 6 * layers + call, factor):
        beyond = checked(setup, folder, FAULTY_STEP + 2).filter(outcome="beyond")
    last = f"decoder.layers.{layers - 1}.mlp.linear_fc2"
    return beyond.select("step", "layer", "product").rows() == [(FAULTY_STEP, last, product)]


@contextlib.contextmanager
def _wrong(at: int, factor: float) -> Iterator[None]:
    """Of the GEMMs that plain linear layers ask for, the one of this number is wrong by a factor."""
    from transformer_engine.pytorch.module import linear

    calls, multiply = iter(range(1 << 30)), linear.general_gemm

    def multiply_wrongly(*args: Any, **kwargs: Any) -> Any:
        found = multiply(*args, **kwargs)
        if next(calls) == at:
            found[0].mul_(factor)
        return found

    with mock.patch.object(linear, "general_gemm", multiply_wrongly):
        yield
