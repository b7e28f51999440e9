"""The checker of sentences: what is false is caught, and what is true is not."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from fault_injection.known import Fault, Known
from fault_injection.raw_losses import Losses
from fault_injection.sentences import Checked, N, check_texts, read_number

from nemo_fp8_debug.core.text import format_number

_STEPS = 200
_FALLS = 4 * np.exp(-np.arange(_STEPS) / 60) + 1
_NOISE = np.random.default_rng(0).normal(0, 0.01, (2, _STEPS))


def make_known(begins: int | None = 100, rise: float = 0.5) -> Known:
    """Return a run whose X of `layers.0.fc1` goes wrong at a step and stays wrong, and whose loss rises with it."""
    losses = _FALLS + _NOISE[0] + (0 if begins is None else rise * (np.arange(_STEPS) >= begins))
    fault = (
        None
        if begins is None
        else Fault(begins, begins, stays=True, culprits=("X of layers.0.fc1",), kind="scale", bits=3.0)
    )
    return Known(
        Losses.of(losses.tolist()),
        Losses.of((_FALLS + _NOISE[1]).tolist()),
        same_batches=False,
        fault=fault,
        harmed=begins is not None,
        sampled=tuple(range(0, _STEPS, 10)),
        layers=frozenset({"layers.0.fc1", "layers.0.fc2"}),
    )


TRUE = (
    "X of layers.0.fc1 went wrong at or before step 100 (high confidence): its scale moved, its values hardly did.",
    "X of layers.0.fc1 went wrong at or before step 100: its scale jumped. The scale is 3.0 bits too large.",
    "The loss rose by 32.1% at step 100 and ended 43.1% above the baseline's (95% interval 42 to 44%; batches not matched).",
    "The loss departed from the baseline's around step 100.",
    "Unusual: dY of layers.0.fc2 since step 40 (underflow 3% instead of 1%).",
)
#: by what is wrong with it, a sentence
FALSE = {
    "a step before the fault": "X of layers.0.fc1 went wrong at or before step 50: its scale moved, its values hardly did.",
    "a step after the fault": "X of layers.0.fc1 went wrong at or before step 150: its scale moved, its values hardly did.",
    "a step outside the run": "The loss departed from the baseline's at step 300.",
    "a step that is no sample": "X of layers.0.fc1 went wrong around step 103: its scale moved, its values hardly did.",
    "no such tensor": "X of layers.7.fc1 went wrong at or before step 100: its scale moved, its values hardly did.",
    "the first sample": "X of layers.0.fc1 went wrong from the first sample on: its scale moved, its values hardly did.",
    "the first NaN": "The first NaN or infinity is in the loss at step 100.",
    "the first tensor": "X of layers.0.fc1 is out of band from step 20 on: the first tensor.",
    "a sign of bits": "X of layers.0.fc1 went wrong around step 100: its scale jumped. The scale is 3.0 bits too small.",
    "a sign of a gap": "The loss ended 43.1% below the baseline's (95% interval 42 to 44%; batches not matched).",
    "a size of a gap": "The loss ended 12.1% above the baseline's (95% interval 12 to 13%; batches not matched).",
    "a gap outside its interval": "The loss ended 43.1% above the baseline's (95% interval 45 to 46%; batches not matched).",
    "batches": "The loss ended 43.1% above the baseline's (95% interval 42 to 44%; same batches).",
    "a size of a rise": "The loss rose by 93.7% at step 100.",
    "follows": "The loss follows the baseline's.",
    "above": "The loss is not above the baseline's.",
    "less than counts": "The loss lies above the baseline's, by less than counts as harm.",
    "a transient": "X of layers.0.fc1 went wrong around step 100: its scale jumped; it lasted for 2 samples, a transient.",
    "a departure before the fault": "The loss departed from the baseline's at step 30.",
    "the loss is lost": "The loss is NaN or infinite from step 120 on.",
    "no harm": "We found nothing wrong.",
    "no baseline": "Without a baseline, we cannot see a gap.",
    "a missing name": "The recipe of {tensor} changed at step 100.",
}


@pytest.mark.parametrize("sentence", TRUE)
def test_true_sentences_pass(sentence: str) -> None:
    checked = check_texts([sentence], make_known())
    assert checked.false == [] and checked.checked.total() > 0


@pytest.mark.parametrize("what", FALSE)
def test_false_sentences_are_caught(what: str) -> None:
    assert check_texts([FALSE[what]], make_known()).false


def test_an_accused_clean_run_is_caught() -> None:
    assert check_texts([TRUE[0]], make_known(begins=None)).false
    assert check_texts(["We found nothing wrong. The loss follows the baseline's."], make_known(begins=None)).false == []


def test_a_loss_that_rises_is_not_said_to_stay_low() -> None:
    known = replace(make_known(rise=3.0), baseline=None)
    assert check_texts(["The loss does not rise."], known).false
    assert check_texts(["The loss diverged at step 100: it rises for good."], known).false == []
    assert check_texts(["The loss diverged at step 20: it rises for good."], known).false


@pytest.mark.parametrize("value", [2896.0, -0.183, 1.25e-5, 2.0**-30, -(2.0**20), 4.1e9, 0.0, 12_345.0, 0.1])
def test_a_number_is_read_as_it_is_written(value: float) -> None:
    written = format_number(value, signed=True)
    assert re.fullmatch(N, written) and read_number(written) == pytest.approx(value, rel=5e-3)


def test_a_claim_that_nothing_checks_is_listed_once() -> None:
    text = "The loss was above 3 before. X of layers.0.fc1 sings after 3."
    assert check_texts([text, text], make_known()).unchecked == ["The loss was above N before.", "T sings after N."]


def test_what_came_of_it_is_kept_as_json() -> None:
    checked = check_texts([*TRUE, FALSE["above"]], make_known())
    assert Checked.from_json(json.loads(json.dumps(checked.to_json()))) == checked
