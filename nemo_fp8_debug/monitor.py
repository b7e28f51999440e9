"""The framework-neutral monitor: what a training loop calls around its steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .capture.hooks import Capture
from .capture.layers import Gemm, find_gemms, select
from .capture.measure import measure
from .capture.operands import Operand
from .capture.scales import Scales
from .config import Config
from .errors import warn
from .record.fingerprint import fingerprint
from .record.recording import Recording
from .record.store import RunRecord
from .record.table import TableRecorder
from .record.tensorboard import TensorBoardRecorder, event_writer
from .sample import SHOWN_AS, Recorder, Sample

#: steps whose scalars are kept on the device between samples, at the most
STEPS_HELD = 1000


class Monitor:
    """Looks at the GEMM operands of every N-th step of any training loop.

        monitor = Monitor(model, "runs/a", interval=100)
        for step, batch in enumerate(data):
            with monitor.step(step) as report:
                report(loss=train_step(batch))
        monitor.close()

    Between sampled steps no hook is installed.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        output: str | None = None,
        *,
        recorders: Iterable[Recorder] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            model: the model, or its chunks where a virtual pipeline splits it.
            output: folder for the run record and TensorBoard events; required unless `recorders` are given.
            recorders: where samples go instead.
            options: fields of `Config`.

        Raises:
            ConfigError: an option cannot be used, no GEMM matches, or the folder cannot be written.
        """
        self.config = Config(output=output, **options)
        roots = [model] if isinstance(model, nn.Module) else list(model)
        self.gemms: list[Gemm] = select(find_gemms(roots), self.config.layers)
        self._scales = Scales(self.gemms, self.config.roles, self.config.recipe)
        self.fingerprint = fingerprint(roots, self.gemms, self.config, self._scales.description)
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if recorders is None:
            recorders = self._default_recorders() if ranks == 1 or dist.get_rank() == 0 else ()
        self._recording = Recording(recorders, self.fingerprint, self._faults)
        self._operands: dict[tuple[str, str], Operand] = {}
        self._capture: Capture | None = None
        self._step = -1
        self._steps: dict[int, dict[str, Any]] = {}
        self._warned: set[str] = set()
        if ranks > 1:
            self._warn("figures are those of the shards on the writing rank; they are not yet reduced over ranks")

    def _default_recorders(self) -> Iterator[Recorder]:
        if self.config.output is None:
            raise TypeError("Monitor needs an output folder, or recorders")
        yield RunRecord(self.config.output)
        yield TensorBoardRecorder(event_writer(self.config.output), self.config.max_tags, log_losses=True)
        if self.config.table_rows:
            yield TableRecorder(self.config.table_rows)

    @property
    def sampling(self) -> bool:
        """Whether a sampled step is under way."""
        return self._capture is not None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[Any]:
        """A training step; yields a function that takes its scalars: `report(loss=..., lr=...)`."""
        scalars: dict[str, Any] = {}
        self.begin_step(step)
        try:
            yield scalars.update
            self.end_step(**scalars)
        finally:
            self.abandon_step()

    def begin_step(self, step: int) -> None:
        """Before the forward pass: installs the hooks if `step` is sampled."""
        self.abandon_step()
        self._step = step
        if self._recording.idle or not self.config.samples(step):
            return
        with self._faults("while starting to sample"):
            self._recording.deliver(wait=True)  # scales emulated from a history need the sample before
            self._operands = {
                (gemm.name, role): Operand(gemm, role, self._scales.in_use(gemm, role))
                for role in self.config.roles
                for gemm in self.gemms
            }
            self._capture = Capture(self._operands, self._hook_fault)
            self._capture.attach()
            return
        self.abandon_step()

    def abandon_step(self) -> None:
        """The step broke off: removes the hooks and forgets the sample."""
        if self._capture is not None:
            self._capture.detach()
            self._capture = None

    def end_step(self, **scalars: Any) -> None:
        """After the backward pass: removes the hooks, measures and records.

        Args:
            scalars: of the step, numbers or scalar tensors, which are read in the background: `loss`, `grad_norm`, `lr`,
                `loss_scale`, `skipped`, `consumed_samples`, as far as they are known.
        """
        if self._recording.idle:
            return
        with self._faults("while noting the step"):
            self._steps[self._step] = {"time": time.time(), **self._noted(scalars)}
            self._recording.deliver(wait=False)
        if self._capture is None:
            if len(self._steps) >= STEPS_HELD:
                self._flush_steps()
            return
        self.abandon_step()
        with self._faults("while measuring"):
            values = self._steps[self._step]
            step, operands, self._operands = self._step, list(self._operands.values()), {}
            self._recording.submit(lambda: self._measure(step, operands, values))
        self._flush_steps()
        if self.config.on_error == "raise":
            self.flush()

    def _noted(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Scalars as they are now; tensors stay on their device until they are read in the background."""
        noted: dict[str, Any] = {}
        for name, value in scalars.items():
            if torch.is_tensor(value) and value.numel() == 1:
                noted[name] = value.detach().clone()
            elif isinstance(value, (int, float)):
                noted[name] = value
            elif value is not None:
                self._warn(f"{name} of a step is not recorded: it is no scalar but {type(value).__name__}")
        return noted

    def close(self) -> None:
        """The run is over: records what is left."""
        self.abandon_step()
        self._flush_steps()
        with self._faults("while closing the record"):
            self._recording.close()

    def flush(self) -> None:
        """Wait until every sample so far is recorded."""
        with self._faults("while recording"):
            self._recording.deliver(wait=True)

    def _measure(self, step: int, operands: Sequence[Operand], scalars: Mapping[str, Any]) -> Sample:
        seen = [o for o in operands if o.calls]
        self._report_silent({o.gemm.name for o in operands} - {o.gemm.name for o in seen})
        columns, sketches, amax = measure(seen)
        self._scales.observe(seen, amax)
        return Sample(step, columns, {k: float(v) for k, v in scalars.items()}, sketches)

    def _report_silent(self, silent: Collection[str]) -> None:
        if silent:
            self._warn(
                f"{len(silent)} of {len(self.gemms)} layers gave no sample, first {min(silent)}: "
                "unused in this step, or compiled before the monitor was attached (torch.compile drops later hooks)"
            )

    def _flush_steps(self) -> None:
        steps, self._steps = self._steps, {}
        if steps:
            with self._faults("while recording steps"):
                self._recording.submit_steps(
                    lambda: {step: {k: float(v) for k, v in scalars.items()} for step, scalars in steps.items()}
                )

    def _hook_fault(self, layer: str, role: str, error: Exception) -> None:
        if self.config.on_error == "raise":
            raise error
        self._operands.pop((layer, role), None)
        message = f"{SHOWN_AS[role]} of {layer} is missing from the sample of step {self._step}"
        self._warn(f"{message}: {type(error).__name__}: {error}", kind=f"{layer} {role} {type(error)}")

    @contextlib.contextmanager
    def _faults(self, when: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.config.on_error == "raise":
                raise
            message = f"a fault {when}, at about step {self._step}, cost what was recorded there"
            self._warn(f"{message}: {type(error).__name__}: {error}", kind=f"{when} {type(error)}")

    def _warn(self, message: str, kind: str | None = None) -> None:
        """Warn once a kind of fault."""
        if (kind or message) not in self._warned:
            self._warned.add(kind or message)
            warn(message)
