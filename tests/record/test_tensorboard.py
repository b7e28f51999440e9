"""TensorBoard events, read back with TensorBoard's own reader; and the limit on the number of tags."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import resource
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from samples import FINGERPRINT, ORDINARY, sample
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.record.scalars import STREAMED, ScalarRecorder
from nemo_fp8_debug.record.tensorboard import EventFileWriter, TensorBoardRecorder

#: what tags have instead of metrics whose axis could not be read
STREAMED_AS = {"mse": ("mse_log10", -4.0), "cosine": ("cosine_distance_log10", math.log10(1 - 0.9996))}
FC1, FC2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"
UNLIMITED = 10**6


def two_layers(step: int, **of_fc2: Any) -> Sample:
    return sample(step, [{"layer": FC1}, {"layer": FC1, "role": "grad_output"}, {"layer": FC2, **of_fc2}])


def written(folder: Path, *samples: Sample, losses: Mapping[int, float] | None = None, **options: Any) -> EventAccumulator:
    """The events of a run of these samples, as TensorBoard loads them."""
    recorder = TensorBoardRecorder(EventFileWriter(str(folder)), UNLIMITED, **options)
    recorder.open(FINGERPRINT)
    for each in samples:
        recorder.record(each)
    recorder.record_steps({step: {"loss": loss} for step, loss in (losses or {}).items()})
    recorder.close()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def points(events: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(tag)}


def layout(events: EventAccumulator) -> layout_pb2.Layout:
    last = events.Tensors("custom_scalars__config__")[-1]
    return layout_pb2.Layout.FromString(last.tensor_proto.string_val[0])


class TestEvents:
    def test_each_tensor_has_a_tag_for_each_metric(self, tmp_path: Path) -> None:
        events = written(tmp_path, two_layers(120))
        for metric in STREAMED:
            for role, layer in [("input", FC1), ("grad_output", FC1), ("input", FC2)]:
                name, value = STREAMED_AS.get(metric, (metric, ORDINARY[metric]))
                assert points(events, f"fp8_{name}/{role}/{layer}") == {120: pytest.approx(value, rel=1e-6)}

    def test_values_are_those_of_their_step(self, tmp_path: Path) -> None:
        events = written(tmp_path, two_layers(0, underflow_pct=0.5), two_layers(100, underflow_pct=37.5))
        assert points(events, f"fp8_underflow_pct/input/{FC2}") == {0: 0.5, 100: 37.5}

    def test_each_role_has_its_worst_and_median(self, tmp_path: Path) -> None:
        rows = [
            {"layer": f"layers.{i}", "underflow_pct": u, "cosine": c}
            for i, (u, c) in enumerate([(1, 0.9), (8, 1), (2, 0.99)])
        ]
        events = written(tmp_path, sample(7, rows))
        assert points(events, "fp8/underflow_pct/input/worst") == {7: 8}
        assert points(events, "fp8/underflow_pct/input/median") == {7: 2}
        assert points(events, "fp8/cosine_distance_log10/input/worst") == {7: pytest.approx(-1)}
        assert points(events, "fp8/cosine_distance_log10/input/median") == {7: pytest.approx(-2)}

    def test_an_error_of_zero_has_no_logarithm_and_no_tag(self, tmp_path: Path) -> None:
        events = written(tmp_path, two_layers(0, mse=0.0), two_layers(10, mse=1e-6))
        assert points(events, f"fp8_mse_log10/input/{FC2}") == {10: pytest.approx(-6)}

    def test_the_summary_comes_first_in_time_series(self, tmp_path: Path) -> None:
        events = written(tmp_path, two_layers(0), two_layers(1), two_layers(2, underflow_pct=2.0, nan=7))
        tags = sorted({tag.partition("/")[0] for tag in events.Tags()["scalars"]} | {"0", "Loss", "consumed_samples"})
        assert tags[1] == "00 FP8 start here"
        assert points(events, "00 FP8 start here/underflow %, worst X")[2] == 2
        assert points(events, "00 FP8 start here/NaN count") == {0: 0, 1: 0, 2: 7}
        assert list(points(events, "00 FP8 start here/early warning")) == [2]
        text = events.Tensors("fp8_debug/worst_tensors/text_summary")[-1].tensor_proto.string_val[0].decode()
        assert f"| underflow_pct/input | {FC2} |" in text

    @pytest.mark.parametrize("absent", [None, math.nan, math.inf, -math.inf])
    def test_what_is_absent_or_not_finite_is_not_written(self, tmp_path: Path, absent: float | None) -> None:
        events = written(tmp_path, two_layers(0, sqnr_db=absent), two_layers(10, sqnr_db=20.0))
        assert points(events, f"fp8_sqnr_db/input/{FC2}") == {10: 20.0}
        assert points(events, "fp8/sqnr_db/input/worst") == pytest.approx({0: 31.7, 10: 20.0})

    def test_a_metric_that_no_tensor_has_gets_no_tag(self, tmp_path: Path) -> None:
        events = written(tmp_path, sample(0, [{"cosine": None}]))
        assert [tag for tag in events.Tags()["scalars"] if "cosine" in tag] == []

    def test_the_loss_is_written_only_where_no_host_does(self, tmp_path: Path) -> None:
        losses = {0: 4.0, 1: 3.5}
        assert points(written(tmp_path / "a", losses=losses, log_losses=True), "loss") == losses
        assert written(tmp_path / "b", losses=losses).Tags()["scalars"] == []

    def test_the_fingerprint_is_shown_as_text(self, tmp_path: Path) -> None:
        (event,) = written(tmp_path).Tensors("fp8_debug/fingerprint/text_summary")
        text = event.tensor_proto.string_val[0].decode()
        assert "### versions" in text
        assert "| torch | 2.8.0 |" in text
        assert "| measured_against | delayed-hybrid |" in text


class TestWhatIf:
    def test_each_recipe_has_its_worst_and_median(self, tmp_path: Path) -> None:
        rows = [{"layer": layer, "recipe": "current-e4m3", "relative_error": e} for layer, e in ((FC1, 0.01), (FC2, 0.05))]
        tables = {**two_layers(3).tables, "what_if": sample(3, rows).operand_columns}
        what_if = dataclasses.replace(two_layers(3), tables=tables)
        events = written(tmp_path, what_if)
        assert points(events, "fp8_what_if/relative_error/input/current-e4m3/worst") == {3: pytest.approx(0.05)}
        assert points(events, "fp8_what_if/relative_error/input/current-e4m3/median") == {3: pytest.approx(0.03)}

    def test_without_any_there_are_no_tags(self, tmp_path: Path) -> None:
        assert not [tag for tag in written(tmp_path, two_layers(3)).Tags()["scalars"] if "what_if" in tag]


class TestLayout:
    def test_each_role_has_a_chart_for_each_of_its_worst_layers(self, tmp_path: Path) -> None:
        rows = [{"layer": f"layers.{i}", "underflow_pct": float(i)} for i in range(8)]
        events = written(tmp_path, sample(0, rows))
        category = layout(events).category[1]
        charts = {chart.title: list(chart.multiline.tag) for chart in category.chart}
        assert category.title == "FP8 X (input)"
        titles = [title for title in charts if title.startswith("underflow %")]
        assert titles == [f"underflow %: X of layers.{i}" for i in (7, 6, 5)]
        assert not any("cosine" in title for title in charts)
        tags = events.Tags()["scalars"]
        for patterns in charts.values():
            assert sum(bool(re.match(pattern, tag)) for pattern in patterns for tag in tags) == 1

    def test_the_loss_stands_beside_the_summary(self, tmp_path: Path) -> None:
        events = written(tmp_path, two_layers(0), losses={0: 4.0}, log_losses=True)
        category, tags = layout(events).category[0], events.Tags()["scalars"]
        assert category.title == "FP8: start here"
        assert [chart.title for chart in category.chart][:3] == ["loss", "underflow %, worst X", "underflow %, worst dY"]
        for chart in category.chart:
            assert sum(bool(re.match(chart.multiline.tag[0], tag)) for tag in tags) == 1

    def test_there_is_a_category_for_each_role(self, tmp_path: Path) -> None:
        titles = [category.title for category in layout(written(tmp_path, two_layers(0))).category]
        assert titles == ["FP8: start here", "FP8 X (input)", "FP8 dY (grad_output)"]

    def test_follows_the_worst_layers(self, tmp_path: Path) -> None:
        def ranked(step: int, worst: int) -> Sample:
            rows = [{"layer": f"layers.{i}", "mse": 1.0 if i == worst else i * 1e-6} for i in range(9)]
            return sample(step, rows)

        charts = layout(written(tmp_path, ranked(0, 8), ranked(10, 0))).category[1].chart
        (tags,) = [list(chart.multiline.tag) for chart in charts if chart.title == "log10 of MSE: X of layers.0"]
        assert tags == [r"fp8_mse_log10/input/layers\.0$"]

    @pytest.mark.parametrize(
        "tag", ["loss", "train_loss", "reduced_train_loss", "train/loss", "training_loss", "train_loss_step"]
    )
    def test_the_loss_chart_finds_the_names_that_hosts_give_it(self, tmp_path: Path, tag: str) -> None:
        category = layout(written(tmp_path, sample(0, [{}]))).category[0]
        (pattern,) = category.chart[0].multiline.tag
        assert re.match(pattern, tag)
        assert not re.match(pattern, "val_loss")


class Tags:
    """What was written at each step of single tensors."""

    def __init__(self, max_tags: int) -> None:
        self.steps: list[set[str]] = []
        self.recorder = ScalarRecorder(self._write, max_tags)

    def _write(self, tags: dict[str, float], step: int) -> None:
        self.steps.append({tag for tag in tags if tag.startswith("fp8_")})

    def record(self, rows: list[dict[str, Any]]) -> set[str]:
        """The tags written for a step of these rows."""
        self.recorder.record(sample(len(self.steps), rows))
        return self.steps[-1]

    @property
    def total(self) -> int:
        return len(set().union(*self.steps))


def shuffled(rng: random.Random, layers: list[int], roles: list[str]) -> list[dict[str, Any]]:
    """Rows whose metrics, and so whose order, are anew at random."""
    return [
        {"layer": f"layers.{i}", "role": role} | {metric: rng.random() for metric in STREAMED}
        for role in roles
        for i in layers
    ]


ROLES = ["input", "weight", "grad_output"]


class TestTagBudget:
    def test_all_tensors_have_tags_where_the_budget_allows(self) -> None:
        tags = Tags(max_tags=5 * len(STREAMED))
        assert len(tags.record([{"layer": f"layers.{i}"} for i in range(5)])) == 5 * len(STREAMED)

    def test_only_the_worst_of_each_role_have_tags_where_it_does_not(self) -> None:
        tags = Tags(max_tags=3 * len(ROLES) * len(STREAMED))
        layers = [{"layer": f"layers.{i}", "underflow_pct": float(i), "cosine": 1 - i / 10} for i in range(9)]
        got = tags.record([layer | {"role": role} for role in ROLES for layer in layers])
        for metric in ("underflow_pct", "cosine_distance_log10"):
            assert {tag for tag in got if tag.startswith(f"fp8_{metric}/")} == {
                f"fp8_{metric}/{role}/layers.{i}" for role in ROLES for i in (6, 7, 8)
            }

    @pytest.mark.parametrize("max_tags", [0, 1, 38, 39, 200, 1000])
    def test_is_kept_over_many_steps(self, max_tags: int) -> None:
        tags, rng = Tags(max_tags), random.Random(0)
        for _ in range(20):
            tags.record(shuffled(rng, list(range(30)), ROLES))
        assert tags.total <= max_tags

    def test_is_shared_evenly_by_metrics_and_roles(self) -> None:
        tags, rng = Tags(max_tags=2 * len(ROLES) * len(STREAMED) + 20), random.Random(0)
        for _ in range(20):
            tags.record(shuffled(rng, list(range(30)), ROLES))
        assert Counter(tag.rpartition("/")[0] for tag in set().union(*tags.steps)) == {
            f"fp8_{STREAMED_AS.get(metric, (metric,))[0]}/{role}": 2 for metric in STREAMED for role in ROLES
        }

    def test_is_kept_where_other_layers_are_seen_in_each_step(self) -> None:
        tags, rng = Tags(max_tags=10 * len(STREAMED)), random.Random(0)
        for _ in range(20):  # experts without tokens are not seen
            tags.record(shuffled(rng, rng.sample(range(100), 10), ["input"]))
        assert tags.total <= 10 * len(STREAMED)

    def test_is_kept_where_a_role_appears_later(self) -> None:
        tags, rng = Tags(max_tags=10 * len(STREAMED)), random.Random(0)
        tags.record(shuffled(rng, list(range(10)), ["weight"]))
        tags.record(shuffled(rng, list(range(10)), ROLES))
        assert tags.total <= 10 * len(STREAMED)

    def test_a_tag_once_written_is_written_in_every_later_step(self) -> None:
        tags, rng = Tags(max_tags=200), random.Random(0)
        for _ in range(20):
            tags.record(shuffled(rng, list(range(30)), ROLES))
        assert tags.steps[0]
        for earlier, later in zip(tags.steps, tags.steps[1:], strict=False):
            assert earlier <= later

    def test_a_small_budget_still_shows_the_worst_and_median(self, tmp_path: Path) -> None:
        recorder = TensorBoardRecorder(EventFileWriter(str(tmp_path)), max_tags=0)
        recorder.record(two_layers(0))
        recorder.close()
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert len([tag for tag in events.Tags()["scalars"] if tag.startswith("fp8")]) == 2 * 2 * len(STREAMED)


def test_while_nothing_can_be_written_one_empty_file_is_left_at_most(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    events = EventFileWriter(str(tmp_path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as on a full disk, a file can be made and not written
    try:
        for step in range(5):
            events.add_text("a", "lost", step)
            events.flush()
        left = list(tmp_path.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(left) <= 1
    events.add_text("a", "kept", 5)
    events.flush()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [event.step for event in accumulator.Tensors("a/text_summary")] == [5]
    assert len(list(tmp_path.iterdir())) == 1
