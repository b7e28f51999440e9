"""Setups of plain torch on one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import Emulation, Monitor
from safety_net.models import GPT, add_low_rank, build_gpt, compute_loss, draw_tokens
from safety_net.records.setup import EVERYTHING, QUIET, STATES, WHAT_IF, Setup, adam, stepper, watch


def _train_plain(folder: Path, rank: int, world: int) -> None:
    model = build_gpt().bfloat16()
    options = EVERYTHING | {"interval": 2, "dump": ["layers.0.*"], "max_tags": 20}
    watch(model, folder, 5, stepper(model, adam(model)), **options)


def _train_autocast(folder: Path, rank: int, world: int) -> None:
    model = build_gpt()
    watch(model, folder, 3, stepper(model, adam(model), dtype=torch.bfloat16), **EVERYTHING)


def _train_some_layers(folder: Path, rank: int, world: int) -> None:
    """Only some layers and roles, under a recipe that the run does not use, within a window of steps."""
    model = build_gpt()
    options = {
        "layers": ["layers.1.*", "re:output_\\w+"],
        "roles": ["input", "grad_output"],
        "recipe": {"name": "delayed", "amax_history_len": 3, "margin": 1},
        "first_step": 2,
        "last_step": 7,
        "interval": 2,
        "histogram_interval": 4,
        "dump": ["fc2"],
        "dump_max_bytes": 60_000,
    }
    watch(model, folder, 10, stepper(model, adam(model)), **options)


def _train_with_recipe(recipe: str, folder: Path, rank: int, world: int) -> None:
    model = build_gpt().bfloat16()
    watch(model, folder, 2, stepper(model, adam(model)), recipe=recipe, **(EVERYTHING | {"what_if": ("current",)}))


def _train_low_rank(folder: Path, rank: int, world: int) -> None:
    model = add_low_rank(build_gpt()).bfloat16()
    watch(model, folder, 3, stepper(model, adam(model)), **EVERYTHING)


def _train_experts(folder: Path, rank: int, world: int) -> None:
    model = build_gpt(num_experts=4).bfloat16()
    watch(model, folder, 3, stepper(model, adam(model)), dump=["experts"], **EVERYTHING)


def _train_checkpointed(reentrant: bool, folder: Path, rank: int, world: int) -> None:
    model = build_gpt(dropout=0.1).bfloat16()
    model.checkpoint = partial(checkpoint, use_reentrant=reentrant)
    watch(model, folder, 3, stepper(model, adam(model)), **EVERYTHING)


def _train_float16(folder: Path, rank: int, world: int) -> None:
    """Under a gradient scaler that first skips steps."""
    model = build_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)

    def train_step(step: int) -> dict[str, Any]:
        tokens, labels = draw_tokens(step)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = compute_loss(model(tokens), labels)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return {"loss": loss.detach(), "loss_scale": before, "skipped": int(scaler.get_scale() < before)}

    watch(model, folder, 6, train_step, **(EVERYTHING | {"states": ("weight_gradient", "first_moment", "update")}))


def _train_emulated(folder: Path, rank: int, world: int) -> None:
    model = build_gpt().bfloat16()
    emulation = Emulation(model, "delayed", ["layers.*"])
    emulation.attach()
    watch(model, folder, 4, stepper(model, adam(model)), **EVERYTHING)


def _train_compiled(folder: Path, rank: int, world: int) -> None:
    model = build_gpt().bfloat16()
    model.layers[0].compile(backend="eager")
    watch(model, folder, 3, stepper(model, adam(model)), eager=True, what_if=["mxfp8"], states=STATES)


def _small_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).bfloat16()


def _train_triggered(folder: Path, rank: int, world: int) -> None:
    """A loss that spikes at step 19, and a NaN in an input at step 27."""
    model = _small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train_step(step: int) -> dict[str, Any]:
        x = torch.randn(16, 32).bfloat16()
        x = x * 100 if step == 19 else x
        if step == 27:
            x[3, 5] = torch.nan
        loss = model(x).float().square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach(), "grad_norm": norm, "skipped": int(not norm.isfinite())}

    triggers = ["loss_spike", "nonfinite", "early_warning", "outlier_log2/input > 9"]
    watch(
        model, folder, 32, train_step, interval=10, triggers=triggers, trigger_steps=2, trigger_dump=["*"], what_if=WHAT_IF
    )


def _train_controlled(folder: Path, rank: int, world: int) -> None:
    """A control file that comes at step 3, and evaluations."""
    model = build_gpt()
    train_step = stepper(model, adam(model))
    monitor = Monitor(model, str(folder), **(QUIET | {"interval": 4}))
    monitor.expect_steps(0, 11)
    for number in range(12):
        if number == 3:
            (folder / "control.yaml").write_text("dump: [layers.1.fc1]\nsteps: 3\n")
        with monitor.step(number) as report:
            report(**train_step(number))
        if number % 5 == 4:
            with torch.no_grad():
                tokens, labels = draw_tokens(10_000)
                monitor.report_validation(number, val_loss=compute_loss(model(tokens), labels))
    monitor.close()


def _train_twice(folder: Path, rank: int, world: int) -> None:
    """A run that is resumed, so that its record has two attempts."""
    model = build_gpt()
    train_step = stepper(model, adam(model))
    for first, last in ((0, 4), (2, 7)):
        monitor = Monitor(model, str(folder), **(QUIET | {"what_if": ["mxfp8"], "dump": ["layers.0.fc2"]}))
        for number in range(first, last):
            with monitor.step(number) as report:
                report(**train_step(number))
        monitor.close()


class _Inside(nn.Module):
    """Products of parameters inside of forwards, and torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.weights = nn.Parameter(torch.randn(2, 16, 16) * 0.1)
        self.projection = nn.Parameter(torch.randn(32, 32) * 0.1)
        self.norm, self.head = nn.RMSNorm(32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), x, x, need_weights=False)[0]
        parts = x.unflatten(-1, (2, -1)).flatten(0, 1).transpose(0, 1)
        x = x + torch.bmm(parts, self.weights).transpose(0, 1).reshape(x.shape)
        y: torch.Tensor = self.head(torch.nn.functional.linear(x, self.projection))
        return y


