"""A minute of fuzzing: every parser of what comes from outside breaks no promise. `scripts/validation/fuzz.py` goes on."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing import limits, record_targets
from fuzzing.limits import Finding, expect, limited
from fuzzing.run import fuzz
from fuzzing.targets import TARGETS


@pytest.fixture(scope="module", autouse=True)
def record() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record_targets.record()
        yield
    record_targets.forget()


@pytest.mark.parametrize("name", TARGETS)
def test_no_example_breaks_a_promise(name: str) -> None:
    course = fuzz(name, examples=TARGETS[name].examples_in_ci, seed=1)
    assert course.findings == {} and course.examples >= TARGETS[name].examples_in_ci / 2


def test_what_breaks_a_promise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    inside = tmp_path / "folder"
    inside.mkdir()
    with limited(inside):
        (inside / "file").write_text("")
    with pytest.raises(Finding, match="outside of its folder: open"), limited(inside):
        (tmp_path / "file").write_text("")
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    monkeypatch.setattr(limits, "BYTES", 1 << 28)
    with pytest.raises(Finding, match="did not end"), limited(inside):
        while True:
            pass
    with pytest.raises(Finding, match="took"), limited(inside):
        bytearray(b"x") * (largest + (1 << 29))
    with pytest.raises(Finding, match="raised KeyError"), expect(ValueError):
        raise KeyError("a")
    with pytest.raises(Finding, match="or lines"), expect(ValueError):
        raise ValueError("a\nb")
    with expect(ValueError):
        raise ValueError("a sentence")
