"""A small GPT trained by real NeMo in FP8: `python recipes/nemo_gpt.py good` (or `bad`, or `twin`).

The three runs differ in one thing each: `bad` has a higher learning rate than `good`, `twin` is `bad` without FP8. On a CPU
the operands of each GEMM are quantised as the recipe says and multiplied in BF16; with `--engine te` the same recipe runs on
GPUs with Transformer Engine.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path

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
    learning_rate: float
    fp8: bool


VARIANTS = {"good": Variant(2e-3, fp8=True), "bad": Variant(1e-1, fp8=True), "twin": Variant(1e-1, fp8=False)}


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
    adam = OptimizerConfig(optimizer="adam", lr=variant.learning_rate, clip_grad=0.0, bf16=True)
    # The learning rate rises through the whole run, so that one too high takes over in mid-run.
    rising = nl.lr_scheduler.CosineAnnealingScheduler(max_steps=10 * steps, warmup_steps=steps, constant_steps=0)
    return llm.GPTModel(config, optim=nl.MegatronOptimizerModule(adam, lr_scheduler=rising), tokenizer=None)


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
