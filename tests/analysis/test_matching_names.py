"""Runs whose layers have other names or sizes, or whose models differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from samples import FINGERPRINT, sample
from unlike_runs import CULPRIT, FOREIGN, first_out, foreign, megatron, rows, run_cli, write

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.diagnosis.diagnose import recommend
from nemo_fp8_debug.errors import RecordError
from nemo_fp8_debug.record.writer import RunRecordWriter


class TestNames:
    @pytest.mark.parametrize("prefix", ["model.", "module.language_model."])
    def test_a_prefix_is_matched(self, tmp_path: Path, prefix: str) -> None:
        baseline = write(tmp_path / "baseline")
        bad = write(tmp_path / "bad", since=100, named=lambda depth, kind: prefix + megatron(depth, kind))
        for one, other in ((baseline, bad), (bad, baseline)):
            assert any(note.startswith("Names were matched after ") for note in compare(other, one).notes)
        assert first_out(baseline, bad) == (*CULPRIT, 100)

    def test_layers_are_matched_one_to_one(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline"), write(tmp_path / "bad", since=100, named=foreign)
        assert first_out(baseline, bad) == (*CULPRIT, 100)
        (told,) = compare(bad, baseline).notes
        assert "matched one to one by order and size of W" in told and "c_out for linear_fc2" in told

    @pytest.mark.parametrize("other", [{"wider": 2}, {"depths": 3}])
    def test_layers_of_another_shape_are_not(self, tmp_path: Path, other: dict[str, int]) -> None:
        baseline, bad = write(tmp_path / "baseline"), write(tmp_path / "bad", named=foreign, **other)
        with pytest.raises(RecordError, match="no sampled step and tensor in common"):
            compare(bad, baseline)

    def test_by_hand(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline"), write(tmp_path / "bad", since=100, named=foreign)
        rename = [r"transformer\.h=decoder.layers", *(rf"{new}$=linear_{old[7:]}" for old, new in FOREIGN.items())]
        rename += [r"(qkv|proj)$=self_attention.linear_\1", r"linear_self=self", r"(fc\d)$=mlp.linear_\1", r"linear_mlp=mlp"]
        result = run_cli(baseline, bad, *(f"--rename={r}" for r in rename), "--json")
        found = json.loads(result.stdout)
        assert found["out_of_band"][0]["layer"] == CULPRIT[0] and found["notes"] == [
            "8 layers of the run were renamed as asked."
        ]

    @pytest.mark.parametrize(
        ("rename", "told"),
        [
            ("decoder", "is no renaming rule: write REGEX=REPLACEMENT"),
            ("(=x", "invalid rule"),
            (r"decoder=\7", "invalid group reference 7"),
            (r"\d=0", "would both be named"),
            ("encoder=decoder", "no layer of the run matches encoder=decoder"),
        ],
    )
    def test_what_cannot_be_renamed_is_refused(self, tmp_path: Path, rename: str, told: str) -> None:
        baseline = write(tmp_path / "baseline")
        result = run_cli(baseline, baseline, "--rename", rename)
        assert result.exit_code == 1 and told in result.stderr and result.stderr.count("\n") == 1


class TestModels:
    def test_another_model_is_refused(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline"), write(tmp_path / "bad", wider=2)
        with pytest.raises(RecordError, match=r"are runs of different models: W of .* has 4096 values "):
            compare(bad, baseline)

    def test_a_layer_of_another_size_is_left_out(self, tmp_path: Path) -> None:
        def padded(depth: int, kind: str) -> str:
            return "output_layer.linear_fc1" if (depth, kind) == (0, "mlp.linear_qkv") else megatron(depth, kind)

        baseline = write(tmp_path / "baseline")
        record = RunRecordWriter(tmp_path / "bad")
        record.open(FINGERPRINT)
        other = "decoder.layers.0.mlp.linear_fc1"
        for step in range(0, 200, 10):
            record.record(sample(step, [r | ({"n": 99} if r["layer"] == other else {}) for r in rows()]))
        record.close()
        found = compare(tmp_path / "bad", baseline)
        assert other not in found.tensors["layer"] and len(found.tensors) == 7 * 3
        assert (
            found.notes[0]
            == f"1 layers are left out because they differ in size: W of {other} has 4096 values in the baseline "
            "and 99 in the run."
        )

    def test_layers_of_one_run_alone_are_told(self, tmp_path: Path) -> None:
        baseline, bad = write(tmp_path / "baseline"), write(tmp_path / "bad", depths=3)
        assert compare(bad, baseline).notes == (
            "The baseline has 2 layers and the run 3: layers of the same name are at different depths, which "
            "may explain differences between them.",
            "4 layers are only in the run, for example decoder.layers.2.self_attention.linear_qkv.",
        )


def test_a_plan_is_for_the_model_that_was_recorded(tmp_path: Path) -> None:
    """Names of the baseline are none of its layers': `rescue` would refuse them."""
    good = write(tmp_path / "good")
    bad = write(tmp_path / "bad", since=100, named=lambda depth, kind: f"model.{megatron(depth, kind)}")
    found = recommend(bad, good)
    assert [(change.layer, change.roles) for change in found.plan.changes] == [(f"model.{CULPRIT[0]}", (CULPRIT[1],))]
    assert found.to_json()["findings"][0]["layer"] == f"model.{CULPRIT[0]}"
