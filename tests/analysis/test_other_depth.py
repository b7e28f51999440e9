"""A baseline of another depth: gradients come from the output, so they are held against the layer as far from it too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from runs_of_depth import of_depth, write_of_depth

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.comparison.layer_matching import match_layers_from_output
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose


@pytest.mark.parametrize(("mine", "theirs"), [(3, 2), (2, 3), (5, 3)])
def test_a_layer_that_is_last_in_one_run_alone_is_not_accused(tmp_path: Path, mine: int, theirs: int) -> None:
    run, baseline = write_of_depth(tmp_path / "run", mine), write_of_depth(tmp_path / "baseline", theirs)
    assert diagnose(run, baseline).culprit is None and compare(run, baseline).out_of_band.is_empty()


def test_inputs_are_those_of_the_layer_as_far_from_the_input(tmp_path: Path) -> None:
    run, baseline = (write_of_depth(tmp_path / str(depth), depth, "input") for depth in (3, 2))
    assert compare(run, baseline).out_of_band["layer"].to_list() == [of_depth(1)]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_gradient_that_is_out_beside_both_layers_is_named(tmp_path: Path, culprit: int) -> None:
    run, baseline = write_of_depth(tmp_path / "run", 4, extra={culprit: 20.0}), write_of_depth(tmp_path / "baseline", 3)
    found = compare(run, baseline).out_of_band
    assert found["layer"].to_list() == [of_depth(culprit)]
    named = diagnose(run, baseline).culprit
    assert named is not None and named.tensor_name == f"dY of {of_depth(culprit)}"


@pytest.mark.parametrize(
    ("baseline", "run", "found"),
    [
        (["a.0.q", "a.1.q"], ["a.0.q", "a.1.q"], {}),
        (["a.0.q", "a.1.q", "out"], ["a.0.q", "out"], {"a.0.q": "a.1.q"}),
        # Each stack by itself, and experts by their layer.
        (["enc.0.q", "enc.1.q", "dec.0.q"], ["enc.0.q", "dec.0.q"], {"enc.0.q": "enc.1.q"}),
        (["l.0.experts.7.up", "l.1.experts.7.up"], ["l.0.experts.7.up"], {"l.0.experts.7.up": "l.1.experts.7.up"}),
        # What is elsewhere too is not there: a first layer that is dense, as of DeepSeek.
        (["l.0.fc1", "l.1.router", "l.2.router"], ["l.0.fc1", "l.1.router"], {"l.1.router": "l.2.router"}),
        (["0.q", "1.q"], ["0.q"], {"0.q": "1.q"}),
        (["a.0.q"], ["b.0.q", "b.1.q"], {}),
    ],
)
def test_layers_are_matched_from_the_output(baseline: Sequence[str], run: Sequence[str], found: dict[str, str]) -> None:
    assert match_layers_from_output(baseline, run) == found
