"""Trains the recipe's GPT by real NeMo with and without the callback; prints losses, weights and a recipe's round trip.

Run by test_nemo.py in a process of its own: NeMo's parallel state is global.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import nemo.lightning as nl
import nemo_checkpoint
import nemo_run
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from megatron_on_cpu import megatron_on_cpu
from nemo.collections import llm
from nemo_gpt import DELAYED, VARIANTS, Save, model
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
from page_blocks import commands, execute, find_block, parse_options
from small_models.nemo import train
from text import Text

from nemo_fp8_debug import FP8DebugCallback, FP8EmulationCallback, FP8PlanCallback
from nemo_fp8_debug.plan.plan import PLAN, Change, Plan


def rescued(folder: Path) -> dict[str, Any]:
    """A run, and what becomes of it when it goes on from its second step: as it was, otherwise, and as a rescue."""
    failing, plan = "delayed(margin=-11,amax_history_len=16)", folder / "plan.json"
    emulation = FP8EmulationCallback(failing)
    results = {"run": train(folder / "run", [emulation, Save(folder / "checkpoints", 2)])}
    checkpoint = folder / "checkpoints" / "step_2"
    results["resumed"] = train(folder / "resumed", [FP8EmulationCallback(failing)], checkpoint)
    results["current"] = train(folder / "current", [FP8EmulationCallback("current")], checkpoint)
    Plan((Change("layers.*", "current"),)).save(plan)
    os.environ[PLAN] = str(plan)
    results["rescue"] = train(folder / "rescue", [FP8EmulationCallback(failing)], checkpoint)
    del os.environ[PLAN]
    return results


def round_trip(folder: Path) -> dict[str, Any]:
    """What a launcher does with a recipe that carries the callbacks."""
    plan = str(folder / "plan.json")
    Plan((Change("layers.*", "current"),)).save(plan)
    recipe = llm.llama3_8b.pretrain_recipe(name="t", dir="unused", num_nodes=1, num_gpus_per_node=1)
    recipe.trainer.callbacks += [
        nemo_run.Config(FP8DebugCallback, interval=50, layers=["linear_fc2"], roles=["input"], recipe=DELAYED),
        nemo_run.Config(FP8EmulationCallback, recipe=DELAYED, first_layers_bf16=1, plan=plan),
        nemo_run.Config(FP8PlanCallback, plan=plan),
    ]
    serializer = ZlibJSONSerializer()
    restored = serializer.deserialize(serializer.serialize(recipe)).trainer.callbacks[-3:]
    built = [config.__fn_or_cls__(**config.__arguments__) for config in restored]
    return {"classes": [type(callback).__name__ for callback in built], "interval": restored[0].interval}


#: blocks of pages in which NeMo trains; the first one does
PAGES = ("README.md", "attach.md#nemo-2x-and-any-lightning-trainer", "index.md")


def trainer_options(folder: Path) -> dict[str, Any]:
    """What a page leaves out of a trainer of two steps."""
    return {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 2,
        "strategy": nl.MegatronStrategy(),
        "plugins": nl.MegatronMixedPrecision(precision="bf16-mixed"),
        "logger": TensorBoardLogger(folder, name="", version="a"),
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }


def blocks_of_pages(folder: Path) -> dict[str, Any]:
    """What Python of README and docs prints under NeMo, and how the options of the recipe's command are read."""
    text = Text(sequence=32, micro_batch_size=2, global_batch_size=4)
    names = {
        "nl": nl,
        "model": model(VARIANTS["reference"], 2, te=False),
        "data": text,
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for name in PAGES:
            execute(find_block("python", name), names | {"options_of": {"nl.Trainer": trainer_options(folder)}})
    recipe = llm.llama3_8b.pretrain_recipe(name="t", dir="unused", num_nodes=1, num_gpus_per_node=1)
    given = {"recipe": recipe, "run": nemo_run, "FP8DebugCallback": FP8DebugCallback}
    execute(find_block("python", "attach.md#nemo-2x-and-any-lightning-trainer, 2"), given)
    results = {"printed": printed.getvalue(), "interval": recipe.trainer.callbacks[-1].interval, "options": []}
    for words in commands(find_block("sh", "fix.md#example-of-a-rescue")):
        recipe_of = words[words.index("python") + 1 :]
        results["options"].append(parse_options(*recipe_of).run)
    return results


def precision(options: Path) -> dict[str, Any]:
    """What NeMo makes of recommended options."""
    plugin = nl.MegatronMixedPrecision(precision="bf16-mixed", **yaml.safe_load(options.read_text()))
    return {name: value for name, value in vars(plugin.dtype_config).items() if "fp8" in name or "bf16" in name}


EVERYTHING = {
    "interval": 3,
    "dump": ["layers.1.*", "output_layer"],
    "dump_min_free_bytes": 0,
    "what_if": ["current-e5m2", "delayed(margin=1)"],
    "triggers": ["loss_spike", "nonfinite", "amax/input > 0"],
    "trigger_steps": 1,
    "trigger_dump": ["layers.2.mlp.*"],
}
WATCHED: dict[str, dict[str, Any]] = {"None": {}, "1": {"interval": 1}, "10": {"interval": 10}, "everything": EVERYTHING}


def main() -> None:
    output = Path(sys.argv[1])
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    (output / "pages").mkdir()
    results: dict[str, Any] = {"round_trip": round_trip(output), "precision": precision(output / "transformer_config.yaml")}
    with megatron_on_cpu():
        results["pages"] = blocks_of_pages(output / "pages")
        for case, options in (("plain", {}), ("recompute", recompute)):
            for name, watch in WATCHED.items():
                callbacks = [FP8DebugCallback(**watch, on_error="raise", table_rows=0)] if watch else []
                callbacks.append(FP8EmulationCallback(DELAYED))
                results.setdefault(case, {})[name] = train(output / f"{case}-{name}", callbacks, **options)
        results["rescued"] = rescued(output / "rescued")
        nemo_checkpoint.save(output / "saved")
    (output / "results.json").write_text(json.dumps(results))
