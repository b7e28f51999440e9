"""What the Python of each section of the pages takes as given: real models, data, trainers and records."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from fault_injection.records import read_run, truths
from page_blocks import Block, execute
from recommendations import BF16, recommendation, run
from samples import COLUMNS
from small_models.lightning import Module, fit
from torch import nn
from torch.utils.data import DataLoader

import nemo_fp8_debug
from nemo_fp8_debug import Monitor
from nemo_fp8_debug.analysis.recommendation.snippets import write_snippets
from nemo_fp8_debug.analysis.recommendation.snippets.megatron import make_module_recipes_snippet
from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.numerics.recipe import Recipe, parse_recipe
from nemo_fp8_debug.record.schema import STATUS
from nemo_fp8_debug.record.writer import RunRecordWriter

LAYERS, WIDTH = 4, 16
Names = dict[str, Any]


def given(name: str) -> Names:
    """Return what a block takes as given, and the public names of the package, which pages import once."""
    names = NAMES.get(name, dict)()
    names |= {name: getattr(nemo_fp8_debug, name) for name in nemo_fp8_debug.__all__ if not name.startswith("_")}
    return names


class Layers(nn.Module):
    """Linear layers named as Megatron names them."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.ModuleDict({"mlp": nn.ModuleDict({"linear_fc2": nn.Linear(WIDTH, WIDTH)})}) for _ in range(LAYERS)]
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(blocks)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.decoder["layers"]:
            x = block["mlp"]["linear_fc2"](x)
        return x


def record_run(folder: Path, steps: Sequence[int] = range(12), factor: float = 1.0, seed: int = 0, **options: Any) -> None:
    """Record a run of `Layers` under delayed scaling, whose inputs shrink by a factor in its second half."""
    torch.manual_seed(seed)
    model = Layers().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"interval": 1, "recipe": "delayed(amax_history_len=4)", "table_rows": 0, "dump_min_free_bytes": 0} | options
    with contextlib.closing(Monitor(model, str(folder / "fp8_debug"), on_error="raise", **options)) as monitor:
        for step in steps:
            with monitor.step(step) as report:
                x = torch.randn(8, WIDTH, dtype=torch.bfloat16) * (factor if step >= len(steps) / 2 else 1.0)
                loss = model(x).float().square().mean() + 1
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                report(loss=loss)


