"""Recommended changes against runs that made them, shapes of real modules, and plain sums."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from samples import FINGERPRINT, measured_sample, sample
from small_models.megatron import VOCABULARY, gpt, loss_of
from torch import nn
from typer.testing import CliRunner, Result

from nemo_fp8_debug import ConfigError, Emulation, Monitor, RecordError
from nemo_fp8_debug.analysis.recommendation.options import Budget, ChangeReason, CurrentCast, candidates
from nemo_fp8_debug.analysis.recommendation.recommend import (
    Recommendation,
    compute_fp8_coverage,
    find_operands_over_budget,
    flops_of,
    recommend,
)
from nemo_fp8_debug.analysis.replay.replay import replay, write_replayed_rows
from nemo_fp8_debug.analysis.runs.run import Run
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.numerics.recipe import find_recipe
from nemo_fp8_debug.plan.plan import Plan
from nemo_fp8_debug.record.writer import RunRecordWriter

X = ("0", "input")
METRICS = ("relative_error", "underflow_pct", "overflow_pct")


def record_of(
    folder: Path, amplitudes: Iterable[float], recipe: str, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Run:
    """A run, which does not quantize, whose input has one amplitude a step."""
    model = nn.Sequential(nn.Linear(64, 32, dtype=dtype))
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    monitor = Monitor(model, str(folder), interval=1, recipe=recipe, table_rows=0, on_error="raise", **options)
    for step, amplitude in enumerate(amplitudes):
        with monitor.step(step):
            model((amplitude * x).to(dtype)).float().sum().backward()
    monitor.close()
    return Run.read(folder)


def growing(by: float) -> list[float]:
    return [by**step for step in range(8)]


@pytest.mark.parametrize(
    ("amplitudes", "in_use", "expected"),
    [
        (growing(1.0), "delayed", "delayed-hybrid"),
        (growing(1.5), "delayed", "delayed-hybrid(margin=1)"),
        (growing(3.0), "delayed", "delayed-hybrid(margin=2)"),
        (
            [1e5] + [1.0] * 7,
            "delayed(amax_history_len=4)",
            "delayed-hybrid(amax_history_len=4,amax_compute_algo=most_recent)",
        ),
        (growing(32.0), "delayed", "current-hybrid"),
    ],
    ids=["steady", "grows", "grows faster", "an old spike", "grows too fast"],
)
def test_the_run_under_the_change_keeps_the_budget_and_under_the_cheaper_one_does_not(
    tmp_path: Path, amplitudes: list[float], in_use: str, expected: str
) -> None:
    found = recommend(record_of(tmp_path / "now", amplitudes, in_use), [X])
    finding, limits = found.findings[0], Budget()
    assert finding.chosen_option.recipe == expected
    assert [change.recipe for change in found.plan.changes] == [expected][: len(found.fixes_to_apply)]
    at = finding.options.index(finding.chosen_option)
    for option in finding.options[max(0, at - 1) : at + 1]:
        metrics = (
            record_of(tmp_path / option.kind, amplitudes, option.recipe)
            .metrics.read_all_rows()
            .filter(layer="0", role="input")
        )
        worst = {name: metrics.tail(len(amplitudes) // 2)[name].max() for name in METRICS}
        assert {name: getattr(option.errors, name) for name in METRICS} == pytest.approx(worst, rel=1e-12)
        assert all(worst[name] <= getattr(limits, name) for name in METRICS) == (option.recipe == expected)


def outliers(seed: int, largest: float) -> torch.Tensor:
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = largest
    return x.bfloat16()


def planted(folder: Path, largest: dict[tuple[str, str], float], layers: int = 8, **fingerprint: Any) -> Run:
    """Operands in BF16 that are ordinary but for a value of so many standard deviations."""
    record = RunRecordWriter(folder)
    record.open(FINGERPRINT | fingerprint)
    for step in range(4):
        keys = [
            (f"decoder.layers.{i}.mlp.linear_fc2", role)
            for i in range(layers)
            for role in ("input", "weight", "grad_output")
        ]
        record.record(measured_sample(step, {key: outliers(step, largest.get(key, 3.0)) for key in keys}))
    record.close()
    return Run.read(folder)


def fc2(block: int) -> str:
    return f"decoder.layers.{block}.mlp.linear_fc2"


class TestBF16:
    """Where nothing else does: X of 1e11 standard deviations underflows in any format with one scale."""

    def test_only_the_gemms_that_read_the_operand_leave_fp8(self, tmp_path: Path) -> None:
        found = recommend(planted(tmp_path, {(fc2(4), "input"): 1e11}), [(fc2(4), "input")])
        assert [(c.layer, c.recipe, c.roles) for c in found.plan.changes] == [(fc2(4), "bf16", ("input",))]
        assert found.before == 1 and found.after == pytest.approx(1 - 2 / 24)
        assert found.findings[0].cost == pytest.approx(2 / 24) and found.ends is None
        assert found.notes[0].startswith("Nothing in the run is quantized") and "what_if" in found.notes[1]

    def test_two_operands_of_a_layer_take_all_of_it(self, tmp_path: Path) -> None:
        keys = [(fc2(4), "input"), (fc2(4), "grad_output")]
        found = recommend(planted(tmp_path, dict.fromkeys(keys, 1e11)), keys)
        assert [(c.layer, c.recipe, c.roles) for c in found.plan.changes] == [
            (fc2(4), "bf16", ("input", "weight", "grad_output"))
        ]
        assert found.after == pytest.approx(1 - 3 / 24)

    @pytest.mark.parametrize(("blocks", "ends"), [([0], (1, 0)), ([7], (0, 1)), ([0, 7], (1, 1)), ([0, 4], None)])
    def test_whole_blocks_at_the_ends(self, tmp_path: Path, blocks: list[int], ends: tuple[int, int] | None) -> None:
        keys = [(fc2(block), "input") for block in blocks]
        found = recommend(planted(tmp_path, dict.fromkeys(keys, 1e11)), keys)
        assert (found.ends and (found.ends.start, found.ends.end)) == ends
        if found.ends:
            assert found.ends.coverage == pytest.approx(1 - len(blocks) / 8)

    def test_an_operand_that_keeps_the_budget_stays(self, tmp_path: Path) -> None:
        found = recommend(planted(tmp_path, {}), [(fc2(0), "input"), (fc2(0), "weight")])
        assert not found.fixes_to_apply and not found.plan.changes and found.after == found.before == 1


@pytest.mark.parametrize(("out", "changes"), [(None, False), ((2, 2), True)])
def test_what_an_operand_lost_while_it_was_out_of_order_counts(
    tmp_path: Path, out: tuple[int, int] | None, changes: bool
) -> None:
    run = record_of(tmp_path, [1.0, 1.0, 1e5, 1.0, 1.0, 1.0, 1.0, 1.0], "delayed(amax_history_len=1)")
    found = recommend(run, [X], flags={X: ChangeReason("a spike", out)})
    assert [finding.changes_cast for finding in found.findings] == [changes] and found.findings[0].why == "a spike"


def test_another_format_where_the_range_is_too_small(tmp_path: Path) -> None:
    """3e4 standard deviations: E4M3 underflows, E5M2 does not; metrics against torch's own casts."""
    found = recommend(planted(tmp_path, {(fc2(4), "input"): 3e4}), [(fc2(4), "input")])
    assert found.findings[0].chosen_option.recipe == "current-e5m2" and found.findings[0].cost == 0
    worst = dict.fromkeys(("now", "then"), 0.0)
    for step in (2, 3):
        x = outliers(step, 3e4).float()
        for name, dtype in (("now", torch.float8_e4m3fn), ("then", torch.float8_e5m2)):
            scale = torch.finfo(dtype).max / x.abs().max()
            lost = ((x * scale).to(dtype).float() == 0) & (x != 0)
            worst[name] = max(worst[name], 100 * lost.double().mean().item())
    now, then = found.findings[0].options[0].errors, found.findings[0].chosen_option.errors
    assert now and then and (now.underflow_pct, then.underflow_pct) == pytest.approx((worst["now"], worst["then"]))


