"""What is told of a run: the headline, the events in order, and one ranking of tensors, on records of runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_runs import CULPRIT as BROKEN
from compared_runs import VANISHING, broken, healthy, rising
from compared_runs import falling as going_well
from compared_runs import write as write_compared
from diagnosed_runs import CULPRIT, EVERY, FIRST, ONSET, N, corrupted, falling, nothing, write

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.diagnosis.events import KINDS
from nemo_fp8_debug.analysis.diagnosis.ranking import rank_tensors_by_harm
from nemo_fp8_debug.analysis.story.story import ROWS, draw_event_strip, story
from nemo_fp8_debug.analysis.story.summary import write_markdown

DIVERGES = ONSET + 8


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("baseline") / "baseline")


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bad") / "bad", corrupted, falling(left=DIVERGES))


@pytest.fixture(scope="module")
def told(baseline: Path, bad: Path) -> dict[str, Any]:
    return story(diagnose(bad, baseline))


def nan_since_onset(step: int) -> Mapping[str, Any]:
    return {"nan": 7, "nonfinite_order": 3} if step >= ONSET else {}


def keys(tensors: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["layer"], row["role"]) for row in tensors]


class TestACulpritInFp8:
    def test_headline_names_step_tensor_cause_and_gap(self, told: dict[str, Any]) -> None:
        headline = told["headline"]
        assert headline["harm"] == "harmful" and headline["title"].endswith(
            f"The loss diverged at step {headline['since']}."
        )
        assert headline["title"].startswith(f"X of {CULPRIT} went wrong at or before step {ONSET}: ")
        assert abs(headline["since"] - DIVERGES) <= 8
        assert (headline["cause"], headline["about_fp8"]) == ("corrupted_scale", True)
        assert headline["confidence"] in ("medium", "high")
        assert f"X of {CULPRIT} went wrong at or before step {ONSET}" in headline["cause_told"]
        assert "bits too large" in headline["cause_told"]
        assert headline["gap"]["low"] < headline["gap"]["percent"] < headline["gap"]["high"]
        assert headline["change"] == f"Cast X of {CULPRIT} in current-hybrid."

    def test_the_first_tensor_is_the_culprit_and_no_consequence(self, told: dict[str, Any]) -> None:
        first = told["headline"]["first"]
        assert (first["layer"], first["role"], first["tensor"], first["since"]) == (CULPRIT, "input", "X", ONSET)
        assert not first["is_consequence"]

    def test_it_is_blamed_alone_and_ranks_first(self, told: dict[str, Any]) -> None:
        blamed, *others = told["tensors"]
        assert (blamed["layer"], blamed["role"], blamed["harm_rank"], blamed["error_rank"]) == (CULPRIT, "input", 1, 1)
        assert blamed["blamed"] and not any(row["blamed"] for row in others)
        assert blamed["why"].startswith("Blamed: its scale moved, its values hardly did, since step 104")
        assert all(row["why"] == "Not blamed: within the baseline's band." for row in others)

    def test_values_are_medians_of_the_later_half(self, told: dict[str, Any]) -> None:
        later = [corrupted(step) for step in range(0, N, EVERY)][-round(N / EVERY / 2) :]
        expected = float(np.median([row.get("overflow_pct", 0.0) for row in later]))
        values = told["tensors"][0]["values"]["overflow_pct"]
        assert values["run"] == expected and values["baseline"] < expected and values["reference"] is None

    def test_events_are_in_order_with_the_scale_before_the_loss(self, told: dict[str, Any]) -> None:
        events = [(event["step"], event["kind"], event["row"]) for event in told["events"]]
        assert events == sorted(events, key=lambda event: event[0])
        kinds = [kind for _, kind, _ in events]
        assert kinds.index("scale") < kinds.index("loss") and (ONSET, "scale", "X") in events


class TestAnotherCause:
    def test_the_learning_rate_is_named_with_figures_and_a_tensor_as_a_consequence(
        self, baseline: Path, tmp_path: Path
    ) -> None:
        rates = {step: 1e-3 * (4.0 if step >= 60 else 1.0) for step in range(N)}
        good = write(tmp_path / "good", nothing, lr=dict.fromkeys(range(N), 1e-3))
        bad = write(tmp_path / "bad", corrupted, falling(left=80), lr=rates)
        told = story(diagnose(bad, good))
        headline = told["headline"]
        assert (headline["cause"], headline["about_fp8"]) == ("learning_rate", False)
        assert "4 times it" in headline["cause_told"] and "0.004 instead of 0.001" in headline["cause_told"]
        assert headline["first"]["layer"] == CULPRIT and headline["first"]["is_consequence"]
        assert not any(row["blamed"] for row in told["tensors"])
        why = told["tensors"][0]["why"]
        assert why.startswith("Not blamed: out of band since step 104, 44 steps after the learning rate: a consequence")
        assert told["events"][0]["kind"] == "lr"

    def test_a_gradient_that_vanishes_is_badly_held_and_not_blamed(self, tmp_path: Path) -> None:
        def vanishing(step: int) -> list[dict[str, Any]]:
            grown = step / 180
            rows = broken(step)
            gradient = next(row for row in rows if (row["layer"], row["role"]) == VANISHING)
            return [row | {"amax": 1e-3 * (10 ** (-3 * grown) if row is gradient else 1.0)} for row in rows]

        good = write_compared(tmp_path / "good", lambda step: [row | {"amax": 1e-3} for row in healthy(step)], going_well())
        bad = write_compared(tmp_path / "bad", vanishing, rising())
        tensors = {(row["layer"], row["role"]): row for row in story(diagnose(bad, good))["tensors"]}
        assert tensors[BROKEN]["blamed"] and tensors[BROKEN]["harm_rank"] == 1
        held = tensors[VANISHING]
        assert held["error_rank"] == 1 < held["harm_rank"] and not held["blamed"]
        assert "Large relative error, but no effect: this gradient is nearly zero" in held["why"]


class TestWithoutAFault:
    def test_of_a_tensor_that_died_its_zeros_are_told_and_no_error(self, tmp_path: Path) -> None:
        dead, since = VANISHING[0], 120

        def dying(step: int) -> list[dict[str, Any]]:
            zeros = {"amax": 0.0, "mse": 0.0, "relative_error": 0.0, "underflow_pct": 0.0}
            return [row | zeros if row["layer"] == dead and step >= since else row for row in broken(step)]

        runs = (
            write_compared(tmp_path / "baseline", healthy, going_well()),
            write_compared(tmp_path / "bad", dying, rising()),
        )
        told = story(diagnose(runs[1], runs[0]))
        rows = {row["layer"]: row for row in told["tensors"]}
        assert {layer: row["zero_since"] for layer, row in rows.items() if row["zero_since"] is not None} == {dead: since}
        assert rows[dead]["error_rank"] is None and rows[dead]["why"].endswith(
            f"All its values are zero since step {since}."
        )
        assert f"all values zero since {since}" in write_markdown(told)
        alive = [row["error_rank"] for layer, row in rows.items() if layer != dead]
        assert None not in alive

    def test_a_warning_before_the_first_tensor_is_told(self, tmp_path: Path) -> None:
        warned = ONSET - 24

        def early(step: int) -> Mapping[str, Any]:
            """In the baseline too, so that no tensor is out of its band then."""
            return corrupted(ONSET) if step in (warned, warned + EVERY) else {}

        def late(step: int) -> Mapping[str, Any]:
            return {"outlier_log2": 30.0, "mse": 1e-2} if step >= ONSET else early(step)

        baseline = write(tmp_path / "baseline", early)
        told = story(diagnose(write(tmp_path / "bad", late, falling(left=DIVERGES)), baseline))
        assert told["headline"]["first"]["since"] == ONSET
        where = f"X of {CULPRIT} at step {warned}, 24 steps before the first tensor."
        assert told["headline"]["warning"] == where
        assert f"- **Early warning**: {where}" in write_markdown(told).replace("\\_", "_")

    def test_a_clean_pair_follows_with_the_smallest_gap_that_could_be_seen(self, baseline: Path, tmp_path: Path) -> None:
        told = story(diagnose(write(tmp_path / "again", nothing, falling(seed=1)), baseline))
        headline = told["headline"]
        assert headline["cause"] == "none" and headline["confidence"] is None
        assert headline["title"] == "We found nothing wrong. The loss follows the baseline's."
        assert headline["gap"]["visible"] < 2 and headline["cause_told"].startswith("We found nothing wrong.")
        assert headline["first"] is None and headline["change"] is None and headline["since"] is None
        assert not any(row["blamed"] for row in told["tensors"]) and told["events"] == []

    def test_a_run_alone_cannot_tell_and_says_so(self, baseline: Path) -> None:
        headline = story(diagnose(baseline))["headline"]
        assert headline["harm"] == "unknown" and headline["title"] == "We found nothing wrong. The loss does not rise."
        assert headline["gap"] is None and "baseline" in headline["change"]


class TestSeveralFaults:
    def test_two_culprits_are_both_told(self, baseline: Path, tmp_path: Path) -> None:
        both = write(tmp_path / "both", corrupted, falling(left=DIVERGES), culprit=(FIRST, CULPRIT))
        first, second, *others = story(diagnose(both, baseline))["tensors"]
        assert {first["layer"], second["layer"]} == {FIRST, CULPRIT}
        assert first["blamed"] and second["also_wrong"] and not second["blamed"]
        assert second["why"].startswith("Also wrong by then") and not any(row["also_wrong"] for row in others)

    def test_nan_is_named_as_the_first_event(self, baseline: Path, tmp_path: Path) -> None:
        losses = {step: loss if step < ONSET else float("nan") for step, loss in falling().items()}
        told = story(diagnose(write(tmp_path / "nan", nan_since_onset, losses), baseline))
        assert told["headline"]["title"].endswith(f"The loss is NaN or infinite from step {ONSET} on.")
        assert told["headline"]["cause"] == "nonfinite"
        first = told["tensors"][0]
        assert first["blamed"] and first["layer"] == CULPRIT and first["error_rank"] == 1
        assert json.loads(json.dumps(told, allow_nan=False)) == told


class TestRanking:
    def test_forty_of_many_are_told_and_ranks_are_of_all(self, tmp_path: Path) -> None:
        layers = [f"decoder.layers.{i}.mlp.linear_fc{j}" for i in range(8) for j in (1, 2)]
        worst = [layers[i] for i in (10, 13)]

        def lossy(step: int) -> Mapping[str, Any]:
            return {"relative_error": 0.7, "mse": 1e-2}

        good = write(tmp_path / "good", lossy, layers=layers, culprit=worst, changed="grad_output")
        bad = write(tmp_path / "bad", lossy, layers=layers, culprit=worst, changed="grad_output")
        found = diagnose(bad, good)
        tensors = story(found)["tensors"]
        assert len(tensors) == 40 and len(rank_tensors_by_harm(found)) == 48
        ranks = rank_tensors_by_harm(found)
        assert [row["harm_rank"] for row in tensors] == [ranks[key] for key in keys(tensors)]
        assert [row["harm_rank"] for row in tensors] == sorted(row["harm_rank"] for row in tensors)
        held_worst = sorted(tensors, key=lambda row: row["error_rank"])[:2]
        assert sorted(keys(held_worst)) == sorted((layer, "grad_output") for layer in worst)
        assert all(row["why"] == "Large error, and no larger than in the baseline." for row in held_worst)


class TestStripOfText:
    EVENTS = (
        {"step": 100, "kind": "lr", "row": "learning rate"},
        {"step": 150, "kind": "loss", "row": "loss"},
        *({"step": 200, "kind": "values", "row": "X"} for _ in range(3)),
        {"step": 200, "kind": "scale", "row": "dY"},
    )

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_marks_lie_in_order_below_each_other_and_within_the_width(self, width: int) -> None:
        rate, loss, x, gradient, axis, *legend = draw_event_strip(self.EVENTS, width).splitlines()
        assert max(map(len, (rate, loss, x, gradient, axis))) == width
        assert rate.index("▼") < loss.index("▼") < x.index("3") == gradient.index("◆") == width - 1
        assert abs(loss.index("▼") - (rate.index("▼") + width - 1) / 2) <= 1
        assert axis.split()[0] == "step" and axis.split()[1] == "100" and axis.split()[-1] == "200"
        assert "  ".join(legend) == "◆ scale  ● values  ▼ begins  2 to 9, +: number of events"
        assert max(map(len, legend)) <= width

    def test_nothing_and_a_single_step(self) -> None:
        assert draw_event_strip([]) == ""
        assert draw_event_strip(self.EVENTS[:1]).splitlines()[1].split() == ["step", "100"]

    def test_every_event_has_a_row_that_is_drawn(self, told: dict[str, Any]) -> None:
        assert {"loss", "X"} <= {event["row"] for event in told["events"]} <= set(ROWS)


def test_the_page_has_a_mark_for_each_kind_of_event() -> None:
    page = Path(__file__).parents[2] / "nemo_fp8_debug/tensorboard_plugin/frontend/src/story/strip.jsx"
    kinds = re.findall(r"^  (\w+): \{label:", page.read_text(), re.MULTILINE)
    assert sorted(kinds) == sorted(KINDS)
