"""A megatron-core GPT on Transformer Engine's layers in real FP8: is what is reported what was used, and what does it cost?

    python scripts/te_gpt.py --recipe delayed            # on a GPU (delayed, tensorwise, blockwise)
    scripts/te_gpt.sh                                    # on a CPU: the same script over emulated kernels, a small model

It trains without and with the monitor and compares the losses bit by bit, compares every reported scale of X and W with
those that Transformer Engine's own tensors carry into the backward pass, trains a good and a bad learning rate, and prints
what a sampled step costs. Under current scaling Megatron's linear_proj saves its X in BF16, so that its scale is not there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from te_model import GPT, RECIPES, Setup, megatron

BAD_RATES = {"1b": 3e-2, "tiny": 0.3}


def synchronize(setup: Setup) -> None:
    if setup.device != "cpu":
        torch.cuda.synchronize()


def train(setup: Setup, steps: int, rate: float, watch: Any = None) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step; `watch(model)` gives a monitor."""
    gpt = GPT(setup, rate)
    monitor = watch(gpt.model) if watch else None
    losses, seconds = [], []
    for step in range(steps):
        synchronize(setup)
        started = time.perf_counter()
        if monitor:
            monitor.begin_step(step)
        loss = gpt.step()
        if monitor:
            monitor.end_step(loss=loss)
        synchronize(setup)
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    if monitor:
        monitor.close()
    return losses, seconds


def saved_scales(model: Any) -> tuple[dict[str, set[float]], list[Any]]:
    """Hooks that note, by layer, the inverse scales that Transformer Engine saves for the backward pass."""
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

    linear = ("Linear", "linear")
    modules = [
        (n, m) for n, m in model.named_modules() if hasattr(m, "fp8_meta") and n.rsplit(".", 1)[-1].startswith(linear)
    ]
    return found, [module.register_forward_hook(note(name)) for name, module in modules]


def check_scales(setup: Setup, folder: Path) -> tuple[int, int]:
    """How many reported scales of X and W there are, and how many of them Transformer Engine's tensors carry."""
    from nemo_fp8_debug import Monitor
    from nemo_fp8_debug.record.reader import read_table

    notes: dict[str, set[float]] = {}

    def watch(model: Any) -> Any:
        nonlocal notes
        notes, _ = saved_scales(model)
        return Monitor(model, str(folder), interval=1, table_rows=0, on_error="raise")

    steps = 4
    train(setup, steps, 1e-4, watch)
    rows = read_table(folder, "figures", where={"step": steps - 1}).filter(scale_source="engine")
    rows = rows.filter(rows["role"] != "grad_output").drop_nulls("scale")
    carried = [float(1 / torch.tensor(row["scale"]).float()) in notes.get(row["layer"], set()) for row in rows.to_dicts()]
    return len(carried), sum(carried)


def report(setup: Setup, steps: int, folder: Path) -> None:
    from nemo_fp8_debug import Monitor
    from nemo_fp8_debug.analysis.compare import compare

    def watch(name: str, interval: int) -> Any:
        return lambda model: Monitor(model, str(folder / name), interval=interval, table_rows=0, on_error="raise")

    train(setup, 3, 1e-4)  # the first steps compile and allocate
    plain, _ = train(setup, steps, 1e-4)
    watched, _ = train(setup, steps, 1e-4, watch("every", 1))
    print(f"losses with and without the monitor, {steps} steps: {'bit-identical' if plain == watched else 'DIFFERENT'}")
    there, carried = check_scales(setup, folder / "scales")
    print(f"scales of X and W that Transformer Engine's own tensors carry: {carried} of {there}")
    good, seconds = train(setup, 8 * steps, 1e-4, watch("good", 4))
    bad, _ = train(setup, 8 * steps, BAD_RATES[setup.size], watch("bad", 4))
    print(f"loss with a good and a bad learning rate: {good[-1]:.3f}, {bad[-1]:.3f}")
    print(compare(folder / "good", folder / "bad").verdict())
    groups = [seconds[i : i + 4] for i in range(8, len(seconds), 4)]
    ratio = statistics.median((a + b) / (c + d) for a, b, c, d in groups) * 2 - 1
    unsampled = statistics.median(c for _, _, c, _ in groups)
    print(f"a sampled step and what it leaves to the next: {ratio:.2f} of an unsampled one ({1e3 * unsampled:.1f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--emulate", action="store_true", help="over emulated kernels, on a CPU")
    options = parser.parse_args()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1" if options.emulate else "0")
    with megatron(options.emulate) as device, tempfile.TemporaryDirectory() as folder:
        setup = Setup(options.recipe, "tiny" if options.emulate else "1b", device)
        where = "emulated kernels on a CPU" if options.emulate else torch.cuda.get_device_name()
        print(f"megatron-core GPT ({setup.size}), recipe {options.recipe}, {where}")
        report(setup, options.steps, Path(folder))


if __name__ == "__main__":
    main()
