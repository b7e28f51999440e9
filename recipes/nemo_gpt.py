"""Train a small GPT in FP8 with real NeMo: `python recipes/nemo_gpt.py baseline`, or another name in `VARIANTS`.

All runs have the same weights at the start and the same batches. On a CPU, the operands of each GEMM are quantized under the
recipe and multiplied in BF16. With `--engine te`, the same recipe runs on GPUs with Transformer Engine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Set this before importing Megatron, because compiling its small fusions takes longer than this run. On a CPU they cannot be
# compiled, because torch.compile rejects the replacements for CUDA. For a long run on a GPU, set this to 0.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import lightning.pytorch as pl
import nemo.lightning as nl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.optimizer import OptimizerConfig
from megatron_on_cpu import megatron_on_cpu
from nemo.collections import llm
from text import VOCABULARY, Text

from nemo_fp8_debug import FP8DebugCallback, FP8EmulationCallback, FP8PlanCallback

#: Megatron's delayed scaling, an FP8 recipe with per-tensor scales from earlier steps
DELAYED = {"name": "delayed", "fp8_format": "hybrid", "amax_history_len": 16, "amax_compute_algo": "max"}


#: the operand with the stuck scale, and the outlier in its amax history, as a multiple of its amax
STUCK, OUTLIER = ("decoder.layers.0.mlp.linear_fc2", "input"), 2.0**14


@dataclass(frozen=True)
class Variant:
    #: from a third of the run on, the learning rate doubles every 20 steps
    rising: bool = False
    #: from the middle of the run on, a bug in the engine keeps an outlier in the amax history of `STUCK`
    stuck: bool = False
    fp8: bool = True


VARIANTS = {
    "baseline": Variant(),
    "learning_rate": Variant(rising=True),
    "reference": Variant(rising=True, fp8=False),
    "stuck_scale": Variant(stuck=True),
    "rescued": Variant(stuck=True),  # to resume from a checkpoint of `stuck_scale` with a plan; it has the same bug
}


class LearningRate(nl.LRSchedulerModule):
    """A learning rate that warms up over 20 steps and then falls to a tenth. It can also double every 20 steps from a given
    step on.
    """

    def __init__(self, steps: int, rises_from: int | None) -> None:
        super().__init__()
        self.steps, self.rises_from = steps, rises_from

    def factor(self, step: int) -> float:
        rise = 0 if self.rises_from is None else max(0, step - self.rises_from) / 20
        return min(1.0, (step + 1) / 20) * (1 - 0.9 * min(step / self.steps, 1.0)) * 2**rise

    def scheduler(self, model: llm.GPTModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StuckScale(pl.Callback):
    """A bug in an FP8 engine: an outlier enters the amax history of one operand and stays there forever.

    From that step on, the operand's scale no longer follows its values.
    """

    def __init__(self, emulation: FP8EmulationCallback, step: int) -> None:
        self.emulation, self.step = emulation, step
        self.scale: torch.Tensor | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step < self.step:
            return
        for state in self.emulation.state_dict()["states"]:
            if STUCK in state["columns"]:  # false if a plan changes the scaling of this operand
                scale = state["scale"][state["columns"].index(STUCK)]
                self.scale = scale / OUTLIER if self.scale is None else self.scale
                scale.copy_(self.scale)


def model(variant: Variant, steps: int, te: bool) -> llm.GPTModel:
    config = llm.GPTConfig(
        num_layers=4,
        hidden_size=128,
        ffn_hidden_size=768,
        num_attention_heads=4,
        seq_length=128,
        vocab_size=VOCABULARY,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        position_embedding_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=te,
        share_embeddings_and_output_weights=False,
        use_cpu_initialization=not te,
        gradient_accumulation_fusion=te,
        masked_softmax_fusion=te,
    )
    adam = OptimizerConfig(optimizer="adam", lr=2e-3, adam_beta2=0.95, clip_grad=1.0, bf16=True)
    learning_rate = LearningRate(steps, steps // 3 if variant.rising else None)
    return llm.GPTModel(config, optim=nl.MegatronOptimizerModule(adam, lr_scheduler=learning_rate), tokenizer=None)


class Save(pl.Callback):
    """A callback that saves checkpoints `FOLDER/step_N`."""

    def __init__(self, folder: Path, interval: int) -> None:
        self.folder, self.interval = folder, interval

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        # Save between steps. If a checkpoint is saved when a batch ends, Lightning 2.4 resumes one step too early.
        if trainer.global_step and trainer.global_step % self.interval == 0:
            trainer.save_checkpoint(self.folder / f"step_{trainer.global_step}")


def train(
    name: str,
    output: Path,
    steps: int,
    interval: int,
    engine: str = "emulated",
    recipe: str | dict[str, Any] = DELAYED,
    plan: str | None = None,
    save_interval: int = 0,
    resume: str | None = None,
) -> None:
    """Train one variant. TensorBoard events, record and checkpoints go to OUTPUT/NAME.

    Args:
        recipe: recipe of emulated FP8.
        plan: file with a plan that changes the recipe.
        save_interval: steps between checkpoints, or 0 for none.
        resume: a checkpoint to continue from.
    """
    variant, te = VARIANTS[name], engine == "te"
    torch.manual_seed(0)
    precision = {"precision": "bf16-mixed"}
    if te and variant.fp8:
        options = {k: v for k, v in DELAYED.items() if k.startswith("amax")}
        precision |= {"fp8": "hybrid", "fp8_recipe": "delayed"} | {f"fp8_{k}": v for k, v in options.items()}
    callbacks: list[pl.Callback] = [FP8DebugCallback(interval=interval)]
    if variant.fp8 and not te:
        emulation = FP8EmulationCallback(recipe, plan=plan)
        callbacks += [emulation, *([StuckScale(emulation, steps // 2)] if variant.stuck else [])]
    elif plan:
        callbacks.append(FP8PlanCallback(plan))
    if save_interval:
        callbacks.append(Save(output / name / "checkpoints", save_interval))
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
        trainer.fit(model(variant, steps, te), Text(), ckpt_path=resume)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=VARIANTS)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--engine", choices=("emulated", "te"), default="emulated", help="te: Transformer Engine on a GPU")
    parser.add_argument("--recipe", default=DELAYED, help="recipe of emulated FP8, for example 'delayed(margin=1)'")
    parser.add_argument("--plan", help="file with a plan, as written by `nemo-fp8-debug recommend`")
    parser.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints")
    parser.add_argument("--resume", help="checkpoint to continue from")
    arguments = vars(parser.parse_args())
    train(arguments.pop("run"), **arguments)
