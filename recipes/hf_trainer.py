"""Train a small Llama with Hugging Face's Trainer: `python recipes/hf_trainer.py`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from text_windows import VOCABULARY, TextWindows
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from nemo_fp8_debug import FP8DebugTrainerCallback


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def collate(windows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    tokens = torch.stack([window["tokens"] for window in windows])
    return {"input_ids": tokens, "labels": tokens}  # the model shifts the labels


def train(output: str, steps: int, interval: int) -> None:
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        logging_steps=interval,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        use_cpu=True,
    )
    callback = FP8DebugTrainerCallback(interval=interval)
    Trainer(model(), arguments, data_collator=collate, train_dataset=TextWindows(10_000, 64), callbacks=[callback]).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/hf_trainer")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=10)
    options = parser.parse_args()
    train(options.output, options.steps, options.interval)
    print(f"The record is in {options.output}/fp8_debug; look at it with: tensorboard --logdir {options.output}")
