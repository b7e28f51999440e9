"""A model of 128 experts stays readable: names, tags, the printed table, triggers and the comparison of two runs."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from samples import FINGERPRINT, sample
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from typer.testing import CliRunner

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.story.summary import serialize_comparison, summarize
from nemo_fp8_debug.cli import app
from nemo_fp8_debug.core.keys import SHOWN_AS
from nemo_fp8_debug.core.layer_names import (
    compile_layer_patterns,
    find_expert_aggregate,
    is_expert_aggregate,
    limit_experts_per_layer,
)
from nemo_fp8_debug.core.sample import Sample
from nemo_fp8_debug.options.trigger_rules import parse_trigger_rule
from nemo_fp8_debug.record.console_table import ConsoleTableRecorder
from nemo_fp8_debug.record.scalars import EXPERTS_SHOWN, STREAMED, ScalarRecorder
from nemo_fp8_debug.record.tensorboard import EventFileWriter, TensorBoardRecorder
from nemo_fp8_debug.record.writer import RunRecordWriter

LAYERS, EXPERTS, ROLES = 4, 128, ("input", "weight", "grad_output")
GEMMS = ("linear_fc1", "linear_fc2")
#: of a role
FOLDS, DENSE = LAYERS * len(GEMMS), LAYERS


def name_of(layer: int, expert: int | str, gemm: str) -> str:
    return f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{gemm}"


def moe(step: int, rng: random.Random, **metrics: float) -> Sample:
    """Metrics of every tensor at random; those of an aggregate lie between those of its experts."""
    rows: list[dict[str, Any]] = []
    for role in ROLES:
        rows += [
            {"layer": f"decoder.layers.{i}.self_attention.linear_proj", "role": role} | drawn(rng, 0, 1) | metrics
            for i in range(LAYERS)
        ]
        for gemm in GEMMS:
            for i in range(LAYERS):
                about = {"role": role, "gemm": gemm}
                experts = [{"layer": name_of(i, e, gemm), "experts": 1} | drawn(rng, 0, 1) for e in range(EXPERTS)]
                aggregate = {"layer": name_of(i, "*", gemm), "experts": EXPERTS} | drawn(rng, 0.4, 0.6)
                rows += [row | about | metrics for row in (*experts, aggregate)]
    return sample(step, rows, loss=2.5)


def drawn(rng: random.Random, low: float, high: float) -> dict[str, float]:
    return {metric: rng.uniform(low, high) for metric in STREAMED}


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "decoder.layers.3.mlp.experts.local_experts.{}.linear_fc1",
            "decoder.layers.3.mlp.experts.linear_fc1.{}",
            "model.layers.3.block_sparse_moe.experts.{}.w1",
            "model.layers.3.mlp.experts.{}.gate_proj",
            "layers.3.mlp.deepspeed_moe.experts.deepspeed_experts.{}.dense.fc1",
            "experts.{}",
        ],
    )
    def test_experts_of_a_layer_share_a_name(self, name: str) -> None:
        assert find_expert_aggregate(name.format(17)) == find_expert_aggregate(name.format(0)) == name.format("*")
        assert is_expert_aggregate(name.format("*"))
        assert not is_expert_aggregate(name.format(17))
        assert find_expert_aggregate(name.format("*")) is None

    @pytest.mark.parametrize(
        "name",
        [
            "decoder.layers.3.mlp.linear_fc1",
            "decoder.layers.3.mlp.shared_experts.linear_fc1",
            "decoder.layers.3.mlp.shared_experts.0.linear_fc1",
            "model.layers.17.mlp.gate",
            "experts",
            "mlp.experts.router",
            "noexperts.3.w1",
            "17",
        ],
    )
    def test_others_have_none(self, name: str) -> None:
        assert find_expert_aggregate(name) is None
        assert not is_expert_aggregate(name)

    def test_the_name_is_a_pattern_for_its_experts(self) -> None:
        matches = compile_layer_patterns([name_of(1, "*", "linear_fc1")])
        assert matches(name_of(1, 17, "linear_fc1"))
        assert not matches(name_of(1, 17, "linear_fc2"))
        assert not matches(name_of(2, 17, "linear_fc1"))

    def test_a_few_of_each(self) -> None:
        names = ["a", *(f"experts.{i}.w" for i in range(9)), "b", *(f"experts.{i}.v" for i in range(2)), "experts.*.w"]
        assert limit_experts_per_layer(names, find_expert_aggregate, 2) == [
            *("a", "experts.0.w", "experts.1.w", "b", "experts.0.v", "experts.1.v", "experts.*.w")
        ]


class TestTensorBoard:
    def tags(self, steps: int, max_tags: int) -> list[dict[str, float]]:
        written: list[dict[str, float]] = []
        recorder = ScalarRecorder(lambda tags, step: written.append(tags), max_tags)
        rng = random.Random(0)
        for step in range(steps):
            recorder.record(moe(step, rng))
        return written

    def test_a_layer_has_its_fold_and_a_few_of_the_worst_experts(self) -> None:
        (tags,) = self.tags(1, 5000)
        single = [tag for tag in tags if tag.startswith("fp8_")]
        assert len(single) == len(STREAMED) * len(ROLES) * (DENSE + FOLDS * (1 + EXPERTS_SHOWN)) < 5000
        of_first = "fp8_mse_log10/input/" + name_of(0, "", "")[:-1]
        worst = sorted((tags[t] for t in tags if t.startswith(of_first)), reverse=True)
        assert len(worst) == 2 * (1 + EXPERTS_SHOWN)
        of = moe(0, random.Random(0)).operand_columns
        mse = [
            v for n, r, v in zip(of["layer"], of["role"], of["mse"], strict=True) if (find_expert_aggregate(n), r) == FIRST
        ]
        got = sorted((v for t, v in tags.items() if re.fullmatch(EXPERT_TAG, t)), reverse=True)
        assert got == pytest.approx([math.log10(value) for value in sorted(mse, reverse=True)[:EXPERTS_SHOWN]])

    def test_they_stay_few_however_often_the_worst_changes(self) -> None:
        of_all_steps = set().union(*self.tags(4, 5000))
        found = Counter(
            find_expert_aggregate(tag) for tag in of_all_steps if tag.startswith("fp8_") and find_expert_aggregate(tag)
        )
        assert set(found.values()) == {EXPERTS_SHOWN}
        assert len(found) == len(STREAMED) * len(ROLES) * FOLDS

    @pytest.mark.parametrize("max_tags", [0, 100, len(STREAMED) * len(ROLES) * (DENSE + FOLDS)])
    def test_beyond_the_budget_single_experts_go_first(self, max_tags: int) -> None:
        single = {tag for tags in self.tags(2, max_tags) for tag in tags if tag.startswith("fp8_")}
        assert len(single) <= max_tags
        assert len(single) >= max_tags // len(STREAMED) // len(ROLES) * len(STREAMED) * len(ROLES)
        assert not [tag for tag in single if find_expert_aggregate(tag)]

    def test_worst_and_median_are_of_tensors(self) -> None:
        (tags,) = self.tags(1, 5000)
        of = moe(0, random.Random(0)).operand_columns
        mse = [
            v
            for n, r, v in zip(of["layer"], of["role"], of["mse"], strict=True)
            if r == "input" and not is_expert_aggregate(n)
        ]
        assert len(mse) == DENSE + FOLDS * EXPERTS
        assert tags["fp8/mse_log10/input/worst"] == pytest.approx(math.log10(max(mse)))

    def test_charts_show_the_worst_expert_of_a_layer_only(self, tmp_path: Path) -> None:
        recorder = TensorBoardRecorder(EventFileWriter(str(tmp_path)), 5000)
        recorder.record(moe(0, random.Random(0)))
        recorder.close()
        events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
        events.Reload()
        (layout,) = events.Tensors("custom_scalars__config__")
        for category in layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0]).category[1:]:
            tags = [tag.replace("\\", "").removesuffix("$") for chart in category.chart for tag in chart.multiline.tag]
            metrics = Counter(tag.partition("/")[0] for tag in tags)
            assert len(metrics) == 6 and set(metrics.values()) == {3}
            assert max(Counter(filter(None, map(find_expert_aggregate, tags))).values()) == 1


FIRST = (name_of(0, "*", "linear_fc1"), "input")
EXPERT_TAG = "fp8_mse_log10/input/" + re.escape(name_of(0, "N", "linear_fc1")).replace("N", r"\d+")


def test_the_table_shows_the_worst_expert_of_a_layer_only() -> None:
    out = StringIO()
    ConsoleTableRecorder(60, out).record(moe(0, random.Random(0)))
    lines = out.getvalue().splitlines()
    assert "60 of 60 tensors, worst first" in lines[0]
    roles = {shown: role for role, shown in SHOWN_AS.items() if role in ROLES}
    rows = [(layer, roles[tensor]) for tensor, layer, *_ in (line.split() for line in lines[2:])]
    assert len(rows) == 60 == len(ROLES) * (DENSE + 2 * FOLDS)
    assert set(
        Counter((find_expert_aggregate(layer), role) for layer, role in rows if find_expert_aggregate(layer)).values()
    ) == {1}
    assert sum(is_expert_aggregate(layer) for layer, _ in rows) == len(ROLES) * FOLDS


class TestTriggers:
    def test_experts_past_a_limit_are_named_in_one_sentence(self) -> None:
        of = moe(0, random.Random(0), underflow_pct=30.0)
        assert parse_trigger_rule("underflow_pct > 20").describe_violation(of) == (
            "underflow_pct of X of decoder.layers.0.self_attention.linear_proj is 30 (> 20)"
        )
        experts = sample(0, [{"layer": name_of(0, e, "linear_fc1"), "mse": float(e)} for e in range(8)])
        assert parse_trigger_rule("mse > 4").describe_violation(experts) == (
            f"mse of X of {name_of(0, 5, 'linear_fc1')} is 5 (> 4), and of 2 more experts of the layer"
        )
        assert (
            parse_trigger_rule("mse > 6").describe_violation(experts)
            == f"mse of X of {name_of(0, 7, 'linear_fc1')} is 7 (> 6)"
        )

    def test_a_fold_alone_fires_nothing(self) -> None:
        """Its range is that of all experts together, which none of them may have."""
        rows = [{"layer": name_of(0, e, "linear_fc1")} for e in range(2)]
        of = sample(0, [*rows, {"layer": name_of(0, "*", "linear_fc1"), "dynamic_range_log2": 40.0}])
        assert parse_trigger_rule("dynamic_range_log2 > 30").describe_violation(of) is None

    def test_the_first_with_nan_is_an_expert(self) -> None:
        bad = {"nan": 3, "nonfinite_order": 7}
        rows = [{"layer": name_of(0, e, "linear_fc1")} | (bad if e == 1 else {}) for e in range(2)]
        of = sample(0, [*rows, {"layer": name_of(0, "*", "linear_fc1")} | bad])
        assert f"X of {name_of(0, 1, 'linear_fc1')} (3 NaN" in of.describe_anomalies


def written(folder: Path, worst: int | None, nan: bool = False) -> Path:
    """A record in which one expert of layer 2 is off, and its aggregate a little."""
    record = RunRecordWriter(folder)
    record.open(FINGERPRINT)
    for step in range(0, 40, 10):
        rows = []
        for i in range(LAYERS):
            for e in (*range(EXPERTS), "*"):
                harm = {"underflow_pct": 40.0 if e == worst else 5.0, "mse": 1e-2} if i == 2 and e in (worst, "*") else {}
                if nan and harm:
                    harm = {"nan": 5, "nonfinite_order": 3}
                rows.append({"layer": name_of(i, e, "linear_fc1")} | (harm if worst is not None else {}))
        record.record(sample(step, rows))
    record.close()
    return folder


class TestCompare:
    def test_folds_are_ranked_and_the_worst_expert_is_named(self, tmp_path: Path) -> None:
        found = compare(written(tmp_path / "bad", 77), written(tmp_path / "good", None))
        assert found.tensors["layer"].to_list()[0] == name_of(2, "*", "linear_fc1")
        assert len(found.tensors) == LAYERS
        assert len(found.experts) == LAYERS * EXPERTS
        assert (
            f"The tensor that drifted farthest is X of {name_of(2, '*', 'linear_fc1')}: MSE x 100, "
            "underflow 0.1% -> 5%, overflow 0% -> 0%. "
            f"Of its experts, the tensor that drifted farthest is X of {name_of(2, 77, 'linear_fc1')}: MSE x 100, "
            "underflow 0.1% -> 40%"
        ) in summarize(found)
        assert len(serialize_comparison(found)["experts"]) == LAYERS * EXPERTS

    def test_the_expert_that_first_held_nan_is_named(self, tmp_path: Path) -> None:
        found = compare(written(tmp_path / "bad", 9, nan=True), written(tmp_path / "good", None))
        assert (
            f"The first tensor with NaN or infinity is X of {name_of(2, '*', 'linear_fc1')}, at step 0. "
            f"Of its experts, the first tensor with NaN or infinity is X of {name_of(2, 9, 'linear_fc1')}, at step 0."
        ) in summarize(found)

    def test_the_printed_ranking_has_no_single_expert(self, tmp_path: Path) -> None:
        arguments = ["compare", str(written(tmp_path / "bad", 77)), "--baseline", str(written(tmp_path / "good", None))]
        result = CliRunner().invoke(app, [*arguments, "--top", "50"], env={"COLUMNS": "250"})
        assert result.exit_code == 0
        rows = [line for line in result.output.splitlines() if re.match(r"(\s*\d+ +)?\w+ +\S*local_experts", line)]
        assert [line for line in rows if name_of(3, "*", "linear_fc1") in line]
        # every layer stands in the ranking, the bad one in the order of onsets too
        assert len(rows) == LAYERS + 1
        assert all(".*." in line for line in rows)
