"""Reports that need a host of their own: the Hugging Face Trainer, two processes, or Transformer Engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import nn
from torch.utils.data import Dataset

from bug_reports.model import GPT, VOCABULARY, Data
from bug_reports.report import Answer, register
from bug_reports.training import Training


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The data of a training as the Trainer reads it."""

    def __init__(self, order: int, rows: int) -> None:
        self.data, self.rows = Data(order), rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens, _ = self.data.draw(number, 1)
        return {"input_ids": tokens[0], "labels": tokens[0]}


class TrainerRun(Training):
    """A tiny Llama under the Hugging Face Trainer."""

    steps, interval, recipe = 100, 10, ""

    def build_model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(self.seed)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, max_position_embeddings=64, **shape)
        )

    def list_arguments(self) -> dict[str, Any]:
        """Return arguments of the Trainer beyond the usual ones."""
        return {}

    def run(self, folder: Path, steps: int | None = None) -> list[float]:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        from nemo_fp8_debug import FP8DebugTrainerCallback

        training = self
        last = self.steps if steps is None else steps

        class Losses(TrainerCallback):
            """Count steps and keep what the log says of the loss."""

            def on_step_begin(self, *positional: Any, **others: Any) -> None:
                training.step += 1

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
                if "loss" in (logs or {}):
                    training.losses.append(float(logs["loss"]))

        shutil.rmtree(folder, ignore_errors=True)
        self.step = -1
        self.model = self.build_model()
        self.prepare_run()
        arguments = TrainingArguments(
            str(folder),
            max_steps=last,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
            **self.list_arguments(),
        )
        watch = FP8DebugTrainerCallback(interval=self.interval, table_rows=0)
        rows = Rows(3 + self.data.order, last * 16)
        Trainer(self.model, arguments, train_dataset=rows, callbacks=[watch, Losses()]).train()
        return self.losses


@register(
    "hiyouga/LlamaFactory/issues/9500 axolotl-ai-cloud/axolotl/issues/3323 huggingface/trl/issues/3860",
    "2025-12",
    "FP8 is requested, but the run silently trains in BF16.",
    "an option has no effect",
    Answer(
        "Nothing is quantized: the run is in BF16.",
        ("none", "software", "changed_recipe"),
        needs_tensor=False,
        steps=None,
        cannot_tell="no operand is quantized, so there is nothing to judge",
    ),
    "none",
    new=False,
)
class Fp8FlagWithoutEffect(TrainerRun):
    """The good run really is in FP8 (torchao, emulated)."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if not self.faulty:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig(emulate=True)
            convert_to_float8_training(model, module_filter_fn=lambda m, name: name != "lm_head", config=config)
        return model

    def list_arguments(self) -> dict[str, Any]:
        return {"bf16": self.faulty}

    def run(self, folder: Path, steps: int | None = None) -> list[float]:
        before = os.environ.get("ACCELERATE_MIXED_PRECISION")
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
        try:
            return super().run(folder, steps)
        finally:
            if before is None:
                os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
            else:
                os.environ["ACCELERATE_MIXED_PRECISION"] = before


@register(
    "huggingface/transformers/pull/48205",
    "2026-08",
    "Rows behind the last expert's tokens are uninitialized: gradients become NaN, and the log shows loss 0.",
    "NaN is hidden by the filter of a log",
    Answer(
        "dY of layers.1.mlp.gate_proj is NaN, from step 39 to 41; the log shows a loss of 0.",
        ("nonfinite",),
        ("*layers.1.mlp.gate_proj dY", "*layers.1.mlp.gate_proj dW"),
        steps=(30, 41),
    ),
    "harmful",
    new=False,
)
class NanHiddenByTrainer(TrainerRun):
    """From the 40th step on one gradient behind the activation is zero times infinity."""

    since = 39

    def prepare_run(self) -> None:
        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            if self.acts:
                gradient = gradient.clone()
                gradient.view(-1)[7] = 0.0 * float("inf")
            return gradient

        def watch_output(module: Any, inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(spoil)

        self.model.model.layers[1].mlp.act_fn.register_forward_hook(watch_output)


class Elsewhere(Training):
    """A run in other processes, because this one cannot have their ranks or their stand-in for a GPU."""

    rank = 0

    def launch(self) -> list[str]:
        """Return what starts the processes, after the interpreter."""
        return []

    def run_inside(self, folder: Path, steps: int) -> None:
        """Train in one of the processes."""
        raise NotImplementedError

    def run(self, folder: Path, steps: int | None = None) -> list[float]:
        last = self.steps if steps is None else steps
        shutil.rmtree(folder, ignore_errors=True)
        losses = folder.with_name(f"{folder.name}.losses.json")
        losses.parent.mkdir(parents=True, exist_ok=True)
        options = [type(self).__name__, str(folder), str(losses)]
        options += map(str, (int(self.faulty), self.seed, self.data.order, last))
        # Ranks of one machine meet on its loopback interface; Transformer Engine lies beside the other packages.
        paths = os.pathsep.join([*filter(None, sys.path), str(Path(sys.prefix) / "te")])
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
        words = [sys.executable, "-W", "ignore", *self.launch(), "-m", "bug_reports.hosts", *options]
        subprocess.run(words, check=True, env=environment)
        self.losses = json.loads(losses.read_text())
        losses.unlink()
        return self.losses


@register(
    "deepspeedai/DeepSpeed/pull/7985",
    "2026-04",
    "BF16 with ZeRO-1 adds the last micro-batch's gradient after the all-reduce, so ranks drift apart.",
    "the last micro-batch is not reduced",
    Answer(
        "dW of the last micro-batch is not reduced, from step 40: weights of the two ranks differ.",
        ("replicas", "wrong_reduction"),
        ("* dW", "* W"),
        needs_tensor=False,
        steps=(36, 50),
    ),
    "harmful",
    new=False,
)
class LastMicroBatchNotReduced(Elsewhere):
    """Two processes. `replicas` is on because the answer is about copies."""

    steps, micro_batches, recipe, since, clip = 120, 2, "", 40, 1.0
    monitor_options: ClassVar[dict[str, Any]] = {"replicas": True}

    def launch(self) -> list[str]:
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def run_inside(self, folder: Path, steps: int) -> None:
        torch.distributed.init_process_group("gloo")
        self.rank = torch.distributed.get_rank()
        self.attach()
        self.train(folder, 0, steps)
        torch.distributed.destroy_process_group()

    def draw_batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().draw_batch(2 * number + self.rank)

    def build_model(self) -> nn.Module:
        return GPT(self.seed)

    def backpropagate(self, loss: torch.Tensor) -> None:
        if self.acts and self.micro_batch == 1:
            self.reduce_gradients()  # too early: what comes now is this rank's alone
        super().backpropagate(loss)

    def finish_backward(self) -> None:
        if not self.acts:
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Average gradients over ranks."""
        for parameter in self.model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad.div_(2)


