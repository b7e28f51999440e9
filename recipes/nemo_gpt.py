"""A small GPT trained by real NeMo in FP8: `python recipes/nemo_gpt.py good` (or `bad`, or `twin`).

The three runs differ in one thing each: `bad` doubles `good`'s learning rate every 20 steps from the first third of the run
on, until it diverges; `twin` is `bad` without FP8. On a CPU the operands of each GEMM are quantised as the recipe says and
multiplied in BF16; with `--engine te` the same recipe runs on GPUs with Transformer Engine.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import nemo.lightning as nl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.optimizer import OptimizerConfig
from megatron_on_cpu import megatron_on_cpu
from nemo.collections import llm
from text import VOCABULARY, Text

from nemo_fp8_debug import FP8DebugCallback, FP8EmulationCallback

#: Megatron's name for an FP8 recipe with per-tensor scales from earlier steps
DELAYED = {"name": "delayed", "fp8_format": "hybrid", "amax_history_len": 16, "amax_compute_algo": "max"}


@dataclass(frozen=True)
class Variant:
    rising: bool
    fp8: bool


VARIANTS = {
    "good": Variant(rising=False, fp8=True),
    "bad": Variant(rising=True, fp8=True),
    "twin": Variant(rising=True, fp8=False),
}


class LearningRate(nl.LRSchedulerModule):
    """Warms up over 20 steps, then stays; or from a given step on doubles every 20 steps."""

    def __init__(self, rises_from: int | None) -> None:
        super().__init__()
        self.rises_from = rises_from

    def factor(self, step: int) -> float:
        rise = 0 if self.rises_from is None else max(0, step - self.rises_from) / 20
        return min(1.0, (step + 1) / 20) * 2**rise

    def scheduler(self, model: llm.GPTModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def model(variant: Variant, steps: int, te: bool) -> llm.GPTModel:
    config = llm.GPTConfig(
        num_layers=4,
        hidden_size=128,
        ffn_hidden_size=512,
        num_attention_heads=4,
        seq_length=128,
        vocab_size=VOCABULARY,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=te,
        share_embeddings_and_output_weights=False,
        use_cpu_initialization=not te,
        gradient_accumulation_fusion=te,
        masked_softmax_fusion=te,
    )
    adam = OptimizerConfig(optimizer="adam", lr=2e-3, clip_grad=1.0, bf16=True)
    learning_rate = LearningRate(steps // 3 if variant.rising else None)
    return llm.GPTModel(config, optim=nl.MegatronOptimizerModule(adam, lr_scheduler=learning_rate), tokenizer=None)


def train(name: str, output: Path, steps: int, interval: int, engine: str) -> None:
    """Run one variant; its TensorBoard events and record go to OUTPUT/NAME."""
    variant, te = VARIANTS[name], engine == "te"
    torch.manual_seed(0)
    precision = {"precision": "bf16-mixed"}
    if te and variant.fp8:
        options = {k: v for k, v in DELAYED.items() if k.startswith("amax")}
        precision |= {"fp8": "hybrid", "fp8_recipe": "delayed"} | {f"fp8_{k}": v for k, v in options.items()}
    callbacks: list[pl.Callback] = [FP8DebugCallback(interval=interval)]
    if variant.fp8 and not te:
        callbacks.append(FP8EmulationCallback(DELAYED))
    trainer = nl.Trainer(
        accelerator="gpu" if te else "cpu",
        devices=1,
        max_steps=steps,
        strategy=nl.MegatronStrategy(ckpt_async_save=False),
        plugins=nl.MegatronMixedPrecision(**precision),
        callbacks=callbacks,
        logger=TensorBoardLogger(output, name="", version=name),
        log_every_n_steps=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with contextlib.nullcontext() if te else megatron_on_cpu():
        trainer.fit(model(variant, steps, te), Text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=VARIANTS)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--engine", choices=("emulated", "te"), default="emulated", help="te: Transformer Engine on a GPU")
    arguments = parser.parse_args()
    train(arguments.run, arguments.output, arguments.steps, arguments.interval, arguments.engine)
