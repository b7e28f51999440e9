"""What a GPU's GEMMs return, beside the exact product of their operands, and a kernel that multiplies wrongly.

A GPT in real FP8: no product may be beyond its bound, and one whose result is off by a factor of 1 + 2^-5 has to be named.
On Hopper the bound of an fprop without a split accumulator leaves 1 + 2^-6 open: 257 additions of 14 bits come to 1.6%.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl

from nemo_fp8_debug.record.reader import read_table

from .gpt import SIZES, Setup, megatron
from .measures import all_of
from .parts import Part
from .training import RATE, train, watch

STEPS, FAULTY_STEP = 4, 1
ROWS = 64
FACTOR = 1 + 2.0**-5
PRODUCTS = ("fprop", "dgrad", "wgrad")


def run(part: Part, emulate: bool) -> dict[str, Any]:
    """A line for each product, and promises about all of them."""
    with megatron(emulate) as device, tempfile.TemporaryDirectory() as folder:
        setup, root = Setup.of(part, device), Path(folder)
        found = checked(setup, root / "clean", STEPS)
        named = sum(_is_named(setup, root / product, product) for product in PRODUCTS)
    looked_at = found.filter(pl.col("outcome") != "unknown")
    within = looked_at.filter(pl.col("outcome") == "within")
    measures = [
        all_of("products that are within their bounds", len(within), len(looked_at)),
        all_of("a product that is wrong by a factor of 1 + 2^-5 is named, and no other", named, len(PRODUCTS)),
    ]
    return {"measures": measures, "lines": [_line(found.filter(product=product), product) for product in PRODUCTS]}


def checked(setup: Setup, folder: Path, steps: int) -> pl.DataFrame:
    """The outcome of every product of every step."""
    train(setup, steps, RATE, watch(folder, interval=1, verify_rows=ROWS))
    return read_table(folder, "verification").filter(pl.col("product") != "reduction")


def _line(found: pl.DataFrame, product: str) -> dict[str, Any]:
    of = {outcome: found.filter(outcome=outcome) for outcome in ("within", "beyond", "unknown")}
    return {
        "product": product,
        **{outcome: len(rows) for outcome, rows in of.items()},
        "why unknown": "; ".join(sorted(set(of["unknown"]["reason"].drop_nulls()))),
        "error_over_bound": found["error_over_bound"].drop_nans().max(),
        "relative_error": found["relative_error"].drop_nans().median(),
    }


def _is_named(setup: Setup, folder: Path, product: str) -> bool:
    """Whether one wrong product of one step is what the record tells."""
    layers = SIZES[setup.size][0]
    # Of a layer, a plain `Linear` multiplies twice in a forward pass, and as many products of each kind in a backward.
    call = {"fprop": 2 * layers - 1, "dgrad": 2 * layers, "wgrad": 2 * layers + 1}[product]
    with _wrong(FAULTY_STEP * 6 * layers + call):
        beyond = checked(setup, folder, FAULTY_STEP + 2).filter(outcome="beyond")
    last = f"decoder.layers.{layers - 1}.mlp.linear_fc2"
    return beyond.select("step", "layer", "product").rows() == [(FAULTY_STEP, last, product)]


@contextlib.contextmanager
def _wrong(at: int) -> Iterator[None]:
    """Of the GEMMs that plain linear layers ask for, the one of this number is wrong."""
    from transformer_engine.pytorch.module import linear

    calls, multiply = iter(range(1 << 30)), linear.general_gemm

    def multiply_wrongly(*args: Any, **kwargs: Any) -> Any:
        found = multiply(*args, **kwargs)
        if next(calls) == at:
            found[0].mul_(FACTOR)
        return found

    with mock.patch.object(linear, "general_gemm", multiply_wrongly):
        yield
