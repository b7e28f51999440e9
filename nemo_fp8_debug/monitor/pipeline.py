"""Process a sample after its step: collect statistics, add them up over ranks, and compute metrics."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass
from typing import Any

from ..capture.device_to_host import DeviceToHostCopy
from ..capture.operand_stats import OperandStats
from ..capture.operands import OperandAccumulator
from ..core.error_guard import ErrorGuard
from ..core.keys import ROLES, SHOWN_AS, Key
from ..core.observation import AgreedSampleSettings, CombinedObservations, FeatureObservation
from ..core.table import Columns, concat_columns, load_feature_modules
from ..core.threads import WorkerThread
from ..core.waits import SAMPLE_OF_RANKS
from ..distributed import MonitoredRanks, ShardGroup, ShardGroupReduction
from ..errors import warn
from ..numerics.delayed_state import EmulatedScales
from ..numerics.recipe import Recipe
from ..record.schema import TABLES
from .open_step import RunSetup

#: rows by table
Tables = Mapping[str, Columns]
Steps = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class CapturedStep:
    """The data that this rank captured in a sampled step."""

    #: values that must be equal on all ranks before the statistics are added up
    plan: AgreedSampleSettings
    operands: list[OperandAccumulator]
    #: observers of the step, by feature
    observers: Mapping[str, Any]
    #: operands that this rank should observe
    expected: Collection[Key]
    what_if: Sequence[Recipe]
    #: whether a layer of this name is measured, on any rank
    chosen: Callable[[str], bool]
    #: function that reads this rank's scalars of this step and of the steps since the last sample
    steps: Callable[[], Steps]
    #: function that copies collected statistics to the host
    device_to_host: DeviceToHostCopy

    @property
    def step(self) -> int:
        """Return the step's number."""
        return self.plan.step


@dataclass(frozen=True)
class ReducedSample:
    """The combined result of all ranks."""

    #: rows by table
    tables: Tables
    #: scalars of steps that only other ranks have, such as the loss in the last pipeline stage
    steps: Steps