def test_a_block_recipe_only_where_it_was_what_if(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    chosen = {}
    for name, what_if in (("none", []), ("mxfp8", ["mxfp8"]), ("both", ["mxfp8", "blockwise"])):
        monitor = Monitor(model, str(tmp_path / name), interval=1, recipe="current", what_if=what_if, table_rows=0)
        for step in range(3):
            with monitor.step(step):
                model(outliers(step, 1e11)).float().sum().backward()
        monitor.close()
        chosen[name] = recommend(Run.read(tmp_path / name), [X]).findings[0].chosen_option.recipe
    assert chosen == {"none": "bf16", "mxfp8": "mxfp8-e4m3", "both": "blockwise-e4m3"}


@pytest.mark.parametrize("amplitudes", [growing(1.5), growing(3.0), growing(32.0), [1e5] + [1.0] * 7], ids=str)
def test_float32_operands_get_what_bfloat16_ones_of_the_same_values_get(tmp_path: Path, amplitudes: list[float]) -> None:
    """1.0 is a bfloat16, and 1.001 none, so that histograms of float32 hold the values or values next to them."""
    in_use = "delayed(amax_history_len=4)"
    exact = recommend(record_of(tmp_path / "bfloat16", amplitudes, in_use), [X]).findings[0]
    for factor in (1.0, 1.001):
        folder = tmp_path / str(factor)
        found = recommend(record_of(folder, [factor * a for a in amplitudes], in_use, dtype=torch.float32), [X])
        (about,) = found.findings
        assert about.chosen_option.recipe == exact.chosen_option.recipe and about.chosen_option.kind not in ("stay", "bf16")
        assert about.chosen_option.approximate and not exact.chosen_option.approximate
        assert any("approximate" in note for note in found.notes)
        assert found.to_json()["findings"][0]["chosen"]["approximate"] is True
        mine, theirs = about.chosen_option.errors, exact.chosen_option.errors
        assert mine and theirs and mine.relative_error == pytest.approx(theirs.relative_error, rel=0.05)


def test_exact_rows_of_dumps_count_before_rounded_histograms(tmp_path: Path) -> None:
    run = record_of(tmp_path, growing(32.0), "delayed", dtype=torch.float32, dump=["0"], dump_min_free_bytes=0)
    about = recommend(run, [X]).findings[0].chosen_option
    for source in ("histograms", "dumps"):
        write_replayed_rows(tmp_path, replay(tmp_path, "current", source))
    exact = recommend(Run.read(tmp_path), [X]).findings[0].chosen_option
    assert about.recipe == exact.recipe == "current-hybrid" and (about.approximate, exact.approximate) == (True, False)
    assert about.errors != exact.errors


def test_without_histograms_bf16_is_left_and_the_notes_say_why(tmp_path: Path) -> None:
    run = record_of(tmp_path, growing(32.0), "delayed", dtype=torch.float32)
    shutil.rmtree(tmp_path / "histograms")
    found = recommend(run, [X])
    assert found.findings[0].chosen_option.kind == "bf16" and found.findings[0].chosen_option.errors is None
    assert any("no histograms" in note for note in found.notes)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("recipe", ["delayed", "current-e4m3", "mxfp8", "of another tool"])
def test_nothing_is_tried_twice_and_bf16_is_the_last(recipe: str, role: str) -> None:
    tried = [r.name for _, r in candidates(CurrentCast(find_recipe(recipe), "e4m3", role))]
    assert len(set(tried)) == len(tried) and tried[-1] == "bf16" and recipe not in tried


class TestFlops:
    @pytest.mark.usefixtures("megatron")
    @pytest.mark.parametrize("experts", [None, 2])
    def test_they_are_those_of_megatrons_modules(self, tmp_path: Path, experts: int | None) -> None:
        model = gpt(experts=experts)
        seen: dict[str, float] = {}
        for name, module in model.named_modules():
            if name.rsplit(".", 1)[-1].startswith("linear_") or name == "output_layer":

                def count(module: Any, args: Any, name: str = name) -> None:
                    tokens = args[0].numel() // args[0].shape[-1]
                    n, k = module.weight.shape if module.weight is not None else (VOCABULARY, args[0].shape[-1])
                    assert k == args[0].shape[-1]
                    seen[name] = seen.get(name, 0) + 2.0 * tokens * k * n

                module.register_forward_pre_hook(count)
        monitor = Monitor(model, str(tmp_path), interval=1, table_rows=0, on_error="raise")
        with monitor.step(0):
            for seed in range(2):
                loss_of(model, seed).backward()
        monitor.close()
        assert len(seen) > 8
        assert flops_of(Run.read(tmp_path).metrics) == pytest.approx({name: f for name, f in seen.items() if f})

    def test_values_that_are_not_finite_count(self, tmp_path: Path) -> None:
        rows = [{"layer": "a", "role": r, "n": n, "nan": 2, "inf": 1} for r, n in zip(ROLES, (9, 17, 21), strict=True)]
        record = RunRecordWriter(tmp_path)
        record.open(FINGERPRINT)
        record.record(sample(0, [*rows, {"layer": "b", "role": "input"}]))
        record.close()
        assert flops_of(Run.read(tmp_path).metrics) == pytest.approx({"a": 2 * (12 * 20 * 24) ** 0.5})

    def test_coverage_is_of_gemms_of_which_both_operands_are_cast(self) -> None:
        flops = {"a": 3.0, "b": 1.0}
        fp8 = {("a", "input"), ("a", "weight"), ("b", "input"), ("b", "grad_output"), ("b", "weight")}
        assert compute_fp8_coverage(flops, fp8.__contains__) == (3 + 3) / 12
        assert compute_fp8_coverage({}, fp8.__contains__) is None


ROLES = ("input", "weight", "grad_output")


def test_replay_of_some_operands_and_steps_is_a_part_of_all(tmp_path: Path) -> None:
    run = planted(tmp_path, {}, layers=3)
    key = ["step", "layer", "role"]
    part = replay(run.path, "delayed(margin=1)", steps={2, 3}, only={(fc2(1), "input")}).sort(key)
    whole = replay(run.path, "delayed(margin=1)").filter(pl.col("step") >= 2, layer=fc2(1), role="input").sort(key)
    assert len(part) == 2 and part.equals(whole)


class TestRefused:
    def test_an_operand_that_the_record_has_not(self, tmp_path: Path) -> None:
        with pytest.raises(RecordError, match=r"no operand decoder.layers.9.mlp.linear_fc2:input; it has decoder"):
            recommend(planted(tmp_path, {}), [(fc2(9), "input")])

    def test_a_record_without_samples(self, tmp_path: Path) -> None:
        record = RunRecordWriter(tmp_path)
        record.open(FINGERPRINT)
        record.close()
        with pytest.raises(RecordError, match="has no sampled step"):
            recommend(Run.read(tmp_path), [])

    @pytest.mark.parametrize("limit", [-1.0, float("nan")])
    def test_limits_below_zero(self, limit: float) -> None:
        with pytest.raises(ConfigError, match="limit of underflow_pct"):
            Budget(underflow_pct=limit)


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["recommend", *map(str, arguments)])


