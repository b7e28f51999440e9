"""Which thread each recorder works in."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch
from helpers import Samples
from torch import nn

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.sample import Sample


class Threads(Samples):
    """Notes the thread of every call."""

    def __init__(self, in_callers_thread: bool) -> None:
        super().__init__()
        self.in_callers_thread = in_callers_thread
        self.threads: set[int] = set()

    def record(self, sample: Sample) -> None:
        super().record(sample)
        self.threads.add(threading.get_ident())

    def record_steps(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        super().record_steps(steps)
        self.threads.add(threading.get_ident())


@pytest.mark.parametrize("in_callers_thread", [True, False])
def test_recorders_get_samples_and_steps_in_the_thread_they_ask_for(in_callers_thread: bool) -> None:
    before = threading.active_count()
    model, recorder = nn.Linear(4, 4), Threads(in_callers_thread)
    monitor = Monitor(model, recorders=[recorder], interval=2)
    for step in range(6):
        with monitor.step(step) as report:
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
            report(loss=loss)
    monitor.close()
    assert list(recorder.samples) == [0, 2, 4]
    assert list(recorder.steps) == list(range(6))
    assert len(recorder.threads) == 1
    assert (threading.get_ident() in recorder.threads) == in_callers_thread
    assert threading.active_count() == before
