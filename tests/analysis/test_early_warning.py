"""Early warning: the score of a sample, the operand that it is of, and how it does on the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosed_runs import CULPRIT, EVERY, LAYERS, ONSET, corrupted, nothing, write
from fault_injection.early_warning import Scored
from fault_injection.records import read_run, truths

from nemo_fp8_debug.analysis.comparison.compare import select_quantized_operands
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.limits import compute_early_warning_scores, find_operands_over_limit
from nemo_fp8_debug.analysis.runs.run import Run


def test_each_sample_behind_the_first_has_a_score_and_an_operand(tmp_path: Path) -> None:
    found = compute_early_warning_scores(Run.read(write(tmp_path / "run", corrupted)))
    assert found["step"].to_list() == list(range(2 * EVERY, 200, EVERY))
    beyond = found.filter(found["score"] > 1)
    assert beyond["step"].to_list() == list(range(ONSET, 200, EVERY))
    assert set(beyond.select("layer", "role").rows()) == {(CULPRIT, "input")}
    assert beyond["score"].to_list() == pytest.approx([10 / 9, *[10 / 3] * (len(beyond) - 1)])


def test_operands_within_their_limits_never_warn(tmp_path: Path) -> None:
    for change in (corrupted, nothing):
        run = Run.read(write(tmp_path / change.__name__, change))
        every, few = (
            compute_early_warning_scores(run),
            compute_early_warning_scores(run, find_operands_over_limit(select_quantized_operands(run.metrics))),
        )
        assert every.filter(every["score"] > 1).equals(few.filter(few["score"] > 1))


def test_the_first_is_an_event_and_in_json(tmp_path: Path) -> None:
    found = diagnose(write(tmp_path / "run", corrupted))
    warned = [event.step for event in found.events if event.what.endswith(f"X of {CULPRIT} is beyond what healthy runs do")]
    assert warned == [ONSET]
    assert found.to_json()["early_warning"]["step"] == ONSET
    assert diagnose(write(tmp_path / "clean", nothing)).to_json()["early_warning"] is None


def test_a_run_of_few_samples_or_in_high_precision_has_none(tmp_path: Path) -> None:
    run = Run.read(write(tmp_path / "run", corrupted, layers=LAYERS[:1]))
    few = run.metrics.select_steps(run.metrics.steps[run.metrics.steps < 2 * EVERY])
    for metrics in (few, run.metrics.select_steps(run.metrics.steps[:0])):
        assert compute_early_warning_scores(Run(run.path, {}, metrics, run.loss)).is_empty()


def test_on_runs_of_the_benchmark_it_comes_before_the_loss_and_not_for_nothing() -> None:
    told = [one for one in truths("tune") if one["part"] in ("llama-002", "llama-003", "gpt-001")]
    clean = [compute_early_warning_scores(read_run(one)) for one in told if one["kind"] == "none"]
    assert not any((scores["score"] > 1).any() for scores in clean)
    scored = Scored([scores["score"].to_numpy() for scores in clean])
    for one in told:
        if one["harmful"] and one["kind"] in ("drift_up", "drift_down", "corrupted"):
            scores = compute_early_warning_scores(read_run(one))
            scored.harmed.append((one, scores["step"].to_numpy(), scores["score"].to_numpy()))
    assert scored.harmed and all(lead > 0 for _, lead in scored.leads(1.0)) and scored.area() > 0.95