class TestCommandLine:
    def test_files_are_written_once_and_the_plan_is_what_was_recommended(self, tmp_path: Path) -> None:
        run = planted(tmp_path / "run", {(fc2(4), "input"): 1e11})
        result = cli(run.path, "--output", tmp_path / "fix")
        assert result.exit_code == 0, result.output
        assert "bf16" in result.stdout and "100% -> 91.7%" in result.stdout
        expected: Recommendation = recommend(run, find_operands_over_budget(run, Budget()))
        assert Plan.load(tmp_path / "fix" / "plan.json") == expected.plan
        before = {path: path.read_text() for path in (tmp_path / "fix").iterdir()}
        again = cli(run.path, "--output", tmp_path / "fix")
        assert again.exit_code == 1 and "exists and is not overwritten" in again.stderr
        assert {path: path.read_text() for path in (tmp_path / "fix").iterdir()} == before

    def test_against_a_good_run_what_left_its_band(self, tmp_path: Path) -> None:
        baseline, bad = (
            planted(tmp_path / name, {(fc2(4), "input"): much}) for name, much in (("baseline", 3.0), ("bad", 1e11))
        )
        plain = json.loads(cli(bad.path, "--baseline", baseline.path, "--json").stdout)
        assert [(f["layer"], f["role"]) for f in plain["findings"]] == [(fc2(4), "input")]
        assert "underflow_pct" in plain["findings"][0]["why"] and "from step 0" in plain["findings"][0]["why"]
        assert np.isclose(plain["fp8_coverage"]["after"], 22 / 24)

    def test_an_operand_by_name(self, tmp_path: Path) -> None:
        run = planted(tmp_path / "run", {})
        result = cli(run.path, "--operand", f"{fc2(0)}:dY")
        assert result.exit_code == 0 and "within the limits" in result.stdout
        assert "nothing to change" in cli(run.path).stdout

    @pytest.mark.parametrize("operands", [[], ["--operand", f"{fc2(0)}:dY"]])
    def test_a_plan_without_changes_is_not_written(self, tmp_path: Path, operands: list[str]) -> None:
        result = cli(planted(tmp_path / "run", {}).path, *operands, "--output", tmp_path / "fix")
        assert result.exit_code == 0 and "nothing was written" in result.stdout
        assert not (tmp_path / "fix").exists()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--operand", "nothing"], "write LAYER:ROLE"),
            (["--operand", "nothing:X"], "has no operand"),
            (["--underflow", "-1"], "must not be below 0"),
            (["--baseline", "nowhere"], "holds no run record"),
        ],
    )
    def test_what_cannot_be_done_is_said_in_a_line(self, tmp_path: Path, arguments: list[str], message: str) -> None:
        result = cli(planted(tmp_path, {}, layers=1).path, *arguments)
        assert result.exit_code == 1 and message in " ".join(result.stderr.split())
        assert result.stderr.count("\n") == 1 and result.stdout == ""


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_with_delayed_scaling_stays_in_fp8(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    emulation = Emulation(model, "delayed(amax_history_len=16)")
    emulation.attach()
    with closing(Monitor(model, tmp_path, interval=1, table_rows=0, on_error="raise")) as monitor:
        for step in range(60):
            with monitor.step(step):
                nn.functional.mse_loss(model(torch.randn(128, 32)), torch.randn(128, 32)).backward()
                emulation.end_step()
                optimizer.step()
                optimizer.zero_grad()
    run = Run.read(tmp_path)
    clipped = run.metrics.read_all_rows(["overflow_pct"]).filter(pl.col("step") >= 30)["overflow_pct"].max()
    assert isinstance(clipped, float) and clipped > Budget().overflow_pct
    assert find_operands_over_budget(run, Budget()) == []
    found = recommend(run, [(layer, role) for layer, role in run.metrics.tensors.rows()])
    assert found.before == found.after == 1.0 and not found.plan.changes


@pytest.mark.parametrize(("clipped", "asks"), [(23, False), (24, True)])
def test_a_share_counts_from_24_values_on(tmp_path: Path, clipped: int, asks: bool) -> None:
    record = RunRecordWriter(tmp_path)
    record.open(FINGERPRINT)
    for step in range(8):
        record.record(sample(step, [{"n": 4096, "overflow_pct": 100 * clipped / 4096 if step == 6 else 0.0}]))
    record.close()
    assert bool(find_operands_over_budget(Run.read(tmp_path), Budget())) == asks
