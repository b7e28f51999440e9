"""Which finding a run's trouble began with: what explains what, and what is too late or too weak to be the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8_debug.analysis import thresholds
from nemo_fp8_debug.analysis.diagnosis.answer import measure_confidence
from nemo_fp8_debug.analysis.diagnosis.decide import Decision, DecisionInputs, decide_cause
from nemo_fp8_debug.analysis.diagnosis.events import KINDS, list_events
from nemo_fp8_debug.analysis.diagnosis.facts import Fact
from nemo_fp8_debug.analysis.diagnosis.finding import CAUSES, EXPLAINS, STRENGTHS, Finding
from nemo_fp8_debug.analysis.diagnosis.rule import load_rules
from nemo_fp8_debug.analysis.loss.curve import LossCurve
from nemo_fp8_debug.analysis.loss.outcome import LossOutcome

#: harmed from step 100 on, a sample every 10 steps, next to a baseline
HARMED = DecisionInputs(harmed_since=100, interval=10, settled=20, paired=True, judged=True)
RATE = Finding("learning rate", "learning_rate", "clear", "...", since=60, is_exact=True)
SCALE = Finding("operand", "corrupted_scale", "clear", "...", "fc1", "input", 80, excess=20.0)
VALUES = Finding("operand", "outlier", "clear", "...", "fc2", "input", 80, may_follow_the_loss=True, excess=20.0)
GRADIENT = Finding("operand", "outlier", "clear", "...", "fc2", "grad_output", 80, "", True, 20.0, of_kind="gradients")
PRODUCT = Finding("wrong product", "wrong_product", "proof", "...", "fc1", None, 90)
STEPS = Finding("weight steps", "step_size", "clear", "...", "fc1", "update", 90)
FROZEN = Finding("frozen weights", "frozen_weights", "clear", "...", "fc1", since=150)


def chosen(*findings: Finding, evidence: DecisionInputs = HARMED) -> Finding | None:
    """The finding that is decided on, whatever their order."""
    decided = {decide_cause(order, evidence).finding for order in (findings, findings[::-1])}
    assert len(decided) == 1
    return decided.pop()


class TestCause:
    def test_a_cause_that_began_before_explains_what_came_after(self) -> None:
        assert chosen(RATE, SCALE, VALUES, GRADIENT) == RATE
        assert chosen(replace(RATE, since=95), SCALE) == SCALE
        assert chosen(SCALE, replace(VALUES, since=90), GRADIENT) == SCALE

    def test_what_may_have_begun_together_is_told_by_kind(self) -> None:
        assert chosen(SCALE, VALUES) == SCALE
        assert chosen(STEPS, replace(GRADIENT, since=90)) == STEPS

    def test_proof_counts_more_than_what_came_before(self) -> None:
        assert chosen(SCALE, PRODUCT) == PRODUCT

    def test_values_never_explain_a_scale_that_jumped_before(self) -> None:
        assert chosen(replace(VALUES, since=40), SCALE) == replace(VALUES, since=40)
        assert decide_cause([replace(VALUES, since=40), SCALE], HARMED).also == [SCALE]

    @pytest.mark.parametrize("late", [SCALE, RATE, STEPS])
    def test_what_began_after_the_harm_is_no_cause(self, late: Finding) -> None:
        assert chosen(replace(late, since=110)) == replace(late, since=110)  # one sample shows what began before
        assert decide_cause([replace(late, since=120)], HARMED) == Decision(None, "software", likeliest=[])

    def test_what_is_seen_late_may_have_begun_before(self) -> None:
        assert chosen(FROZEN) is None and chosen(replace(FROZEN, or_earlier=True)) == replace(FROZEN, or_earlier=True)

    def test_values_with_the_loss_follow_it_unless_they_stand_out(self) -> None:
        with_loss = replace(VALUES, since=100)
        assert chosen(with_loss) == with_loss
        others = [replace(with_loss, layer=f"layers.{i}.fc1", excess=10.0) for i in range(3)]
        assert decide_cause([with_loss, *others], HARMED).cause == "software"


class TestHints:
    HINT = replace(SCALE, strength="hint")

    def test_count_only_if_a_baseline_does_not_show_the_harm(self) -> None:
        assert chosen(self.HINT) == self.HINT
        for evidence in (replace(HARMED, harmed_since=None), replace(HARMED, paired=False)):
            found = decide_cause([self.HINT], evidence)
            assert found.finding is None and list(found.likeliest) == [self.HINT]

    def test_count_less_than_what_is_clear(self) -> None:
        assert chosen(replace(self.HINT, since=20), STEPS) == STEPS


class TestWithoutACause:
    @pytest.mark.parametrize(
        ("evidence", "cause"),
        [
            (HARMED, "software"),
            (replace(HARMED, paired=False), "unknown"),
            (replace(HARMED, judged=False), "unknown"),
            (replace(HARMED, harmed_since=None), "none"),
            (replace(HARMED, harmed_since=None, judged=False), "unknown"),
        ],
    )
    def test_says_what_is_known(self, evidence: DecisionInputs, cause: str) -> None:
        unknown = Finding("gradient norm", "unknown", "hint", "...", since=50)
        assert decide_cause([], evidence) == decide_cause([unknown], evidence) == Decision(None, cause, likeliest=[])

    def test_a_reference_run_that_does_the_same_acquits_fp8_alone(self) -> None:
        same = replace(HARMED, by_precision=False)
        assert chosen(SCALE, VALUES, evidence=same) is None and chosen(SCALE, RATE, evidence=same) == RATE


def findings() -> st.SearchStrategy[Finding]:
    causes = sorted(set(CAUSES) - {"none"})
    return st.builds(
        Finding,
        rule=st.sampled_from(["operand", "learning rate", "zeros"]),
        cause=st.sampled_from(causes),
        strength=st.sampled_from(STRENGTHS),
        evidence=st.just("..."),
        layer=st.sampled_from(["fc1", "fc2", None]),
        role=st.sampled_from(["input", "grad_output", None]),
        since=st.none() | st.integers(0, 200),
        may_follow_the_loss=st.booleans(),
        excess=st.none() | st.floats(1, 100),
        is_exact=st.booleans(),
    )


@given(st.lists(findings(), max_size=6), st.none() | st.integers(0, 200), st.booleans(), st.booleans())
def test_any_findings_are_decided_on(found: Sequence[Finding], harmed: int | None, paired: bool, judged: bool) -> None:
    evidence = DecisionInputs(harmed, 10, 20, paired, judged)
    decision = decide_cause(found, evidence)
    assert decision.cause in CAUSES and decision.finding not in (*decision.also, *decision.likeliest)
    if decision.finding is None:
        assert decision.cause in ("none", "unknown", "software") and not decision.also
        assert measure_confidence(decision, paired) in (None, "medium", "high")
    else:
        assert decision.finding in found and decision.cause == decision.finding.cause
        late = harmed is not None and decision.finding.since is not None and decision.finding.since > harmed + 10
        known = ("low", "medium", "high") if decision.cause != "unknown" else (None,)
        assert not late and measure_confidence(decision, paired) in known


class TestData:
    def test_rules_need_facts_and_name_known_causes(self) -> None:
        rules = load_rules()
        assert len({rule.name for rule in rules}) == len(rules) > 15
        for rule in rules:
            assert set(rule.causes) <= set(CAUSES) and "Example: " in rule.description, rule.name
            assert all(isinstance(fact, Fact) and fact.__doc__ for fact in rule.needs), rule.name

    def test_every_kind_has_a_place_and_explains_no_kind_that_is_none(self) -> None:
        kinds = {cause.kind for cause in CAUSES.values()} | {"gradients", "size"}
        assert set(EXPLAINS) == kinds and all(explained <= kinds for explained in EXPLAINS.values())

    def test_every_rule_s_findings_are_events(self) -> None:
        loss = LossOutcome(LossCurve.from_steps_table(pl.DataFrame({"step": range(50), "loss": np.linspace(3, 2, 50)})))
        for rule in load_rules():
            for cause in rule.causes:
                (event,) = list_events([Finding(rule.name, cause, "clear", "...", "fc1", "input", 5)], loss)
                assert event.kind in KINDS and event.step == 5

    def test_thresholds_have_a_unit_and_a_reason(self) -> None:
        assert len({each.name for each in thresholds.TABLE}) == len(thresholds.TABLE)
        for each in thresholds.TABLE:
            assert getattr(thresholds, each.name) == each.value and each.reason.endswith(".")
            assert len(each.reason.split()) <= 15