class SamplePipeline:
    """Computes the metrics of samples. With several ranks, this happens in a background thread, together with the other
    ranks.
    """

    def __init__(self, setup: RunSetup, errors: ErrorGuard) -> None:
        self._ranks, self._shard_group, self._errors = setup.ranks, setup.shard_group, errors
        self._keys = setup.shard_group.list_operand_keys(ROLES)
        self._others: dict[str, EmulatedScales] = {}
        made = [module.make_observation(setup) for module in load_feature_modules("observer")]
        #: features that are observed
        self.observations: list[FeatureObservation] = [one for one in made if one is not None]
        self._reduction = ShardGroupReduction(setup.ranks, setup.shard_group, self.observations)
        self._worker = WorkerThread("nemo_fp8_debug reduction") if setup.ranks.world > 1 else None
        #: outcome of the current sample, or None as soon as ranks are out of sync
        self._last: Future[ReducedSample | None] | None = None
        self._last_step = -1
        #: whether ranks are out of sync, so that all ranks have stopped sampling
        self.over = False
        self._ending = threading.Lock()
        self._speaking: threading.Thread | None = None
        setup.ranks.listen_for_out_of_sync(self.end_because)

    def submit_sample(self, sampled: CapturedStep) -> Callable[[], ReducedSample | None]:
        """Compute the metrics of a sample. With several ranks, this happens in the background.

        Returns:
            A function that computes the outcome, or waits for the background thread, and returns the outcome. It returns
            None on ranks that do not write, and if ranks are out of sync.
        """
        if self._worker is None:
            return lambda: ReducedSample(self._alone(sampled), {})
        self._last_step, self._last = sampled.step, Future[ReducedSample | None]()
        worked = self._worker.submit(lambda: self._together(sampled))
        worked.add_done_callback(functools.partial(_pass_on, self._last))
        if self.over:
            _resolve(self._last, None)
        return self._last.result

    def join_abandoned_sample(self, sampled: CapturedStep) -> None:
        """Take part in the reduction of a sample that this rank abandoned, because other ranks may continue with the
        sample.
        """
        if self._worker:
            self.submit_sample(sampled)

    def await_previous_sample(self) -> None:
        """Wait for the previous sample, which updates the amax histories of emulated scales."""
        if self._last is None:
            return
        with self._ranks.patience.spend_wait(SAMPLE_OF_RANKS) as seconds:
            done = wait([self._last], seconds).done
        if not done:
            self.stop_sampling(
                self._last_step, TimeoutError(f"not all ranks took part in its sample within {seconds:.0f} s")
            )

    def stop_sampling(self, step: int, error: Exception) -> None:
        """Stop sampling on all ranks, because they are out of sync. One rank warns. Do not wait for other ranks."""
        self.end_because(step, str(error).splitlines()[0] if str(error) else type(error).__name__)

    def end_because(self, step: int, why: str) -> None:
        """Do what `stop_sampling` does, with the given reason."""
        with self._ending:
            if self.over:
                return
            speaking = threading.Thread(
                target=self._speak, args=(step, (self._ranks.describe_unresponsive_store() or why)[:500]), daemon=True
            )
            speaking.start()
            self._speaking, self.over = speaking, True
        if self._last:
            _resolve(self._last, None)

    def _speak(self, step: int, why: str) -> None:
        if self._ranks.elect_warner(step, why):
            warn(f"ranks are out of sync since step {step}; the run goes on, and is no longer monitored: {why}")

    def close(self) -> None:
        """End the run, and wait for unfinished samples."""
        with self._errors.guard("while ranks part"):
            self.await_previous_sample()
            if self._speaking:
                with self._ranks.patience.spend_wait(SAMPLE_OF_RANKS, reserve=True) as seconds:
                    self._speaking.join(seconds)
            if self._worker:
                with self._ranks.patience.spend_wait(SAMPLE_OF_RANKS, reserve=True) as seconds:
                    self._worker.close(0.0 if self.over else seconds)
            for group in filter(None, (self._shard_group.group, self._shard_group.leaders_group)):
                group.close(in_sync=not self.over)
            self._ranks.close(in_sync=not self.over)

    def finish_tables(self, tables: Tables, scalars: Mapping[str, float]) -> dict[str, Columns]:
        """Return the tables of a sample, in the order of the record.

        Args:
            scalars: scalars of the step.
        """
        done = dict(tables)
        for one in self.observations:
            done |= one.finish_tables(done, scalars)
        return {name: done[name] for name in TABLES if done.get(name)}

    def _collect(self, sampled: CapturedStep) -> dict[str, Any]:
        """Return this rank's statistics by observation."""
        sampled.device_to_host.finish_copy()
        return {
            one.name: one.collect_results(sampled.observers.get(one.name), sampled.operands) for one in self.observations
        }

    def _alone(self, sampled: CapturedStep) -> Tables:
        found = self._reduction.compute_single_rank_results(self._collect(sampled))
        self._report(sampled, found)
        return self._tables(found, sampled)

    def _tables(self, whole: Mapping[str, Any], sampled: CapturedStep) -> Tables:
        kinds = self._shard_group.kinds
        what_if, chosen = self._what_if(sampled.what_if), {name for name in kinds if sampled.chosen(name)}
        made = CombinedObservations(sampled.step, whole, kinds, chosen, what_if)
        seen = [one for one in self.observations if one.name in whole]  # empty if collecting has failed
        return {name: columns for one in seen for name, columns in one.make_table_rows(made).items()}

    def _what_if(self, recipes: Sequence[Recipe]) -> list[EmulatedScales]:
        """Keep the amax histories of unchanged what-if recipes, and start histories for new recipes."""
        known = self._others
        self._others = {r.name: known.get(r.name) or EmulatedScales(r, self._keys) for r in recipes}
        return list(self._others.values())

    def _report(self, sampled: CapturedStep, whole: Mapping[str, Any]) -> None:
        """Warn about missing layers and parts."""
        found = (part for parts in whole.values() if isinstance(parts, list) for part in parts)
        stats = [part for part in found if isinstance(part, OperandStats)]
        layers = {layer for layer, _ in sampled.expected}
        if silent := layers - {layer for layer, _ in (stat.key for stat in stats)}:
            self._errors.warn(
                f"{len(silent)} of {len(layers)} layers gave no sample, first {min(silent)}: "
                "unused in this step or called under torch.func only, in a CUDA graph (whose replays run no hooks), "
                "or run by torch.compile since a step without hooks (it drops later hooks)"
            )
        if partial := [stat for stat in stats if stat.missing]:
            (layer, role), lost, all_of_them = partial[0].key, partial[0].missing, partial[0].missing + partial[0].ranks
            self._errors.warn(
                f"{len(partial)} operands of step {sampled.step} are measured without the parts of some ranks, "
                f"first {SHOWN_AS[role]} of {layer} ({lost} of {all_of_them} parts missing)",
                kind="missing parts",
            )

    def _report_mixed(self, step: int) -> None:
        if mixed := [key for one in self.observations for key in getattr(one, "mixed", ())]:
            (layer, role), *_ = mixed
            self._errors.warn(
                f"{len(mixed)} operands of step {step} are left out, first {SHOWN_AS[role]} of {layer}: their dtype differs "
                "between ranks, and counts of different formats do not add up",
                kind="mixed dtypes",
            )

    def _together(self, sampled: CapturedStep) -> ReducedSample | None:
        with contextlib.suppress(Exception):  # the run may have destroyed the store with its process group
            self.over = self.over or self._ranks.is_published("over")
        if self.over:
            return None
        mine = None
        try:
            mine = self._in_shard_group(sampled)
        except Exception as error:
            self.stop_sampling(sampled.step, error)
        try:  # the writer waits for this rank's rows
            return self._gathered_at_the_writer(mine, sampled)
        except Exception as error:
            self.stop_sampling(sampled.step, error)
            return None

    def _in_shard_group(self, sampled: CapturedStep) -> Tables | None:
        """Return the rows of whole tensors on the first rank of the group."""
        plan, found = sampled.plan, dict[str, Any]()
        with self._errors.guard("while collecting a sample"):
            found = self._collect(sampled)
        if self._shard_group.group is None:
            whole: dict[str, Any] | None = self._reduction.compute_single_rank_results(found)
        else:
            pack = functools.partial(self._reduction.pack_results, plan, expected=sampled.expected)
            packed = pack({})  # this rank must take part, even without data
            with self._errors.guard("while packing a sample"):
                packed = pack(found)
            # Histograms of whole tensors replace the parts' histograms.
            sampled.operands.clear()
            found.clear()
            whole = self._reduction.reduce_over_ranks(plan, packed)
        if whole is None:
            return None
        with self._errors.guard("while measuring"):
            self._report(sampled, whole)
            self._report_mixed(sampled.step)
            return self._tables(whole, sampled)
        return None

    def _gathered_at_the_writer(self, mine: Tables | None, sampled: CapturedStep) -> ReducedSample | None:
        leaders, group = self._shard_group.leaders, self._shard_group.leaders_group
        if self._ranks.rank not in leaders:
            return None
        steps: Steps = {}
        if not self._ranks.writes_record:
            with self._errors.guard("while reading what steps reported"):
                steps = sampled.steps()
        found = group.gather_to_first_rank((mine, steps)) if group else [(mine, steps)]
        if found is None:
            return None
        parts, of_others = [part for part, _ in found], dict[int, dict[str, float]]()
        for _, numbers_of in found:
            for step, numbers in numbers_of.items():
                of_others.setdefault(step, {}).update(numbers)
        if self.over and not any(parts):
            return None
        names = dict.fromkeys(name for part in parts if part for name in part)
        tables = {name: concat_columns([part[name] for part in parts if part and name in part]) for name in names}
        return ReducedSample(tables, of_others)


def _pass_on(outcome: Future[ReducedSample | None], worked: Future[ReducedSample | None]) -> None:
    if error := worked.exception():
        with contextlib.suppress(InvalidStateError):
            outcome.set_exception(error)
    else:
        _resolve(outcome, worked.result())


def _resolve(outcome: Future[ReducedSample | None], value: ReducedSample | None) -> None:
    with contextlib.suppress(InvalidStateError):  # another thread has already ended the sample
        outcome.set_result(value)


def find_shard_group(ranks: MonitoredRanks, kinds: Mapping[str, str], errors: ErrorGuard) -> tuple[ShardGroup, bool]:
    """Return the ranks that have parts of the same tensors, and whether sampling has ended because the ranks cannot
    connect.
    """
    try:
        return ShardGroup.find_shard_group(ranks, kinds), False
    except Exception as error:
        if errors.raises:
            raise
        if ranks.publish_if_absent("over", -1):
            errors.warn(f"the ranks cannot be connected, so operands are not observed: {error}")
        return ShardGroup.make_single_rank(ranks.rank, kinds), True
