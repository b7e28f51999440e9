"""The recipes run; a `forward_step` as Megatron-LM's pretrain() calls it."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from long import long_but
from processes import finished, run_script
from text_windows import VOCABULARY

from nemo_fp8_debug import ConfigError, FP8DebugWarning
from nemo_fp8_debug.adapters.megatron import FP8DebugForwardStep
from nemo_fp8_debug.record.reader import find_record, read_table_rows

RECIPES = Path(__file__).parents[2] / "recipes"
#: the loss of a model that has learned nothing: all tokens are as likely
UNTRAINED = math.log(VOCABULARY)


# Long tests rest on recipes/*.py.
@pytest.mark.parametrize(
    ("recipe", "steps"),
    [("megatron_lm_loop", [0, 2]), *long_but((), [("plain_loop", [0, 2]), ("hf_trainer", [2, 4])])],
)
def test_recipes_run_and_say_where_the_record_is(tmp_path: Path, recipe: str, steps: list[int]) -> None:
    command = [sys.executable, "-W", "ignore", str(RECIPES / f"{recipe}.py"), "--output", str(tmp_path)]
    done = finished(*command, "--steps", "4", "--interval", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    run = find_record(tmp_path)
    assert f"The record is in {run};" in done.stdout
    metrics = read_table_rows(run, "metrics")
    assert metrics["step"].unique().to_list() == steps
    assert set(metrics["role"]) == {"input", "weight", "grad_output"}
    losses = read_table_rows(run, "steps")["loss"]
    assert len(losses) == 4 and losses[3] < losses[0]
    assert losses[0] == pytest.approx(UNTRAINED, rel=0.1)


def test_nemo_recipe_trains_on_a_cpu(tmp_path: Path) -> None:
    """Without what tests set: the command of its docstring compiles nothing."""
    output = ("--output", tmp_path, "--steps", "2", "--interval", "1")
    run_script(RECIPES / "nemo_gpt.py", "baseline", *output, TORCHDYNAMO_DISABLE=None)
    run = find_record(tmp_path / "baseline")
    assert read_table_rows(run, "metrics")["step"].unique().to_list() == [0, 1]
    losses = read_table_rows(run, "steps")["loss"]
    assert len(losses) == 2 and losses[0] == pytest.approx(UNTRAINED, rel=0.1)


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """What Megatron-LM's `get_args()` returns; that part of it is no package."""
    values = SimpleNamespace(curr_iteration=0, tensorboard_dir=str(tmp_path), save=None)
    training = types.ModuleType("megatron.training")
    training.get_args = lambda: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    return values


def token_losses(report: Callable[[float], None], mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    """As pretrain_gpt.py has it: a sum, which Megatron divides by the tokens, in place."""
    loss, tokens = (output.float() * mask).sum(), mask.sum().to(torch.int)
    report(loss.item() / tokens.item())
    return loss, tokens, {"lm loss": loss.detach().clone()}


class Kept:
    """A logger that the user made, with Lightning's method."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows[step] = metrics


def pretrain(
    args: SimpleNamespace, options: dict[str, Any] | None, first: int = 0
) -> tuple[list[float], list[torch.Tensor]]:
    """What Megatron-LM's loop does with a script's forward_step: train steps, and an evaluation after every second."""
    from megatron_lm_loop import finalize_model_grads, get_forward_backward_func, model
    from text_windows import TextWindows

    gpt, losses = model(), []
    optimizer = torch.optim.SGD(gpt.parameters(), lr=1e-2)
    text = TextWindows(100, 64)

    def forward_step(data: Any, gpt: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = {name: value[None] for name, value in text[next(data)].items()}
        output = gpt(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
        report = losses.append if torch.is_grad_enabled() else float
        return output, partial(token_losses, report, batch["loss_mask"])

    step = FP8DebugForwardStep(forward_step, **options) if options is not None else forward_step
    run = partial(get_forward_backward_func(), forward_step_func=step, model=gpt, seq_length=64, micro_batch_size=1)
    data = iter(range(100))
    for iteration in range(first, first + 5):
        args.curr_iteration = iteration
        gpt.zero_grad_buffer()
        run(data_iterator=data, num_microbatches=3, forward_only=False)
        finalize_model_grads([gpt])
        for parameter in gpt.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()
        if iteration % 2:
            gpt.eval()
            with torch.no_grad():
                run(data_iterator=iter(range(50, 60)), num_microbatches=2, forward_only=True)
            gpt.train()
    if options is not None:
        step.close()
    return losses, list(gpt.parameters())


def test_megatron_lm_forward_step(megatron: None, args: SimpleNamespace, tmp_path: Path) -> None:
    losses, weights = pretrain(args, None)
    kept = Kept()
    watched, watched_weights = pretrain(args, {"interval": 2, "table_rows": 0, "on_error": "raise", "loggers": [kept]})
    assert len(losses) == 15 and watched == losses
    assert [step for step, row in sorted(kept.rows.items()) if "fp8/nan_count" in row] == [2, 4]
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))
    metrics = read_table_rows(find_record(tmp_path), "metrics")
    assert metrics["step"].unique().to_list() == [2, 4]  # as Megatron-LM counts, from 1
    assert (metrics.filter(role="input")["calls"] == 3).all()
    assert "decoder.layers.1.mlp.linear_fc2" in metrics["layer"]
    steps = read_table_rows(find_record(tmp_path), "steps")
    assert steps["step"].to_list() == [1, 2, 3, 4, 5]
    assert steps["loss"].to_list() == pytest.approx([sum(losses[i : i + 3]) / 3 for i in range(0, 15, 3)], rel=1e-6)

    multiplier = dict(steps.select("step", "grad_scale").drop_nulls().iter_rows())
    assert multiplier == pytest.approx({2: 1 / 3, 4: 1 / 3}, rel=1e-6)
    metrics = metrics.filter(role="grad_output")
    assert metrics["unscaled_amax"].to_list() == pytest.approx([3 * amax for amax in metrics["amax"]], rel=1e-6)

    pretrain(args, {"interval": 2, "table_rows": 0}, first=3)
    metrics = read_table_rows(find_record(tmp_path), "metrics", ["attempt", "step"]).unique().sort("step")
    assert metrics.rows() == [(0, 2), (1, 4), (1, 6), (1, 8)]


def test_megatron_lm_refuses_what_it_cannot_see(megatron: None, args: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="interval is 0"):
        FP8DebugForwardStep(print, interval=0)
    with pytest.raises(ConfigError, match="no GEMM layer matches"):
        pretrain(args, {"layers": ["no_such"]})
    args.train_iters = 5
    with pytest.warns(FP8DebugWarning, match="it takes steps 1 to 5, and every 100 steps is sampled"):
        pretrain(args, {"interval": 100, "table_rows": 0})
    args.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match="a virtual pipeline splits the model"):
        pretrain(args, {})
