"""The callback under Megatron-Bridge's own CallbackManager, fired as its train() does, around real megatron-core steps.

bridge_callbacks.py and bridge_callback_events.py are megatron/bridge/training/callbacks.py of megatron-bridge 0.6.2 in two
parts, their code unchanged: all of Bridge cannot be imported without Transformer Engine.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bridge_callbacks import CallbackContext, CallbackManager, normalize_callbacks, should_fire
from text_windows import TextWindows
from torch.utils.data import DataLoader

from nemo_fp8_debug import ConfigError
from nemo_fp8_debug.adapters.megatron import FP8DebugBridgeCallback
from nemo_fp8_debug.record.reader import find_record, read_table_rows


def fire(manager: CallbackManager | None, event: str, **context: Any) -> None:
    if should_fire(manager, event):
        manager.fire(event, CallbackContext(user_state=manager.user_state, **context))


def train(folder: Path, callbacks: list[Any] | None, first: int = 0) -> tuple[list[float], list[torch.Tensor]]:
    """The events of Bridge's train(), in its order and with what it hands over; the loss of each step."""
    from megatron_lm_loop import finalize_model_grads, forward_step, get_forward_backward_func, model

    manager = normalize_callbacks(callbacks)
    gpt, losses = model(), []
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    config = SimpleNamespace(
        logger=SimpleNamespace(tensorboard_dir=str(folder)), checkpoint=SimpleNamespace(save="/not/written")
    )
    state = SimpleNamespace(cfg=config, train_state=SimpleNamespace(step=first))
    given = {"state": state, "model": [gpt], "optimizer": optimizer, "scheduler": None}
    data = iter(DataLoader(TextWindows(100, 64), batch_size=2))
    fire(manager, "on_train_start", **given)
    while state.train_state.step < first + 5:
        fire(manager, "on_train_step_start", **given)
        gpt.zero_grad_buffer()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[gpt],
            num_microbatches=2,
            seq_length=64,
            micro_batch_size=2,
            forward_only=False,
        )
        finalize_model_grads([gpt])
        for parameter in gpt.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()
        loss = torch.stack([part["lm loss"] for part in reduced]).mean()
        losses.append(loss.item())
        fire(manager, "on_train_step_end", **given, loss_dict={"lm loss": loss}, grad_norm=1.5, skipped_iter=False)
        state.train_state.step += 1
        if state.train_state.step % 2 == 0:  # as Bridge's evaluate() does behind a step that is due
            fire(manager, "on_eval_end", state=state, model=[gpt], total_loss_dict={"lm loss": loss + 1})
    fire(manager, "on_train_end", **given)
    return losses, list(gpt.parameters())


class Kept:
    """A logger that the user made, with Lightning's method."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows[step] = metrics


def watch(**options: Any) -> FP8DebugBridgeCallback:
    return FP8DebugBridgeCallback(**{"interval": 2, "table_rows": 0, "on_error": "raise", **options})


def test_losses_weights_and_steps(megatron: None, tmp_path: Path) -> None:
    losses, weights = train(tmp_path, None)
    kept = Kept()
    watched, watched_weights = train(tmp_path, [watch(loggers=[kept])])
    assert len(losses) == 5 and watched == losses
    assert [step for step, row in sorted(kept.rows.items()) if "fp8/nan_count" in row] == [2, 4]
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))
    run = find_record(tmp_path)
    assert str(run) == str(tmp_path / "fp8_debug")
    metrics = read_table_rows(run, "metrics")
    assert metrics["step"].unique().to_list() == [2, 4]  # as Bridge logs them, from 1
    assert (metrics.filter(role="input")["calls"] == 2).all()
    assert "decoder.layers.1.mlp.linear_fc2" in metrics["layer"]
    steps = read_table_rows(run, "steps")
    assert dict(zip(steps["step"], steps["loss"], strict=True)) == pytest.approx(dict(enumerate(losses, 1)))
    assert steps["grad_scale"].to_list() == [None, 0.5, None, 0.5, None]
    assert [steps[name].unique().to_list() for name in ("lr", "grad_norm", "skipped")] == [[1e-3], [1.5], [0.0]]


def test_a_resumed_run_is_another_attempt_that_goes_on_counting(megatron: None, tmp_path: Path) -> None:
    for first in (0, 3):
        train(tmp_path, [watch()], first)
    metrics = read_table_rows(find_record(tmp_path), "metrics", ["attempt", "step"]).unique().sort("step")
    assert metrics.rows() == [(0, 2), (1, 4), (1, 6), (1, 8)]


def test_configuration_errors_come_before_the_first_step(megatron: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="interval is 0"):
        FP8DebugBridgeCallback(interval=0)
    with pytest.raises(ConfigError, match="no GEMM layer matches"):
        train(tmp_path, [watch(layers=["no_such"])])


def test_the_callback_can_be_copied_and_pickled_before_the_run(megatron: None, tmp_path: Path) -> None:
    callback = watch(layers=["linear_fc2"])
    for name, copied in (("copy", copy.deepcopy(callback)), ("pickle", pickle.loads(pickle.dumps(callback)))):
        train(tmp_path / name, [copied])
        metrics = read_table_rows(find_record(tmp_path / name), "metrics")
        assert {layer.rpartition(".")[2] for layer in metrics["layer"]} == {"linear_fc2"}


def test_losses_of_evaluations(megatron: None, tmp_path: Path) -> None:
    losses, _ = train(tmp_path, [watch()])
    found = read_table_rows(find_record(tmp_path), "validation")
    assert found.select("step", "name").rows() == [(2, "lm loss"), (4, "lm loss")]
    assert found["loss"].to_list() == pytest.approx([losses[1] + 1, losses[3] + 1], rel=1e-6)
