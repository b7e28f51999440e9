"""A small Llama and real text under Hugging Face's Trainer, which keeps what each of its batches cost.

`hf_run.py FOLDER`: breaks off at step 4 in a process, then trains without and with the callback in two.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from hf_trainer import collate, model
from processes import in_ranks, in_turn
from text_windows import TextWindows
from transformers import Trainer, TrainerCallback, TrainingArguments

from nemo_fp8_debug.adapters.transformers import FP8DebugTrainerCallback


class Watching(Trainer):
    """Keeps what it adds to its own loss, by the step that it logs it under."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: dict[int, float] = defaultdict(float)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses[self.state.global_step + 1] += loss.item()
        return loss


def build(
    folder: Path, callbacks: list[TrainerCallback], accumulate: int = 1, kind: type[Trainer] = Watching, **options: Any
) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 6,
        "gradient_accumulation_steps": accumulate,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    text = TextWindows(100, 16)
    return kind(
        model(),
        TrainingArguments(output_dir=str(folder), **{**settings, **options}),
        data_collator=collate,
        train_dataset=text,
        eval_dataset=torch.utils.data.Subset(text, range(4)),
        callbacks=callbacks,
    )


def weights(trainer: Trainer) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())).hexdigest()


class Fails(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("the user's own")


def fails(folder: str) -> None:
    trainer = build(Path(folder), [FP8DebugTrainerCallback(interval=2, table_rows=0), Fails()], max_steps=10)
    try:
        trainer.train()
    except RuntimeError as error:
        (Path(folder) / "error").write_text(str(error))
        raise


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    for name in ("plain", "watched"):
        callbacks = [FP8DebugTrainerCallback(interval=2, table_rows=0)] if name == "watched" else []
        trainer = build(folder / name, callbacks, accumulate=2)
        trainer.train()
        results[name] = {"losses": trainer.losses, "weights": weights(trainer)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "statuses.json").write_text(json.dumps(in_turn(fails, [str(folder / "failed")])))
    in_ranks(2, main, folder)
