"""A GPT in real FP8 with and without the monitor: are losses the same, and is the record right?

Losses are compared bit by bit; every recorded scale of X and W with those that Transformer Engine's own tensors carry into
the backward pass; histograms and metrics of dumped operands with what a CPU finds in them. Then a good and a bad learning
rate, which `compare` tells apart.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.story.summary import summarize
from nemo_fp8_debug.record.reader import read_table_rows

from .dumped import Operands, compare_with_cpu
from .gpt import GPT, SIZES, Setup, forget_models, megatron
from .kernels import CLOSE
from .measures import Measure, Piece, all_of, measure
from .parts import Part

RATE, BAD_RATES = 1e-4, {"1b": 3e-2, "tiny": 0.3}
STEPS, EMULATED_STEPS = 10, 4
#: steps whose operands are dumped
DUMPED = 2
#: under current scaling Megatron's linear_proj saves its X in BF16, so that its scale is not there
SAVED_IN_BF16 = ("linear_proj", "input")
#: recipes of one scale a tensor
PER_TENSOR = ("delayed", "tensorwise")

Watch = Callable[[Any], Monitor]


def run(part: Part, emulate: bool) -> Iterator[Piece]:
    """Promises about one recipe, and what was trained."""
    steps = EMULATED_STEPS if emulate else STEPS
    with megatron(emulate) as device, tempfile.TemporaryDirectory() as folder:
        setup, root = Setup.of(part, device), Path(folder)
        train(setup, 3, RATE)  # the first steps compile and allocate
        plain, again = train(setup, steps, RATE), train(setup, steps, RATE)
        watched = train(setup, steps, RATE, watch(root / "every", interval=1))
        yield {"measures": of_losses(plain, again, watched), "losses": plain}
        yield {"measures": of_scales(setup, root / "scales")}
        yield {"measures": of_operands(setup, root / "dumped")}
        rates, verdict = of_rates(setup, root, 8 * steps)
        yield {"measures": rates, "verdict": verdict}


def of_losses(plain: list[float], again: list[float], watched: list[float]) -> list[Measure]:
    """Of steps without the monitor, of the same once more, and of the same with it."""

    def same(losses: list[float]) -> int:
        return sum(a == b for a, b in zip(plain, losses, strict=True))

    return [
        measure("losses of two runs without the monitor that are the same", same(again), of=len(plain)),
        all_of("losses with the monitor that are those without, bit by bit", same(watched), len(plain)),
    ]


def watch(folder: Path, **options: Any) -> Watch:
    return lambda model: Monitor(model, str(folder), table_rows=0, on_error="raise", **options)


def train(setup: Setup, steps: int, rate: float, watch: Watch | None = None) -> list[float]:
    """The loss of each step of a new model."""
    forget_models()
    gpt = GPT(setup, rate)
    losses = []
    with contextlib.closing(watch(gpt.model)) if watch else contextlib.nullcontext() as monitor:
        for number in range(steps):
            if monitor:
                monitor.begin_step(number)
            loss = gpt.step()
            if monitor:
                monitor.end_step(loss=loss)
            losses.append(loss.item())
    return losses


def saved_scales(model: Any) -> dict[str, set[float]]:
    """Filled by layer, in each forward pass, with the inverse scales that Transformer Engine saves for the backward pass."""
    found: dict[str, set[float]] = {}

    def note(name: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            node = (out[0] if isinstance(out, tuple) else out).grad_fn
            while node is not None and not type(node).__name__.lstrip("_").startswith(("Linear", "LayerNormLinear")):
                node = node.next_functions[0][0] if node.next_functions else None
            saved = getattr(node, "saved_tensors", ())
            inverse = [getattr(t, "_scale_inv", t) for t in saved if t is not None]
            found[name] = {float(t) for t in inverse if t.dtype == torch.float32 and t.numel() == 1}

        return hook

    for name, module in model.named_modules():
        if hasattr(module, "fp8_meta") and name.rsplit(".", 1)[-1].startswith(("Linear", "linear")):
            module.register_forward_hook(note(name))
    return found


def of_scales(setup: Setup, folder: Path) -> list[Measure]:
    """How many recorded scales of X and W there are, and how many of them Transformer Engine's tensors carry."""
    if setup.recipe not in PER_TENSOR:
        return []
    notes: dict[str, set[float]] = {}

    def watched(model: Any) -> Monitor:
        nonlocal notes
        notes = saved_scales(model)
        return watch(folder, interval=1)(model)

    steps = 4
    train(setup, steps, RATE, watched)
    table = read_table_rows(folder, "metrics", where={"step": steps - 1}).filter(scale_source="engine")
    rows = table.filter(table["role"] != "grad_output").drop_nulls("scale").to_dicts()
    if setup.recipe == "tensorwise":
        rows = [row for row in rows if (row["layer"].rpartition(".")[2], row["role"]) != SAVED_IN_BF16]
    carried = sum(float(1 / torch.tensor(row["scale"]).float()) in notes.get(row["layer"], set()) for row in rows)
    return [all_of("scales of X and W that Transformer Engine's own tensors carry", carried, len(rows))]


def of_operands(setup: Setup, folder: Path) -> list[Measure]:
    """The record of the first and the last layer's operands, against what a CPU finds in the dumped tensors."""
    last = SIZES[setup.size][0] - 1
    layers = [f"decoder.layers.{layer}.*" for layer in (0, last)]
    train(setup, DUMPED, RATE, watch(folder, interval=1, dump=layers, dump_min_free_bytes=0))
    return exactness(compare_with_cpu(folder))


def exactness(found: Operands) -> list[Measure]:
    rows = [all_of("histograms that are the CPU's, count by count", found.histograms, found.all)]
    if found.counted.metrics:
        rows.append(
            all_of("metrics from histograms that are the CPU's, bit by bit", found.counted.equal, found.counted.metrics)
        )
    if found.summed.metrics:
        what = "metrics from sums over float32 or blocks that are the CPU's, bit by bit"
        rows += [
            measure(what, found.summed.equal, of=found.summed.metrics),
            measure("the others, relative", found.summed.apart, limit=f"at most {CLOSE}", kept=found.summed.apart <= CLOSE),
        ]
    return rows


def of_rates(setup: Setup, folder: Path, steps: int) -> tuple[list[Measure], str]:
    """A good and a bad learning rate, of which nothing is promised, and what `compare` says of the two runs."""
    good = train(setup, steps, RATE, watch(folder / "good", interval=4))
    bad = train(setup, steps, BAD_RATES[setup.size], watch(folder / "bad", interval=4))
    losses = [
        measure(f"loss after {steps} steps, learning rate {RATE:g}", good[-1]),
        measure(f"the same, learning rate {BAD_RATES[setup.size]:g}", bad[-1]),
    ]
    return losses, summarize(compare(folder / "bad", folder / "good"))