def plain_loop() -> Names:
    """A small GPT, its batches, and a step of it."""
    from plain_loop import model
    from text_windows import TextWindows

    gpt = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["tokens"]).float().flatten(0, 1), batch["labels"].flatten())

    def train_step(batch: Any) -> torch.Tensor:
        loss = loss_of(gpt, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    data = list(DataLoader(TextWindows(8, 32), batch_size=2))
    return {
        "model": gpt,
        "optimizer": optimizer,
        "data": data,
        "batch": data[0],
        "train_step": train_step,
        "loss_of": loss_of,
    }


def scaled_loop() -> Names:
    """A loop with a GradScaler, at a step that a monitor samples."""
    names = plain_loop()
    monitor = Monitor(names["model"], "runs/scaled", table_rows=0, on_error="raise")
    return names | {"scaler": torch.amp.GradScaler("cpu"), "monitor": monitor, "step": 0}


def transformers_trainer() -> Names:
    from hf_trainer import collate, model
    from text_windows import TextWindows
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments("runs/hf", max_steps=2, report_to="none", use_cpu=True, remove_unused_columns=False)
    options = {"model": model(), "args": arguments, "data_collator": collate, "train_dataset": TextWindows(64, 32)}
    return {"Trainer": Trainer, "options_of": {"Trainer": options}}


def accelerate_loop() -> Names:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    names = plain_loop()
    model, optimizer = accelerator.prepare(names["model"], names["optimizer"])

    def train_step(batch: Any) -> torch.Tensor:
        loss = names["loss_of"](model, batch)
        names["monitor"].watch_loss(loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    names |= {"accelerator": accelerator, "model": model, "train_step": train_step}
    return names


def deepspeed_zero() -> Names:
    """For a process of its own."""
    import deepspeed
    from deepspeed_zero import configuration

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(verbose=False)
    names = plain_loop()

    class WithLoss(nn.Module):
        """A model that returns its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.gpt = names["model"]

        def forward(self, batch: Any) -> torch.Tensor:
            return names["loss_of"](self.gpt, batch)

    return names | {"deepspeed": deepspeed, "torch": torch, "model": WithLoss(), "config": configuration(3)}


def bridge() -> Names:
    """Bridge's `pretrain`, by the events of its own CallbackManager around real steps of Megatron-core."""
    sys.path.append(str(Path(__file__).parent / "adapters"))
    from test_megatron_bridge import train

    def pretrain(config: Path, forward_step: None, callbacks: list[Any]) -> None:
        train(config, callbacks)

    return {"pretrain": pretrain, "config": Path("runs/bridge"), "forward_step": None}


def megatron_lm() -> Names:
    """Megatron-LM's `pretrain`: a loop over the schedules of Megatron-core, which call the script's `forward_step`."""
    from megatron.core.enums import ModelType
    from megatron_lm_loop import finalize_model_grads, forward_step, get_forward_backward_func, model
    from text_windows import TextWindows

    args = SimpleNamespace(curr_iteration=0, tensorboard_dir="runs/megatron_lm", save=None)
    training = types.ModuleType("megatron.training")
    training.get_args = lambda: args  # type: ignore[attr-defined]
    sys.modules["megatron.training"] = training

    def pretrain(data: Any, model: Callable[[], nn.Module], model_type: ModelType, forward_step: Any) -> None:
        gpt, batches = model(), iter(DataLoader(data(), batch_size=2))
        for args.curr_iteration in range(2):
            gpt.zero_grad_buffer()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=gpt,
                num_microbatches=2,
                seq_length=64,
                micro_batch_size=2,
                forward_only=False,
            )
            finalize_model_grads([gpt])

    providers = {"model_provider": model, "train_valid_test_datasets_provider": partial(TextWindows, 8, 64)}
    return providers | {"pretrain": pretrain, "ModelType": ModelType, "forward_step": forward_step}


def torchtitan() -> Names:
    """A trainer with the attributes of torchtitan's, which runs in scripts/validation/titan."""
    names = plain_loop()

    class Trainer:
        def __init__(self, config: SimpleNamespace) -> None:
            self.model_parts, self.step = [names["model"]], 1

        def train_step(self, data_iterator: Iterator[Any]) -> None:
            names["train_step"](next(data_iterator))

        def close(self) -> None:
            pass

    return names | {"Trainer": Trainer}


def monitor_experts() -> None:
    """Train a small GptOss, of which a monitor of its attention leaves most out."""
    from ledger.ledger_models import gpt_oss, loss_of_tokens

    model = gpt_oss()
    monitor = Monitor(model, "runs/gpt_oss", layers=["self_attn.*", "lm_head"], table_rows=4, on_error="raise")
    with contextlib.closing(monitor), monitor.step(0):
        loss_of_tokens(model).backward()


def megatron_modules() -> Names:
    """The file of a recommendation for Megatron."""
    file = make_module_recipes_snippet(recommendation(run(), {("decoder.layers.1.mlp.linear_fc2", "input"): BF16}))
    Path("fix").mkdir()
    Path("fix", file.name).write_text(file.text)  # type: ignore[union-attr]
    return {"config": SimpleNamespace(model=SimpleNamespace())}


def torchao_file() -> Names:
    """The file of a recommendation for a run of torchao."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def linear() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    model = convert_to_float8_training(linear(), config=config)
    monitor = Monitor(model, "runs/torchao", interval=1, table_rows=0, on_error="raise")
    with contextlib.closing(monitor), monitor.step(0):
        model(torch.ones(16, 32, dtype=torch.bfloat16)).sum().backward()
    found = nemo_fp8_debug.recommend("runs/torchao", operands=[("1", "input")], budget=nemo_fp8_debug.Budget(0.0, 0.0, 0.0))
    write_snippets(found, Path("fix"))
    sys.path.append("fix")
    return {"model": linear()}


#: what blocks take as given, by name; where there is no entry, the package's names and `runs/` of `make_runs` will do
NAMES: dict[str, Callable[[], Names]] = {
    "attach.md#hugging-face-trainer": transformers_trainer,
    "attach.md#accelerate": accelerate_loop,
    "attach.md#deepspeed": deepspeed_zero,
    "attach.md#megatron-bridge": bridge,
    "attach.md#megatron-lm": megatron_lm,
    "attach.md#any-other-training-loop": plain_loop,
    "attach.md#any-other-training-loop, 2": scaled_loop,
    "attach.md#torchao": plain_loop,
    "attach.md#torchtitan": torchtitan,
    "commands.md#emulate-fp8, 2": lambda: plain_loop() | {"checkpoint": {}},
    "fix.md#megatron-bridge": megatron_modules,
    "fix.md#torchao": torchao_file,
    "loggers.md": plain_loop,
}


#: what to do with the names that a block leaves behind
CHECKS: dict[str, Callable[[Names], None]] = {
    "attach.md#hugging-face-trainer": lambda names: names["trainer"].train(),
    "attach.md#torchao": lambda names: names["monitor"].close(),
    "attach.md#torchtitan": lambda names: train_titan(names),
    "commands.md#dump-tensors, 2": lambda names: require(set(names["tensors"]) == {"value", "codes", "scale"}),
    "commands.md#emulate-fp8, 2": lambda names: require(bool(names["checkpoint"]["fp8"])),
    "fix.md#megatron-bridge": lambda names: require(bool(names["config"].model.quant_recipe.matchers)),
    "fix.md#torchao": lambda names: require("Float8Linear" in str(names["model"])),
}


#: what stands for the reader's own cluster and bucket, and for the interval of a run of many steps
STAND_INS = {"tcp://scheduler:8786": "dask", "s3://": "", "interval=100": "interval=1"}


def run_block(block: Block) -> None:
    """Run a block of Python, and use what it is about: callbacks train, and a recipe is read."""
    for told, stand_in in STAND_INS.items():
        block = replace(block, text=block.text.replace(told, stand_in))
    names = given(block.name)
    value = execute(block, names)
    value = names.get("callbacks", value)
    if isinstance(value, dict):
        require(isinstance(parse_recipe(value), Recipe))
    callbacks = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, pl.Callback)]
    if callbacks:
        fit(Path("runs/lightning"), callbacks, batches=2, module=Trained())
    CHECKS.get(block.name, lambda names: None)(names)


class Trained(Module):
    """`Layers` under Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch.repeat(1, WIDTH // 4)).square().mean()


def require(condition: bool) -> None:
    assert condition


def train_titan(names: Names) -> None:
    """Train a step by the class of the page."""
    trainer = names["MonitoredTrainer"](SimpleNamespace(dump_folder="runs/titan"))
    trainer.train_step(iter(names["data"]))
    trainer.close()
    require(not nemo_fp8_debug.read_record("runs/titan", "metrics").is_empty())


def make_runs(folder: Path) -> None:
    """Record `runs/` as pages name them: several good ones, `bad`, whose operands shrink, and `a` with all tables."""
    for seed, name in enumerate(("baseline", "bad_in_bf16", "seed_1", "seed_2", "seed_3")):
        record_run(folder / name, seed=seed)
    for seed, name in enumerate(("bad", "bad1", "bad2")):
        record_run(folder / name, seed=seed, factor=1e-4, dump=["layers.*"] if name == "bad" else [])
    extra: dict[str, Any] = {"states": ("first_moment",), "what_if": ["current-e4m3"], "output_rows": 4, "verify_rows": 4}
    record_run(folder / "a", dump=["layers.3.*"], **extra)


def go_on(folder: Path) -> None:
    """Have a record say that its run goes on."""
    status = folder / STATUS
    status.write_text(json.dumps(json.loads(status.read_text()) | {"ended": None}))


def write_benchmark_runs(folder: Path, names: dict[str, tuple[str, str]]) -> None:
    """Write clean runs of the benchmark, by part and name, as records."""
    stored = {(told["part"], told["name"]): told for told in truths_of({part for part, _ in names.values()})}
    for name, key in names.items():
        recorded = read_run(stored[key], interval=20)
        record, metrics = RunRecordWriter(folder / name / "fp8_debug"), recorded.metrics.read_all_rows()
        record.open(recorded.fingerprint)
        for step in recorded.metrics.steps.tolist():
            rows = metrics.filter(step=step)
            record.record(Sample(step, {"metrics": {column: rows[column].to_list() for column in COLUMNS}}, {}))
        record.record_steps(
            {row["step"]: {"loss": row["loss"], "lr": row["lr"]} for row in recorded.steps.iter_rows(named=True)}
        )
        record.close()


def truths_of(parts: set[str]) -> Iterator[Names]:
    for told in truths("all"):
        if told["part"] in parts:
            yield told
        elif told["part"] > max(parts):
            return
