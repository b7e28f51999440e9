"""Each function of the package that a run enters raises once: that costs samples, and nothing of the run."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn

import nemo_fp8_debug
from nemo_fp8_debug import Monitor

PACKAGE = str(Path(nemo_fp8_debug.__file__).parent)
#: what catches exceptions cannot catch its own
GUARDS = ("core/error_guard.py",)
#: hooks that torch calls, up to the guard that each begins with
BEFORE_A_GUARD = {
    "capture/dispatcher.py:EventDispatcher._enter",
    "capture/dispatcher.py:EventDispatcher._prepare",
    "capture/dispatcher.py:EventDispatcher._leave",
    "capture/dispatcher.py:EventDispatcher._return",
    "capture/dispatcher.py:_Call.__init__",
    "capture/dispatcher.py:_Call.begin_modes",
    "capture/dispatcher.py:_Call.end_modes",
}
OPTIONS: dict[str, Any] = {"interval": 1, "output_rows": 4, "verify_rows": 4, "what_if": ["current-e4m3", "delayed"]}


def is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def is_inside(frame: FrameType) -> bool:
    """Whether a function of ours has called this one: no code of ours can catch what the outermost one raises at once."""
    above = frame.f_back
    while above is not None:
        if is_ours(above):
            return True
        above = above.f_back
    return False


def name_of(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE + '/')}:{code.co_qualname}"


class Profile:
    """Sees each call of a function of ours in this thread, and raises in one."""

    def __init__(self, target: str | None = None, error: type[BaseException] | None = None) -> None:
        self.entered: dict[str, None] = {}
        self._target, self._error = target, error
        self.raised = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not is_ours(frame) or not is_inside(frame):
            return
        name = name_of(frame.f_code)
        if name.startswith(GUARDS):
            return
        self.entered[name] = None
        if name == self._target and self._error is not None:
            self.raised = True
            raise self._error("injected")  # which ends the profile


@contextlib.contextmanager
def profiled(profile: Profile) -> Iterator[None]:
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def hooks_on(model: nn.Module) -> int:
    """Forward hooks that are left on modules."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Closing(Samples):
    """Knows whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Run:
    """A run whose loop tells a monitor all that it can."""

    def __init__(self, monitored: bool = True) -> None:
        self.model, self.optimizer = model_and_optimizer()
        self.samples = Closing()
        self.monitor = (
            Monitor(self.model, recorders=[self.samples], triggers=["nonfinite"], **OPTIONS) if monitored else None
        )
        self.steps = 0
        self.losses: list[float] = []

    def step(self) -> None:
        step, self.steps = self.steps, self.steps + 1
        if self.monitor is None:
            self._train()
            return
        self.monitor.expect_steps(step, step)
        with self.monitor.step(step) as report:
            report(loss=self._train())
        self.monitor.report_validation(val_loss=1.0)
        self.monitor.flush()

    def _train(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.full((4, 8), 0.5)).square().mean()
        if self.monitor:
            self.monitor.watch_loss(loss)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        return loss

    def close(self) -> None:
        assert self.monitor
        self.monitor.close()


def entered_in(call: Callable[[], None]) -> list[str]:
    """The functions that a call enters."""
    with profiled(profile := Profile()):
        call()
    return list(profile.entered)


@pytest.fixture
def run() -> Iterator[Run]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run()
        run.step()
        yield run
        run.close()


def closed_run() -> Run:
    run = Run()
    run.step()
    return run


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_an_exception_in_a_step_costs_its_sample_and_no_more(run: Run, error: type[Exception]) -> None:
    plain, wrong = Run(monitored=False), list[str]()
    functions = [name for name in entered_in(run.step) if name not in BEFORE_A_GUARD]
    assert len(functions) > 100
    for function in functions[:: 1 if error is MemoryError else 10]:
        profile = Profile(function, error)
        try:
            with profiled(profile):
                run.step()
            if not profile.raised:
                wrong.append(f"{function} was not entered")
        except Exception:
            wrong.append(f"{function} was not caught")
        if hooks_on(run.model):
            wrong.append(f"hooks after {function}")
            break
    assert not wrong, chr(10).join(wrong)
    for _ in range(run.steps):
        plain.step()
    assert run.losses == plain.losses


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_step_goes_through_and_leaves_no_hook(run: Run, error: type[BaseException]) -> None:
    wrong = []
    for function in entered_in(run.step)[:: 1 if error is KeyboardInterrupt else 10]:
        profile = Profile(function, error)
        try:
            with profiled(profile):
                run.step()
            wrong.append(f"{function} was {'swallowed' if profile.raised else 'not entered'}")
        except error:
            pass
        if hooks_on(run.model):
            wrong.append(f"hooks after {function}")
            break
    assert not wrong, chr(10).join(wrong)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_whatever_is_raised_while_closing_the_record_is_closed(run: Run, error: type[BaseException]) -> None:
    wrong = []
    for function in entered_in(closed_run().close):
        if "RecorderQueue.close.<locals>" in function:  # the recorder's own
            continue
        another = closed_run()
        profile = Profile(function, error)
        try:
            with profiled(profile):
                another.close()
            if error is KeyboardInterrupt and profile.raised:
                wrong.append(f"{function} was swallowed")
        except KeyboardInterrupt:
            pass
        another.close()
        if not another.monitor.closed or not another.samples.closed:
            wrong.append(f"the record is open after {function}")
    assert not wrong, chr(10).join(wrong)
