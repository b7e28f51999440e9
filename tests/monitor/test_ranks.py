"""Several ranks, each a process with a monitor: they take the same steps, dump their own stats, and never wait in vain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import run_script
from ranks import RUNS

from nemo_fp8_debug.core.keys import ROLES
from nemo_fp8_debug.record.dump import dumped_files, read_dump
from nemo_fp8_debug.record.reader import find_record, read_table_rows


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_script(Path(__file__).with_name("ranks.py"), folder)
    return folder


def found_by_ranks(ran: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads((ran / run / f"rank-{rank}.json").read_text()) for rank in range(RUNS[run][0])]


def dumped(folder: Path) -> dict[tuple[int, int], set[str]]:
    """Layers by (step, rank)."""
    storage, found = find_record(folder / "run"), {}
    for _, step, rank, name in dumped_files(storage):
        found.setdefault((step, rank), set()).add(read_dump(storage, name)[0].layer)
    return found


def test_a_control_file_is_obeyed_by_all_ranks_at_the_same_steps(ran: Path) -> None:
    (first, second), folder = found_by_ranks(ran, "control"), ran / "control"
    assert first["sampled"] == second["sampled"] == [0, 10, 11, 12, 20, 30]
    assert dumped(folder) == {(step, 1): {"stage1.0", "stage1.2"} for step in (10, 11, 12)}
    assert not (folder / "elsewhere").exists()
    assert json.loads((folder / "run" / "status.json").read_text())["control"]["last_step"] == 12


def test_triggers_decide_alike_on_all_ranks(ran: Path) -> None:
    """The loss that spikes is known to the last rank only, and the metric past its limit to the first."""
    (first, second), folder = found_by_ranks(ran, "triggers"), ran / "triggers"
    spike, metric = [24, 25, 26], [s for s in second["sampled"] if s > 30]
    assert metric == [metric[0] + i for i in range(3)]  # as soon as the sample of step 30 is measured
    assert first["sampled"] == second["sampled"] == sorted({0, 10, 20, 30, *spike, *metric})
    assert set(dumped(folder)) == {(step, rank) for step in (*spike, *metric) for rank in (0, 1)}
    why = dict(read_table_rows(find_record(folder / "run"), "steps", ["step", "trigger"]).rows())
    assert all("loss spike at step 23: 52.02, median" in why[step] for step in spike)
    assert all("outlier_log2 of X of stage0.0 is" in why[step] for step in metric)


def test_losses_do_not_depend_on_what_is_sampled_and(ran: Path) -> None:
    losses = {run: [rank["losses"] for rank in found_by_ranks(ran, run)] for run in ("control", "triggers")}
    # The triggered input of step 30 is the only difference; it moves no weight, since nothing steps.
    for a, b in zip(losses["control"], losses["triggers"], strict=True):
        assert [x for i, x in enumerate(a) if i != 30] == [x for i, x in enumerate(b) if i != 30]


def test_a_rank_that_cannot_start_stops_all_of_them(ran: Path) -> None:
    for rank in found_by_ranks(ran, "refused"):
        assert "layers is 7; it takes a list of strings" in rank["refused"]


def test_more_ranks(ran: Path) -> None:
    ranks = found_by_ranks(ran, "control of 3")
    assert [rank["sampled"] for rank in ranks] == [[0, 10, 11, 12, 20, 30]] * 3
    # Stages have layers of their own, whose metrics come to the one that writes.
    rows = read_table_rows(find_record(ran / "control of 3" / "run"), "metrics", ["step", "layer", "role"]).rows()
    layers = [f"stage{stage}.{i}" for stage in range(3) for i in (0, 2)]
    assert sorted(rows) == sorted((s, layer, r) for s in ranks[0]["sampled"] for layer in layers for r in ROLES)


def test_the_last_stage_of_a_pipeline_knows_what_all_gradients_are_multiplied_by(ran: Path) -> None:
    record = find_record(ran / "units" / "run")
    steps = read_table_rows(record, "steps", ["step", "grad_scale"]).drop_nulls().rows()
    assert steps == [(step, 0.25) for step in (0, 10, 20, 30)]
    metrics = read_table_rows(record, "metrics").filter(role="grad_output")
    assert {layer.partition(".")[0] for layer in metrics["layer"]} == {"stage0", "stage1"}
    assert metrics["unscaled_amax"].to_list() == [4 * amax for amax in metrics["amax"]]
