"""The rule on why an operand left, on planted metrics; it does not guess where evidence is missing."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest
from facts_of import Values, said

from nemo_fp8_debug.analysis.diagnosis.finding import Finding
from nemo_fp8_debug.analysis.diagnosis.rules.operands import Course, Suspect, explain_course

LAYER, STEPS, ONSET = "decoder.layers.0.mlp.linear_fc1", range(0, 200, 10), 100
AT = STEPS.index(ONSET)
N = len(STEPS)
AFTER = np.arange(N) >= AT


def course(**metrics: Values) -> Course:
    """An ordinary operand but for these metrics; `wanted` is the log2 of the scale that the values ask for."""
    wanted = np.broadcast_to(np.asarray(metrics.pop("wanted", 6.0), np.float64), N)
    scale = np.broadcast_to(np.asarray(metrics.pop("scale", 6.0), np.float64), N)
    ordinary = {"outlier_log2": 3.0, "underflow_pct": 0.1, "overflow_pct": 0.0, "amax": 4.0, "nan": 0, "inf": 0}
    columns = {name: np.broadcast_to(value, N) for name, value in (ordinary | metrics).items()}
    columns = {"scale": 2.0**scale, "scale_ratio_log2": scale - wanted} | columns
    rows = pl.DataFrame({"step": STEPS, "layer": LAYER, "role": "input"} | columns)
    return Course.build_course(rows.with_columns(pl.col(pl.Float64).fill_nan(None)), LAYER, "input")


def why(run: Course, since: int, baseline: Course | None = None, usual_outlier: float = np.nan) -> Finding:
    by = "band" if baseline is not None else "limits"
    return explain_course(Suspect(LAYER, "input", since, 9.0, N, False, by, run, baseline, usual_outlier))


class TestOperand:
    """Why an operand left at a step that is known."""

    FAULTS: ClassVar[dict[str, dict[str, Any]]] = {
        "stale_scale": {"wanted": np.where(AFTER, 3.0, 6.0)},
        "corrupted_scale": {"scale": np.where(AFTER, 12.0, 6.0)},
        "clipping": {"scale": 6 + np.clip(np.arange(N) - AT + 1, 0, 8)},
        "underflow": {"scale": 6 - np.clip(np.arange(N) - AT + 1, 0, 8)},
        "outlier": {"outlier_log2": np.where(AFTER, 12.0, 3.0), "underflow_pct": np.where(AFTER, 9.0, 0.1)},
        "dead": {"amax": np.where(AFTER, 0.0, 4.0)},
        "nonfinite": {"nan": np.where(AFTER, 5, 0)},
    }

    @pytest.mark.parametrize("paired", [True, False])
    @pytest.mark.parametrize("cause", FAULTS)
    def test_a_fault_is_called_by_its_name(self, cause: str, paired: bool) -> None:
        found = why(course(**self.FAULTS[cause]), ONSET, course() if paired else None)
        # Without a baseline, values alone are a hint, until limits or bands make more of them.
        sure = "hint" if cause == "outlier" and not paired else "clear"
        assert said(found) == (cause, sure) and found.advise()
        assert (found.layer, found.role, found.since, found.tensor_name) == (LAYER, "input", ONSET, f"X of {LAYER}")

    @pytest.mark.parametrize("since", [STEPS[0], STEPS[2]])
    @pytest.mark.parametrize(("bits", "named"), [(14.0, True), (5.0, False)])
    def test_one_that_is_so_from_the_start_is_told_by_what_others_have(self, since: int, bits: float, named: bool) -> None:
        so = course(outlier_log2=bits, underflow_pct=9.0)
        assert (why(so, since, usual_outlier=6.5).cause == "outlier") == named
        assert why(so, since).cause != "outlier"

    def test_a_scale_that_jumps_back_to_what_values_ask_for_is_not_corrupted(self) -> None:
        scale = np.where(AFTER, 2.0, 12.0)
        assert why(course(scale=scale, scale_ratio_log2=np.where(AFTER, 2.0, 0.0)), ONSET, course()).cause == "clipping"

    def test_a_scale_that_jumps_with_the_values_is_right(self) -> None:
        both = np.where(AFTER, 12.0, 6.0)
        found = why(course(scale=both, wanted=both, underflow_pct=np.where(AFTER, 5.0, 0.1)), ONSET, course())
        assert found.cause == "underflow" and "its scale is right" in found.evidence

    @pytest.mark.parametrize("scale", [np.inf, 0.0, -1.0])
    def test_a_scale_that_is_none_is_corrupted(self, scale: float) -> None:
        bad = course()
        rows = {"step": STEPS, "layer": LAYER, "role": "input", "scale": np.where(AFTER, scale, 64.0)}
        absent = dict.fromkeys(("scale_ratio_log2", "outlier_log2", "underflow_pct", "overflow_pct"), np.full(N, np.nan))
        bad = Course.build_course(pl.DataFrame(rows | absent | {"amax": 1.0, "nan": 0, "inf": 0}), LAYER, "input")
        assert said(why(bad, ONSET)) == ("corrupted_scale", "clear")

    @pytest.mark.parametrize("since", [STEPS[0], STEPS[1], STEPS[-2], STEPS[-1], STEPS[-1] + 1])
    @pytest.mark.parametrize("fault", [*FAULTS.values(), {}])
    @pytest.mark.parametrize("paired", [True, False])
    def test_the_ends_of_a_run_are_no_error(self, since: int, fault: dict[str, Values], paired: bool) -> None:
        found = why(course(**fault), since, course() if paired else None)
        assert said(found) and found.since == since

    @pytest.mark.parametrize("since", [STEPS[0], ONSET, STEPS[-1]])
    def test_absent_metrics_are_no_evidence(self, since: int) -> None:
        none = np.full(N, np.nan)
        absent = dict.fromkeys(("scale", "scale_ratio_log2", "outlier_log2", "underflow_pct", "overflow_pct", "amax"), none)
        found = why(course(**absent), since, course())
        assert said(found) == ("unknown", "hint") and "its scale is unknown" in found.evidence

    def test_without_a_scale_values_are_judged_and_nothing_is_said_of_it(self) -> None:
        """As under block recipes."""
        none = np.full(N, np.nan)
        found = why(course(scale=none, scale_ratio_log2=none, underflow_pct=np.where(AFTER, 30.0, 0.1)), ONSET, course())
        assert said(found) == ("underflow", "clear") and "its scale is unknown" in found.evidence

    def test_an_error_whose_course_is_not_known_is_told_with_low_confidence(self) -> None:
        found = why(course(scale=np.full(N, np.nan), scale_ratio_log2=np.where(AFTER, 4.0, 0.0)), ONSET)
        assert said(found) == ("clipping", "hint")

    def test_one_sample_behind_the_onset(self) -> None:
        last = np.arange(N) == N - 1
        assert said(why(course(scale=np.where(last, 12.0, 6.0)), STEPS[-1])) == ("corrupted_scale", "clear")

    def test_holes_in_a_metric_do_not_hide_a_jump(self) -> None:
        scale = np.where(AFTER, 12.0, 6.0)
        scale[[AT - 1, AT + 1]] = np.nan
        assert said(why(course(scale=scale), ONSET, course())) == ("corrupted_scale", "clear")

    @pytest.mark.parametrize(("off", "usual"), [(-0.5, -3.0), (0.0, -3.0), (0.5, 3.0), (0.0, 3.0)])
    def test_a_scale_that_is_less_far_off_than_usual_neither_clips_nor_underflows(self, off: float, usual: float) -> None:
        found = why(course(scale=6 + off), ONSET, course(scale=6 + usual))
        assert said(found) == ("unknown", "hint")

    @pytest.mark.parametrize(("off", "usual", "cause"), [(0.5, -3.0, "clipping"), (-0.5, 3.0, "underflow")])
    def test_one_that_is_off_on_the_other_side_does(self, off: float, usual: float, cause: str) -> None:
        assert why(course(scale=6 + off), ONSET, course(scale=6 + usual)).cause == cause

    def test_what_is_usual_is_no_cause(self) -> None:
        """Infinities of a mask, an operand of zeros."""
        assert why(course(inf=3), ONSET, course(inf=3)).cause == "unknown"
        assert why(course(amax=0.0), ONSET, course(amax=0.0)).cause == "unknown"

    @pytest.mark.parametrize("metric", [{"underflow_pct": np.linspace(0, 20, N)}, {"outlier_log2": np.linspace(2, 8, N)}])
    def test_a_trend_alone_is_a_hint_and_no_more(self, metric: dict[str, Values]) -> None:
        assert said(why(course(**metric), ONSET))[1] == "hint"

    def test_the_loss_may_have_brought_values_about_but_not_scales(self) -> None:
        follow = {cause: why(course(**fault), ONSET).may_follow_the_loss for cause, fault in self.FAULTS.items()}
        assert [cause for cause, may in follow.items() if may] == ["outlier", "dead"]
