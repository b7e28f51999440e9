"""The benchmark of truth: its faults are what they should be, and its records come back as they were measured."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import fault_injection.judge
import polars as pl
import pytest
import torch
from fault_injection import rescue
from fault_injection.cases import cases
from fault_injection.draws import OPERAND_KINDS, SOFTWARE_KINDS, Draw, drawn, possible
from fault_injection.families import family
from fault_injection.fault import Fault, Together
from fault_injection.judge import BASELINES, bands_without, baseline_of, judge
from fault_injection.recorder import InMemory
from fault_injection.records import FOLDER, Recorded, read_run, truths, write_part
from fault_injection.sets import RARE_KINDS, is_tune
from fault_injection.training import Setup, Training, train
from fault_injection.truth import gap_of, truth

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.gemms import find_gemms, require_matching_gemms

#: a model of one layer of each of the frameworks that have hooks of their own
SETUPS = {name: Setup(name, "delayed", 1, 1, 1, "scaled") for name in ("moe", "vit")}
NEUTRAL = [kind for kind in OPERAND_KINDS if kind not in ("nan_operand", "from_the_start", "transient")]


def fault(kind: str, setup: Setup, onset: int = 1) -> Fault:
    """One that has its full strength at once."""
    of = family(setup.family)
    names = [
        gemm.name for gemm in require_matching_gemms(find_gemms([of.build(0, setup.depth, setup.engine)]), list(of.layers))
    ]
    made = drawn(kind, Draw(random.Random(3), of, setup, names))
    if isinstance(made, Together):
        return replace(made, onset=onset, parts=tuple(replace(part, onset=onset) for part in made.parts))
    made = replace(made, onset=onset, until=None)
    return replace(made, over=1) if hasattr(made, "over") else made  # type: ignore[call-arg]


def losses(setup: Setup, made: Fault, fp8: bool) -> list[float]:
    run = Training(setup, made)
    if not fp8:
        run.engine.detach()
    monitor = Monitor(run.model, recorders=[])
    found = [run.step(step, monitor)["loss"] for step in range(4)]
    monitor.close()
    run.engine.detach()
    return found


@pytest.fixture(scope="module")
def clean() -> dict[tuple[str, bool], list[float]]:
    return {(name, fp8): losses(setup, Fault(), fp8) for name, setup in SETUPS.items() for fp8 in (True, False)}


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "moe") for kind in NEUTRAL), ("corrupted", "vit"), ("stale", "vit"), ("outlier", "vit")]
)
def test_a_fault_of_an_operand_is_none_in_high_precision(
    kind: str, name: str, clean: dict[tuple[str, bool], list[float]]
) -> None:
    setup = SETUPS[name]
    assert losses(setup, fault(kind, setup), fp8=False) == clean[name, False]
    harmed = losses(setup, fault(kind, setup), fp8=True)
    assert harmed[0] == clean[name, True][0] and harmed != clean[name, True]


@pytest.mark.parametrize("kind", [kind for kind in SOFTWARE_KINDS if kind not in ("gradient_sum", "repeated_data")])
def test_a_fault_of_software_begins_at_its_onset(kind: str, clean: dict[tuple[str, bool], list[float]]) -> None:
    harmed = losses(SETUPS["moe"], fault(kind, SETUPS["moe"]), fp8=True)
    assert harmed[0] == clean["moe", True][0] and harmed != clean["moe", True]


def test_cases_are_drawn_alike_each_time_and_rare_kinds_only_in_later_parts() -> None:
    assert cases("llama", 3) == cases("llama", 3)
    drawn_kinds = {case.fault.kind for part in range(30) for case in cases("llama", part)}
    assert drawn_kinds == {"none", *OPERAND_KINDS, *SOFTWARE_KINDS} - set(RARE_KINDS)
    judged = [(case.fault.kind, case.setup) for part in range(100, 130) for case in cases("moe", part)]
    assert set(RARE_KINDS) <= {kind for kind, _ in judged}
    assert all(possible(kind, setup) for kind, setup in judged if kind != "none")
    clean = [case.setup for part in range(30) for case in cases("llama", part) if case.fault.kind == "none"]
    assert len({(s.seed, s.order, s.depth, s.shaken) for s in clean}) == len(clean) == 180


@pytest.mark.parametrize(
    ("family", "part", "kind", "expected"),
    [
        ("moe", 0, "outlier", True),
        ("moe", 100, "stale", False),
        ("vit", 0, "none", False),
        ("moe", 200, "none", True),
        ("moe", 300, "none", False),
    ],
)
def test_later_parts_and_what_is_rare_are_not_in_tune(family: str, part: int, kind: str, expected: bool) -> None:
    assert is_tune(family, part, kind) == expected


def test_a_record_comes_back_as_it_was_measured(tmp_path: object) -> None:
    case, recorder = replace(cases("llama", 2)[0], setup=SETUPS["moe"]), InMemory()
    told = truth(case, train(case.setup, Fault(), recorder, steps=6), [1.0] * 6)
    path = tmp_path / "moe-000.parquet"  # type: ignore[operator]
    write_part(path, [Recorded(told, recorder.fingerprint, recorder.metrics, recorder.steps)] * 2)
    found = list(truths("tune", tmp_path))  # type: ignore[arg-type]
    assert [one["row"] for one in found] == [0, 1] and found[1]["name"] == case.name
    run, keys = read_run(found[1]), ["step", "layer", "role"]
    measured, back = recorder.metrics.sort(keys), run.metrics.read_all_rows().sort(keys)
    assert back.columns == measured.columns and back.schema == measured.schema and len(back) == len(measured) > 0
    for name, values in measured.drop("attempt").to_dict().items():
        if values.dtype != pl.Float64:
            assert back[name].equals(values), name
            continue
        assert (back[name].is_null() == values.is_null()).all(), name
        small = 1e-9 if name in ("sqnr_db", "scale_ratio_log2", "dynamic_range_log2", "outlier_log2") else 0.0
        apart = (back[name] - values).abs() <= 2.0 ** (-10 if name == "scale_current" else -13) * values.abs() + 1e-3 * (
            small > 0
        )
        assert apart.drop_nulls().all(), name
    steps = recorder.steps.with_columns(pl.lit(None, pl.Float64).alias("time"))
    assert run.steps.equals(steps.with_columns(pl.col(pl.Float64).cast(pl.Float32).cast(pl.Float64)))
    assert read_run(found[0], 20).metrics.steps.tolist() == [0]


def test_a_gap_is_of_the_end_and_says_since_when() -> None:
    other = torch.linspace(4, 2, 300).double().numpy()
    assert gap_of(other, other) == (0.0, None)
    gap, since = gap_of(other + 0.5 * (torch.arange(300) >= 200).numpy(), other)
    assert since is not None and 0.2 < gap < 0.25 and 200 <= since <= 206
    assert gap_of(other[:100] + float("inf"), other) == (float("inf"), 0)


def test_verdicts_of_forty_committed_records() -> None:
    """Of five parts the clean runs of two seeds and four with a fault, with the run as baseline that is 2^-9 apart."""
    parts = ("llama-000", "llama-001", "llama-003", "moe-000", "gpt-000")
    told = [one for one in truths("tune") if one["part"] in parts]
    assert all(baseline_of(one, "near") in {other["name"] for other in told} for one in told)
    clean = [one for one in told if one["name"] in ("a", "b", "a-near", "b-near")]
    faulted = [one for one in told if one["kind"] != "none" and int(one["name"].partition("-")[0]) < 4]
    found = list(judge([*clean, *faulted], ("near",), (20,)))
    assert len(found) == len(clean) + len(faulted) == 40
    assert sum(one.accused for one in found if one.is_clean) <= 1
    harm = [one.harm_right for one in found if not one.is_clean and one.harm_is_clear]
    assert sum(harm) >= 0.9 * len(harm)
    named = [one.located for one in found if one.truth["kind"] in ("corrupted", "drift_down", "drift_up", "outlier")]
    assert sum(named) >= 0.75 * len(named) > 4


def test_a_run_without_a_baseline_of_a_kind_is_not_judged_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bands of few of the runs that they are learned from: whom they accuse is of no matter here."""
    monkeypatch.setattr(fault_injection.judge, "LEARNED_FROM", 2)
    bands_without.cache_clear()
    told = next(one for one in truths("tune") if one["part"] == "llama-000" and one["name"] == "deep")
    assert {one.baseline for one in judge([told], intervals=(50,))} == {*BASELINES} - {"other"}
    bands_without.cache_clear()


@pytest.mark.parametrize(("since", "checkpoint"), [(104, 80), (105, 100), (5, 0), (0, 0)])
def test_a_rescue_resumes_from_the_last_checkpoint_before_the_onset(since: int, checkpoint: int) -> None:
    assert rescue.checkpoint_before(since) == checkpoint


def test_what_pages_say_of_rescues_is_what_came_of_them() -> None:
    rescued, of = rescue.told(FOLDER.parent / "rescues").split(" rescued")[0].split(" of ")
    assert (
        f"{rescued} of {of} come within 2%" in " ".join((Path(__file__).parents[2] / "docs/accuracy.md").read_text().split())
        and int(of) >= 18
    )
