"""Decide which steps are sampled and dumped: by interval, control file and triggers. All ranks make the same decision."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.sample import Sample
from ..core.text import format_number
from ..distributed import MonitoredRanks
from ..numerics.limits import MADE_UP
from ..options.config import Config
from ..options.control_file import ControlSettings
from ..options.trigger_rules import EarlyWarningRule, LossSpikeRule, NonFiniteRule, Rule

#: number of earlier losses that a spike is compared with, and the smallest number that is enough
_WINDOW, _FEWEST = 128, 16
#: a spike is this many robust standard deviations above the median
_SIGMAS = 6.0
#: least standard deviation as a fraction of the median, so that rounding of a flat loss is not reported as a spike
_LEAST_DEVIATION = 0.01


@dataclass(frozen=True)
class Window:
    """Consecutive steps that are all sampled, in addition to the interval."""

    first: int
    #: the last step (included)
    last: int
    why: str
    #: layers to dump, as patterns
    dump: Sequence[str]


class SamplingSchedule:
    """The sampling schedule. It starts from the configuration, and control files and triggers change it."""

    def __init__(self, config: Config) -> None:
        self._configured = config
        #: current options
        self.config = config
        self._windows: list[Window] = []

    def is_sampled(self, step: int) -> bool:
        """Return whether `step` is sampled."""
        return self.config.samples(step) or any(w.first <= step <= w.last for w in self._windows)

    def explain_sampling(self, step: int) -> str | None:
        """Return why `step` is sampled, or None if the interval is the only reason."""
        return "; ".join(w.why for w in self._windows if w.first <= step <= w.last) or None

    def list_dumped_layers(self, step: int) -> list[str]:
        """Return patterns of the layers that are dumped at `step`."""
        regular = list(self.config.dump) if self.config.samples(step) else []
        return regular + [p for w in self._windows if w.first <= step <= w.last for p in w.dump]

    def trigger_samples(self, step: int, why: str) -> None:
        """Sample `step` and some steps after it, for the reason `why`."""
        self._windows = [w for w in self._windows if w.last >= step]
        last = step + self._configured.trigger_steps - 1
        self._windows.append(Window(step, last, why, self._configured.trigger_dump))

    def apply_control(self, control: ControlSettings, step: int) -> Window | None:
        """Apply a control file from `step` on. If the file has `steps`, return the window of these steps."""
        changes = dict(control.changes)
        self._windows = [w for w in self._windows if w.last >= step and not w.why.startswith("control")]
        if control.steps is None:
            self.config = replace(self._configured, **changes)
            return None
        window = Window(step, step + control.steps - 1, "control file", tuple(changes.pop("dump", ())))
        self.config = replace(self._configured, **changes)
        self._windows.append(window)
        return window


class Triggers:
    """Watches losses and samples, and decides when to sample the next steps. All ranks make the same decision.

    A rule fires when its condition becomes true, and can fire again after the condition has become false.
    """

    def __init__(self, rules: Sequence[Rule], ranks: MonitoredRanks) -> None:
        self._rules, self._ranks = list(rules), ranks
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._holds = [False] * len(rules)
        self._samples = 0
        self._before: Sample | None = None
        #: matches in samples that this rank has not sent to other ranks yet, as (rule, reason); added in the background
        self._found: deque[tuple[int, str]] = deque()
        self._pending: deque[tuple[int, torch.Tensor]] = deque()
        self._words: dict[int, str] = {}

    def check_sample(self, sample: Sample) -> None:
        """Check a sample against the rules, in the background, on the rank that computes the metrics."""
        self._samples += 1
        before, self._before = self._before, sample if self._samples > MADE_UP else None
        for i, rule in enumerate(self._rules):
            if isinstance(rule, LossSpikeRule) or (isinstance(rule, EarlyWarningRule) and self._samples <= MADE_UP):
                continue
            found = (
                rule.describe_warning(sample, before)
                if isinstance(rule, EarlyWarningRule)
                else rule.describe_violation(sample)
            )
            if found and not self._holds[i]:
                self._found.append((i, f"{found} at step {sample.step}"))
            self._holds[i] = found is not None

    def check_step(self, step: int, loss: Any, grad_norm: Any = None) -> None:
        """Check the loss and the gradient norm of a step. Exchange these and the results of samples with all ranks.

        All ranks call this at every step.
        """
        if not self._rules:
            return
        words = dict(self._found.popleft() for _ in range(len(self._found)))
        self._words |= words
        value = _scalar(loss).to(self._ranks.reduction_device) if self._ranks.world > 1 else _scalar(loss)
        finite = value.isfinite()
        # Pipeline stages without a loss report no loss, or 0.
        known = finite & (value != 0) if loss is not None else torch.zeros_like(finite)
        flags = [torch.tensor(float(i in words), device=value.device) for i in range(len(self._rules))]
        bad = ~finite if loss is not None else torch.zeros_like(finite)
        bad_norm = torch.zeros_like(finite) if grad_norm is None else ~_scalar(grad_norm).to(value.device).isfinite()
        self._pending.append(
            (step, self._ranks.sum_over_ranks([torch.where(finite, value, 0.0), known, bad, bad_norm, *flags]))
        )

    def find_pending_reason(self) -> str | None:
        """Return why the next step must be sampled, or None. The result is the same on all ranks.

        Results on a device are read one step later, when reading them does not wait.
        """
        reasons = []
        while self._pending and (self._pending[0][1].device.type == "cpu" or len(self._pending) > 1):
            step, sums = self._pending.popleft()
            total, known, bad, bad_norm, *flags = sums.tolist()
            reasons += [self._words.pop(i, "a metric on another rank") for i, flag in enumerate(flags) if flag]
            lost = [what for what, ranks in (("loss", bad), ("gradient norm", bad_norm)) if ranks > 0]
            reasons += self._of_step(step, total / known if known else None, " and the ".join(lost))
        return "; ".join(reasons) or None

    def _of_step(self, step: int, loss: float | None, lost: str) -> list[str]:
        """Return the reasons for sampling that the loss and the gradient norm of a step give.

        Args:
            lost: names of the step's values that are NaN or infinite, or an empty string.
        """
        reasons = []
        for i, rule in enumerate(self._rules):
            if isinstance(rule, NonFiniteRule) and lost:
                reasons.append(f"the {lost} of step {step} {'are' if ' and ' in lost else 'is'} not finite")
            elif isinstance(rule, LossSpikeRule):
                spikes = loss is not None and self._is_spike(loss)
                if spikes and not self._holds[i]:
                    spike, usual = (format_number(value, digits=4) for value in (loss, statistics.median(self._losses)))
                    reasons.append(f"loss spike at step {step}: {spike}, median {usual}")
                self._holds[i] = spikes
        if loss is not None:
            self._losses.append(loss)
        return reasons

    def _is_spike(self, loss: float) -> bool:
        if len(self._losses) < _FEWEST:
            return False
        median = statistics.median(self._losses)
        spread = 1.4826 * statistics.median(abs(x - median) for x in self._losses)
        return loss - median > _SIGMAS * max(spread, _LEAST_DEVIATION * abs(median))


def _scalar(loss: Any) -> torch.Tensor:
    """Return a loss or a gradient norm as a new float64 scalar tensor, or 0 if the value is missing."""
    if torch.is_tensor(loss) and loss.numel() == 1:
        return loss.detach().reshape(()).double().clone()
    return torch.tensor(float(loss) if isinstance(loss, (int, float)) else 0.0, dtype=torch.float64)
