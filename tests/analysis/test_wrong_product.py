"""A kernel that multiplies wrongly is named from the record of its run alone; a healthy run is not accused."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import ml_dtypes
import pytest
import torch
from product_faults.faults import FAULTS, FaultyKernel
from torch import nn

from nemo_fp8_debug import Emulation, Monitor, diagnose

STEPS, INTERVAL, ONSET = 40, 5, 20
#: place of this product in a step, behind those of the teacher and of the forward pass
WGRAD_OF_2 = 4


def trained(folder: Path, fault: str | None = None, last: int = STEPS, triggers: tuple[str, ...] = ()) -> str:
    """The record of a run in emulated FP8 whose kernel is wrong from `ONSET` on, until `last`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 96)).bfloat16()
    teacher = nn.Linear(96, 96).bfloat16()
    emulation = Emulation(model, "current")
    emulation.attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"interval": INTERVAL, "table_rows": 0, "verify_rows": 32, "triggers": triggers, "trigger_steps": 2}
    monitor = Monitor(model, str(folder), on_error="raise", **options)
    for step in range(STEPS):
        wrong = fault is not None and ONSET <= step < last
        with monitor.step(step) as report, FaultyKernel(FAULTS[fault], WGRAD_OF_2) if wrong and fault else nullcontext():
            x = torch.randn(160, 96).bfloat16()
            with torch.no_grad():
                target = teacher(x)
            loss = (model(x) - target).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            emulation.end_step()
            report(loss=loss)
    monitor.close()
    emulation.detach()
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "healthy": trained(folder / "healthy"),
        "factor": trained(folder / "factor", "factor"),
        "factor_once": trained(folder / "factor_once", "factor", ONSET + 1),
        "once": trained(folder / "once", "wrong_rows", ONSET + 1),
    }


def test_a_kernel_that_is_wrong_by_1_in_64_is_named_without_a_baseline(runs: dict[str, str]) -> None:
    found = diagnose(runs["factor"])
    assert (found.cause, found.confidence) == ("wrong_product", "high")
    verdict = found.verdict()
    assert "dW of 2 on rank 0 is off by" in verdict and "by a factor of 1.015" in verdict
    assert "3 of 3 later samples are wrong again" in verdict
    assert (ONSET, "product", "2") in [(event.step, event.kind, event.layer) for event in found.events]
    assert found.to_json()["about_fp8"] is False and found.advice


def test_what_is_over_after_one_sample_is_told_as_transient(runs: dict[str, str]) -> None:
    finding = next(f for f in diagnose(runs["factor_once"]).findings if f.rule == "wrong product")
    assert finding.since == ONSET and "3 later samples are right, so the fault is transient" in finding.evidence


def test_later_samples_of_other_rows_do_not_tell_that_it_is_transient(runs: dict[str, str]) -> None:
    finding = next(f for f in diagnose(runs["once"]).findings if f.rule == "wrong product")
    assert finding.since == ONSET and "3 later samples are right in other rows and columns" in finding.evidence
    assert "in some of its columns" in finding.evidence or "in some of its rows" in finding.evidence


def test_a_healthy_run_is_not_accused(runs: dict[str, str]) -> None:
    for baseline in (None, runs["factor"]):
        found = diagnose(runs["healthy"], baseline)
        assert found.cause != "wrong_product" and not [f for f in found.findings if f.rule == "wrong product"]


def test_the_trigger_has_the_next_steps_sampled(tmp_path: Path) -> None:
    from nemo_fp8_debug import read_record

    steps = read_record(trained(tmp_path, "power_of_two", triggers=("wrong_product",)), "steps")
    told = steps.filter(steps["trigger"].is_not_null())
    assert ONSET < told["step"].min() <= ONSET + INTERVAL
    assert told["trigger"][0].startswith("dW of 2 is not the product of its operands on rank 0 (error ")


def test_the_error_of_a_product_is_divided_among_its_causes(tmp_path: Path) -> None:
    """Against the squares of the errors themselves: of each operand alone, of both, and of what the kernel returned."""
    from nemo_fp8_debug.analysis.diagnosis.facts import DiagnosedRecords
    from nemo_fp8_debug.analysis.diagnosis.finding import Finding
    from nemo_fp8_debug.analysis.runs.run import Run
    from nemo_fp8_debug.observations.products.rule import describe_culprit

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96, bias=False)).bfloat16(), torch.randn(128, 64).bfloat16()
    emulation = Emulation(model, "current")
    emulation.attach()
    options = {"interval": 1, "table_rows": 0, "output_rows": 1000, "verify_rows": 1000}
    monitor = Monitor(model, str(tmp_path), on_error="raise", **options)
    with monitor.step(0) as report:
        y = model(x)
        (loss := y.float().square().mean()).backward()
        report(loss=loss)
    monitor.close()
    emulation.detach()
    found = Finding("operand", "underflow", "clear", "", "0", "input", 0)
    told = describe_culprit(found, DiagnosedRecords(Run.read(str(tmp_path))))
    of_y = next(part for part in told if "the error of Y" in part)
    shares = {what: float(share) for share, what in re.findall(r"(-?\d+)% ((?:of |joint)[^,]*)", of_y)}
    assert set(shares) == {"of X", "of W", "joint", "of accumulation and rounding"}
    assert sum(shares.values()) == pytest.approx(100, abs=2)
    w = model[0].weight.detach()
    cast = {role: emulated_cast(tensor) for role, tensor in (("X", x), ("W", w))}
    exact = x.double() @ w.double().t()
    alone = {"of X": (cast["X"] - x.double()) @ w.double().t(), "of W": x.double() @ (cast["W"] - w.double()).t()}
    both = cast["X"] @ cast["W"].t()
    squares = {what: float(error.square().sum()) for what, error in alone.items()}
    squares["joint"] = float((both - exact).square().sum()) - sum(squares.values())
    total = sum(squares.values()) + float((y.detach().double() - both.bfloat16().double()).square().sum())
    for what in ("of X", "of W"):
        assert shares[what] == pytest.approx(100 * squares[what] / total, abs=2)


def emulated_cast(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with a scale from the largest value, by ml_dtypes."""
    scale = 448.0 / float(x.abs().max())
    codes = (x.float().numpy() * scale).astype(ml_dtypes.float8_e4m3fn).astype("float32")
    return (torch.from_numpy(codes) / scale).bfloat16().double()
