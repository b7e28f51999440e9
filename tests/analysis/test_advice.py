"""One advice: headline, verdict, plan and command give the same change, the first on the ladder that helps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from diagnosed_runs import CULPRIT, ONSET, corrupted, falling, write
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose
from nemo_fp8_debug.analysis.recommendation.options import CurrentCast, RestoredSetting, candidates
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.numerics.recipe import find_recipe

OPERAND = f"X of {CULPRIT}"


def broken(before: str, after: str, step: int) -> Mapping[str, Any]:
    """One operand is wrong from the onset on, and its recipe is another one from then on."""
    return corrupted(step) | {"recipe": after} if step >= ONSET else {"recipe": before}


def run_cli(*arguments: object) -> str:
    # COLUMNS: the sentence is not broken into lines.
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "1000"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("before", "after", "good", "advice", "recipe"),
    [
        (
            "delayed-hybrid",
            "delayed-hybrid(margin=17)",
            "delayed-hybrid",
            f"Set margin of {OPERAND} from 17 back to 0, as before step {ONSET}.",
            "delayed-hybrid",
        ),
        (
            "mxfp8",
            "delayed-hybrid",
            "mxfp8",
            f"Cast {OPERAND} in mxfp8-e4m3, as before step {ONSET}.",
            "mxfp8-e4m3",
        ),
        (
            "delayed-hybrid(margin=17)",
            "delayed-hybrid(margin=17)",
            "delayed-hybrid",
            f"Set margin of {OPERAND} from 17 back to 0, as in the baseline.",
            "delayed-hybrid",
        ),
        ("bf16", "delayed-hybrid", "bf16", f"Leave {OPERAND} in BF16, as before step {ONSET} (overflow 10% -> 0%).", "bf16"),
        ("delayed-hybrid", "delayed-hybrid", "delayed-hybrid", f"Cast {OPERAND} in current-hybrid.", "current-hybrid"),
    ],
    ids=["margin", "recipe", "baseline", "bf16", "scale"],
)
def test_headline_verdict_plan_and_commands_give_the_same(
    tmp_path: Path, before: str, after: str, good: str, advice: str, recipe: str
) -> None:
    baseline = write(tmp_path / "good", lambda _: {"recipe": good})
    bad = write(tmp_path / "bad", lambda step: broken(before, after, step), falling(left=ONSET + 8))
    found = diagnose(bad, baseline)
    assert found.advice[0] == story(found)["headline"]["change"] == found.to_json()["next"][0] == advice
    told = f"Next: {advice[0].lower()}{advice[1:]}"
    assert told in found.verdict() and told in run_cli("diagnose", bad, "--baseline", baseline)
    plan = found.recommend().plan
    assert [(change.layer, change.recipe, change.roles) for change in plan.changes] == [(CULPRIT, recipe, ("input",))]
    assert found.fix and found.fix.chosen_option.recipe == recipe
    assert told in run_cli("recommend", bad, "--baseline", baseline, "--output", tmp_path / "fix")
    assert json.loads((tmp_path / "fix" / "plan.json").read_text())["changes"][0]["recipe"] == recipe


def test_an_operand_that_is_asked_for_gets_no_advice_of_the_verdict(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad", corrupted, falling(left=ONSET + 8))
    assert json.loads(run_cli("recommend", bad, "--json"))["advice"][0] == diagnose(bad).advice[0]
    plain = json.loads(run_cli("recommend", bad, "--operand", f"{CULPRIT}:dY", "--json"))
    assert plain["advice"] == [] and [each["role"] for each in plain["findings"]] == ["grad_output"]


@pytest.mark.parametrize(
    ("undo", "first"),
    [
        (None, ("margin", "delayed-hybrid(margin=5)")),
        (RestoredSetting("delayed", since=80), ("undo", "delayed-hybrid")),
        (RestoredSetting("delayed(margin=4)", since=80), ("margin", "delayed-hybrid(margin=5)")),
        (RestoredSetting("a framework's own", since=80), ("margin", "delayed-hybrid(margin=5)")),
        (RestoredSetting(None, since=80), ("undo", "delayed-hybrid(margin=4)")),
    ],
    ids=["nothing", "a margin", "the other format alone", "unknown", "a lost scale"],
)
def test_the_first_rung_undoes_what_changed(undo: RestoredSetting | None, first: tuple[str, str]) -> None:
    given = CurrentCast(find_recipe("delayed(margin=4)"), "e4m3", "input", undo)
    tried = [(kind, recipe.name) for kind, recipe in candidates(given)]
    assert tried[0] == first and tried[-1] == ("bf16", "bf16")
    kinds = [kind for kind, _ in tried]
    assert kinds == sorted(kinds, key=["undo", "margin", "history", "current", "format", "block", "bf16"].index)


def test_what_is_undone_is_tried_once() -> None:
    given = CurrentCast(find_recipe("delayed(margin=4)"), "e4m3", "input", RestoredSetting("current", since=80))
    tried = [recipe.name for _, recipe in candidates(given)]
    assert len(set(tried)) == len(tried) and tried[0] == "current-hybrid"
