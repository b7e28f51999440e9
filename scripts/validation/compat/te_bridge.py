"""The GPT of recipes/megatron_bridge.py, smaller, trained by Megatron-Bridge's own `pretrain` over emulated kernels.

    scripts/validation/compat/te_bridge.sh              # installs each minor release of Bridge, and runs this with it

Prints whether losses, gradient norms and weights are bit-identical with and without the callback, and whether every scale of
the engine's in the record is one that a kernel was given for that operand in that step; exits with 1 where not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import emulated_te
import torch
from bridge_on_cpu import bridge_on_cpu, importing_bridge, on_cpu

with importing_bridge():
    from megatron.bridge.training.callbacks import Callback, CallbackContext
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    try:
        from megatron_bridge import configured
    except ModuleNotFoundError:  # before 0.4 there is no such recipe of Bridge's
        from compat.bridge_0_3 import configured

from nemo_fp8_debug.adapters.megatron import FP8DebugBridgeCallback
from nemo_fp8_debug.record.reader import find_record, read_table_rows

SEQUENCE, WIDTH, VOCABULARY = 64, 64, 512
KERNEL_ROLES = {"input": "X", "weight": "W", "grad_output": "dY"}


class Watch(Callback):
    """What a run computes, and which scales its kernels are given."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.weights: list[torch.Tensor] = []
        #: (step, layer, role) -> scales
        self.scales: dict[tuple[int, str, str], set[float]] = {}

    def on_train_step_start(self, context: CallbackContext) -> None:
        emulated_te.CASTS.clear()

    def on_train_step_end(self, context: CallbackContext) -> None:
        self.steps.append((float(context.loss_dict["lm loss"]), float(context.grad_norm)))
        step = context.state.train_state.step + 1
        names = {id(m): name[name.index("decoder.") :] for name, m in context.model[0].named_modules() if "decoder." in name}
        for cast in emulated_te.CASTS:
            key = (step, names[id(cast.module)], cast.role)
            self.scales.setdefault(key, set()).add(float(cast.scale))

    def on_train_end(self, context: CallbackContext) -> None:
        self.weights = [parameter.detach().clone() for parameter in context.model[0].parameters()]


def train(folder: Path, steps: int, recipe: str, watched: bool) -> Watch:
    """A run of `pretrain`, its record in `folder`."""
    config = on_cpu(configured(str(folder), steps))
    config.mixed_precision.fp8_recipe = recipe
    config.model.hidden_size, config.model.seq_length, config.dataset.seq_length = WIDTH, SEQUENCE, SEQUENCE
    config.tokenizer.vocab_size = VOCABULARY
    config.scheduler.lr_warmup_iters, config.logger.logging_level = 2, logging.WARNING
    watch = Watch()
    ours = [FP8DebugBridgeCallback(interval=2, table_rows=0, on_error="raise")] if watched else []
    with redirect_stdout(sys.stderr), bridge_on_cpu():
        pretrain(config, forward_step, callbacks=[watch, *ours])
    return watch


def check(plain: Watch, watched: Watch, folder: Path) -> bool:
    """Print what was found; whether all is well."""
    steps = plain.steps == watched.steps
    weights = all(torch.equal(a, b) for a, b in zip(plain.weights, watched.weights, strict=True))
    metrics = read_table_rows(find_record(folder), "metrics")
    noted = read_table_rows(find_record(folder), "steps").sort("step").select("step", "loss", "grad_norm").rows()
    expected = [(number, *step) for number, step in enumerate(plain.steps, 1)]
    engine = metrics.filter(scale_source="engine")
    same = [
        row["scale"] in watched.scales.get((row["step"], row["layer"], KERNEL_ROLES[row["role"]]), ())
        for row in engine.to_dicts()
    ]
    names = ("megatron-bridge", "megatron-core")
    print("; ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    print("losses", *(f"{loss:.4f}" for loss, _ in watched.steps))
    print(f"losses and gradient norms: {'bit-identical' if steps else 'DIFFERENT'}")
    print(f"weights after {len(plain.steps)} steps: {'bit-identical' if weights else 'DIFFERENT'}")
    print(f"losses and gradient norms in the record: {'the same' if noted == expected else 'OTHERS'}")
    print(f"tensors in the record: {len(metrics)} at steps {metrics['step'].unique().sort().to_list()}")
    print(f"scales from the engine that its kernels were given: {sum(same)} of {len(same)}")
    return steps and weights and noted == expected and bool(same) and all(same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recipe", choices=("delayed", "tensorwise"), default="delayed")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        plain = train(Path(folder) / "plain", options.steps, options.recipe, watched=False)
        watched = train(Path(folder) / "watched", options.steps, options.recipe, watched=True)
        return 0 if check(plain, watched, Path(folder) / "watched") else 1


if __name__ == "__main__":
    sys.exit(main())