@register(
    "NVIDIA/NeMo/blob/a9a2b2ea8f298ad335f7a6c3a97fbf1b4bb0b30d/nemo/collections/llm/peft/lora.py",
    "2026-11",
    "NeMo's LoRA layer adds to the product, which a check of products must not report as wrong.",
    "a healthy layer adds to its product",
    Answer("Nothing is wrong: the layer adds the product of its adapter.", ("none",), steps=None),
    "none",
    new=False,
)
class LoraOnTransformerEngine(Elsewhere):
    """A subclass of Transformer Engine's Linear that returns the product and more. Both runs are healthy."""

    monitor_options: ClassVar[dict[str, Any]] = {"verify_rows": 64}
    recipe, steps, batch_size = "", 60, 4

    def run_inside(self, folder: Path, steps: int) -> None:
        from emulated_te import te

        self.engine = te
        self.attach()
        self.train(folder, 0, steps)

    def build_model(self) -> nn.Module:
        engine = self.engine

        class AddingLinear(engine.Linear):
            """A linear layer that adds the product of an adapter."""

            def __init__(self, inputs: int, outputs: int) -> None:
                super().__init__(inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cpu")
                self.a = nn.Parameter(torch.randn(8, inputs).bfloat16() / 8)
                self.b = nn.Parameter(torch.randn(outputs, 8).bfloat16() / 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                output: torch.Tensor = super().forward(x) + x @ self.a.t() @ self.b.t()
                return output

        return GPT(self.seed, linear=AddingLinear).bfloat16()

    def compute_loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from transformer_engine.common.recipe import Float8CurrentScaling

        with self.engine.autocast(enabled=True, recipe=Float8CurrentScaling()):
            return super().compute_loss(tokens, labels)


def main() -> None:
    """Train in one of the processes of a run."""
    name, folder, losses, faulty, seed, order, steps = sys.argv[1:]
    kind = {"LastMicroBatchNotReduced": LastMicroBatchNotReduced, "LoraOnTransformerEngine": LoraOnTransformerEngine}[name]
    training = kind(bool(int(faulty)), int(seed), int(order))
    training.run_inside(Path(folder), int(steps))
    if training.rank == 0:
        Path(losses).write_text(json.dumps(training.losses))


if __name__ == "__main__":
    main()