def _train_inside(folder: Path, rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = _Inside().bfloat16()
    optimizer = adam(model)

    def train_step(step: int) -> dict[str, Any]:
        loss = model(torch.randn(4, 16, 32).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}

    watch(model, folder, 3, train_step, **EVERYTHING)


def _train_many_steps(folder: Path, rank: int, world: int) -> None:
    """So many samples that parts of the record are merged."""
    model = _small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train_step(step: int) -> dict[str, Any]:
        loss = model(torch.randn(16, 32).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach()}

    watch(model, folder, 70, train_step, what_if=["mxfp8"])


def _share_weights(model: GPT) -> GPT:
    model.output_layer.weight = model.embedding.weight
    return model


def _train_shared(folder: Path, rank: int, world: int) -> None:
    model = _share_weights(build_gpt()).bfloat16()
    watch(model, folder, 3, stepper(model, adam(model)), **EVERYTHING)


SETUPS = [
    Setup("plain", _train_plain),
    Setup("autocast", _train_autocast),
    Setup("some-layers", _train_some_layers),
    Setup("recipe-mxfp8", partial(_train_with_recipe, "mxfp8")),
    Setup("recipe-nvfp4", partial(_train_with_recipe, "nvfp4")),
    Setup("low-rank", _train_low_rank),
    Setup("experts", _train_experts),
    Setup("checkpoint-reentrant", partial(_train_checkpointed, True)),
    Setup("checkpoint", partial(_train_checkpointed, False)),
    Setup("float16", _train_float16),
    Setup("emulated", _train_emulated),
    Setup("compiled", _train_compiled),
    Setup("triggered", _train_triggered),
    Setup("controlled", _train_controlled),
    Setup("resumed", _train_twice),
    Setup("inside-forwards", _train_inside),
    Setup("merged", _train_many_steps),
    Setup("shared-weights", _train_shared),
]
