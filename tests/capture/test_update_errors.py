"""Errors of a step of Adam, in parts, against the formula of Adam in float64 over whole weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.optim import AdamW8bit

from nemo_fp8_debug import Emulation, Monitor, read_record
from nemo_fp8_debug.analysis.diagnosis.facts import DiagnosedRecords
from nemo_fp8_debug.analysis.diagnosis.finding import Finding
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.core.keys import STATES
from nemo_fp8_debug.numerics.adam import Adam, AdamValues, compute_update_sums
from nemo_fp8_debug.numerics.gemm_error import sample_indices
from nemo_fp8_debug.observations.states import table
from nemo_fp8_debug.observations.states.rule import describe_culprit

IN, OUT, STEPS = 128, 64, 3
RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1
UPDATE_METRICS = tuple(table.UPDATE_METRICS)
PARTS = UPDATE_METRICS[1:]


def as_numbers(x: torch.Tensor) -> torch.Tensor:
    return (x if type(x) in (torch.Tensor, nn.Parameter) else x.dequantize()).detach().double().clone()


class Watched:
    """A layer, what it multiplies, and what its optimizer has before and after a step."""

    def __init__(self, dtype: torch.dtype, kind: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(IN, OUT, bias=False, dtype=dtype)
        self.optimizer = kind(self.layer.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, **options)
        self.kept: dict[str, torch.Tensor] = {}
        self.layer.register_forward_pre_hook(lambda m, args: self.kept.update(x=args[0].detach()))
        self.layer.register_forward_hook(self._keep_gradient)

    def _keep_gradient(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: self.kept.update(dy=gradient.detach()))

    def state(self) -> list[torch.Tensor]:
        of, weight = self.optimizer.state.get(self.layer.weight, {}), as_numbers(self.layer.weight)
        return [weight, *(as_numbers(of[n]) if n in of else torch.zeros_like(weight) for n in ("exp_avg", "exp_avg_sq"))]

    def steps(self, folder: Path, calls: int = 1, **options: Any) -> list[dict[str, float]]:
        """Trains; the errors that the last step ought to have."""
        options = {"interval": 1, "table_rows": 0, "on_error": "raise", "states": ("update",), "output_rows": 128} | options
        monitor = Monitor(self.layer, str(folder), **options)
        expected = []
        for step in range(STEPS):
            with monitor.step(step):
                for _ in range(calls):
                    x = torch.randn(32, IN, dtype=self.layer.weight.dtype)
                    (self.layer(x).float().square().mean() * 64).backward()
                before, gradient = self.state(), as_numbers(self.layer.weight.grad)
                self.optimizer.step()
            exact = self.kept["dy"].double().T @ self.kept["x"].double()
            rows, columns = (
                sample_indices(n, options["output_rows"], torch.device("cpu"), step, n == IN)
                for n in self.layer.weight.shape
            )
            whole = before, self.state(), [gradient], [exact if calls == 1 else gradient]
            before, after, (gradient,), (exact,) = ([x[rows][:, columns] for x in part] for part in whole)
            expected.append(errors_of(step + 1, before, after, gradient, exact))
            self.optimizer.zero_grad()
        monitor.close()
        return expected


def moments(before: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    _, m, v = before
    return [BETAS[0] * m + (1 - BETAS[0]) * gradient, BETAS[1] * v + (1 - BETAS[1]) * gradient**2]


def errors_of(t: int, before: list[torch.Tensor], after: list[torch.Tensor], g: torch.Tensor, exact: torch.Tensor) -> Any:
    def added(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        m, v = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
        return -RATE * (m / (v.sqrt() + EPS) + DECAY * before[0])

    m, v = moments(before, g)
    right, by_it = added(*moments(before, exact)), added(m, v)
    stored, now = added(*after[1:]), after[0] - before[0]
    meant = min((by_it, stored), key=lambda x: (now - x).norm())
    wrong = [by_it - right, added(after[1], v) - by_it, added(m, after[2]) - by_it, now - meant]
    total = stored - right + wrong[3]
    return dict(zip(UPDATE_METRICS, (float(x.norm() / right.norm()) for x in (total, *wrong)), strict=True))


def recorded(folder: Path) -> list[dict[str, Any]]:
    return read_record(str(folder), "states", where={"role": "update"}).filter(scale_source="not quantized").to_dicts()


def check(found: list[dict[str, Any]], expected: list[dict[str, float]], least: float = 1e-6) -> None:
    assert len(found) == len(expected) == STEPS
    for row, right in zip(found, expected, strict=True):
        for name in UPDATE_METRICS:
            assert row[name] == pytest.approx(right[name], rel=1e-4, abs=least), name


@pytest.mark.parametrize("rows", [128, 16])
def test_a_gradient_of_quantized_operands(tmp_path: Path, rows: int) -> None:
    watched = Watched(torch.float32, torch.optim.AdamW)
    emulation = Emulation(watched.layer, "current")
    emulation.attach()
    expected = watched.steps(tmp_path, output_rows=rows)
    emulation.detach()
    found = recorded(tmp_path)
    check(found, expected)
    assert found[-1]["error_of_weight_gradient"] > 0.01 > 100 * found[-1]["error_of_first_moment"]


def test_moments_in_8_bits(tmp_path: Path) -> None:
    watched = Watched(torch.float32, AdamW8bit)
    expected = watched.steps(tmp_path)
    found = recorded(tmp_path)
    check(found, expected)
    assert min(found[-1][name] for name in PARTS[1:3]) > 1e-3 > found[-1]["error_of_weight_gradient"]


def test_a_weight_and_moments_in_bfloat16(tmp_path: Path) -> None:
    expected = Watched(torch.bfloat16, torch.optim.AdamW).steps(tmp_path)
    found = recorded(tmp_path)
    for row, right in zip(found, expected, strict=True):
        assert row["error_of_weight"] == pytest.approx(right["error_of_weight"], rel=1e-3)
    assert found[-1]["error_of_weight"] > max(found[-1][name] for name in PARTS[:3])


def test_a_gradient_of_several_calls_is_not_known(tmp_path: Path) -> None:
    watched = Watched(torch.float32, torch.optim.AdamW)
    expected = watched.steps(tmp_path, calls=2)
    for row, right in zip(recorded(tmp_path), expected, strict=True):
        assert row["error_of_weight_gradient"] is None
        assert row["error_of_first_moment"] == pytest.approx(right["error_of_first_moment"], abs=1e-6)


def test_of_another_optimizer_nothing_is_told(tmp_path: Path) -> None:
    Watched(torch.float32, torch.optim.NAdam).steps(tmp_path)
    assert all(row[name] is None for row in recorded(tmp_path) for name in UPDATE_METRICS)


def test_a_step_that_is_not_that_of_its_moments_is_not_adam_s() -> None:
    adam = Adam(RATE, BETAS, EPS, DECAY, True, 1)
    weight, gradient = torch.randn(2, 8, 8, dtype=torch.float64)
    zero = torch.zeros_like(weight)
    first, second = adam.update_moments(zero, zero, gradient, weight)
    for part, known in ((1.0, True), (0.25, False)):
        after = AdamValues(weight + part * adam.compute_weight_change(first, second, weight), first, second)
        sums = compute_update_sums(adam, AdamValues(weight, zero, zero), after, gradient, None, True)
        assert bool(sums[0] == 64) is known


def test_the_budget_of_a_step_sums_to_100_percent(tmp_path: Path) -> None:
    watched = Watched(torch.float32, AdamW8bit)
    emulation = Emulation(watched.layer, "current")
    emulation.attach()
    watched.steps(tmp_path, states=tuple(STATES))
    emulation.detach()
    run = Run.read(tmp_path)
    about = Finding("operand", "outlier", "clear", "", layer=run.read_table("states")["layer"][0], role="input", since=0)
    (found,) = describe_culprit(about, DiagnosedRecords(run))
    told = found.removeprefix("the error of the step of W is ")
    shares = [int(part.split("%")[0]) for part in told.split(", ")]
    assert len(shares) == 5 and sum(shares) == pytest.approx(100, abs=2) and "joint" in told
