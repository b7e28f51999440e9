"""Train with Accelerate and accumulated gradients: `accelerate launch recipes/accelerate_loop.py`, or `python`.

With `--float8 rowwise`, or another torchao recipe, the model's linear layers multiply in FP8. On a CPU, FP8 is emulated.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace

import torch
from accelerate import Accelerator
from plain_loop import model
from text_windows import TextWindows
from torch import nn
from torch.utils.data import DataLoader

from nemo_fp8_debug import Monitor


def accelerator_with(float8: str | None) -> Accelerator:
    """Return an Accelerator, with its torchao backend if a recipe is given. The first and the last linear layer are not
    converted.
    """
    if float8 is None:
        return Accelerator(gradient_accumulation_steps=2, cpu=True)
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    config = replace(Float8LinearConfig.from_recipe_name(float8), emulate=True)  # on a GPU, leave out emulate
    handlers = [AORecipeKwargs(config=config)]
    return Accelerator(gradient_accumulation_steps=2, cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)


def train(output: str, steps: int, interval: int, float8: str | None = None) -> None:
    accelerator = accelerator_with(float8)
    gpt = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
    data = DataLoader(TextWindows(4 * 2 * steps * accelerator.num_processes, 64), batch_size=4)
    gpt, optimizer, data = accelerator.prepare(gpt, optimizer, data)

    # Create the monitor after `prepare`, on every rank. The names of wrappers are left out of layer names.
    with closing(Monitor(gpt, output, interval=interval)) as monitor:
        step, losses = 0, []
        for batch in data:
            if not losses:
                monitor.begin_step(step)
            with accelerator.accumulate(gpt):
                loss = nn.functional.cross_entropy(gpt(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
                losses.append(loss.detach())
                monitor.watch_loss(loss)  # before Accelerate divides it, so that dY is also recorded in units of this loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(gpt.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                monitor.end_step(loss=torch.stack(losses).mean())
                step, losses = step + 1, []
    accelerator.print(f"The record is in {output}; look at it with: tensorboard --logdir {output}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/accelerate_loop")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--float8", choices=["tensorwise", "rowwise", "rowwise_with_gw_hp"])
    options = parser.parse_args()
    train(options.output, options.steps, options.interval, options.float8)
