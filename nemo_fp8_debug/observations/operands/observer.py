"""Observe operands of GEMMs and of FP8 attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from ...capture.attention import AttentionCapture
from ...capture.backends.base import CastInUse, make_unknown_cast
from ...capture.gemms import Gemm, is_observed_in_forward, match_gemms_by_name
from ...capture.hooks import OperandCapture, OperandSink
from ...capture.matmul_capture import InForwardMatmulCapture
from ...capture.operands import OperandAccumulator
from ...capture.scales import SHADOW
from ...capture.tensors import is_counted_here, never_count_here, take_local_part
from ...core.error_guard import ErrorGuard
from ...core.keys import ATTENTION, ATTENTION_BACKWARD, ATTENTION_FORWARD, ROLES, Key, list_roles
from ...core.observation import AgreedSampleSettings, Arrays, CombinedObservations, Lanes
from ...core.table import Columns
from ...monitor.open_step import OpenStep, RunSetup, StepObserver, is_duplicate_operand, is_hook_visible
from ...numerics.block_scaling import BlockScalingRule
from ...numerics.metric_columns import unscale_gradient_columns
from ...numerics.tensor_scaling import CurrentScaling
from ...record.dump import DumpedTensorInfo, TensorDumper
from .measure import measure_tensors
from .table import METRICS_TABLE
from .tensors import Stats, TensorObservation

#: tables that also have gradients in units of the loss
_UNSCALED = ("metrics", "what_if", "copies")


def make_observation(setup: RunSetup) -> OperandObservation:
    """Return the observation of operands."""
    return OperandObservation(setup)


class OperandStep(StepObserver):
    """The observer of operands in one sampled step."""

    def __init__(self, step: OpenStep) -> None:
        self._errors, self._roles = step.watched.errors, step.config.roles
        self._matmuls: InForwardMatmulCapture | None = None
        self._attention: AttentionCapture | None = None
        self._attention_sinks: dict[Key, OperandSink] = {}
        for role in step.config.roles:
            for gemm in step.known:
                if is_hook_visible(gemm, role):
                    _add_operand(step, gemm, role)
        found = match_gemms_by_name(step.watched.model.attentions, step.config.layers)
        self._attentions = [gemm for gemm in found if id(gemm.module) not in step.compiled]
        if step.watched.model.scales.auto:
            roles = [*(ATTENTION_FORWARD if "input" in self._roles else ())]
            roles += ATTENTION_BACKWARD if "grad_output" in self._roles else ()
            mine = {
                (g.name, role): OperandAccumulator(g, role, make_unknown_cast(role))
                for g in self._attentions
                for role in roles
            }
            self._attention_sinks |= mine
            step.operands |= mine

    def subscribe(self, step: OpenStep) -> None:
        """See `StepObserver`."""
        model, inside = step.watched.model, {key for key, sink in step.sinks.items() if is_observed_in_forward(sink.gemm)}
        options = step.lose, step.dispatcher, model.scales.auto, step.products
        if outside := {key: sink for key, sink in step.sinks.items() if key not in inside}:
            OperandCapture(outside, *options, model.masters, step.copies).subscribe()
        if inside:
            self._matmuls = InForwardMatmulCapture({key: step.sinks[key] for key in inside}, *options)
            self._matmuls.subscribe()
        if self._attentions:
            self._attention = AttentionCapture(self._attentions, self._attention_sinks, step.lose, step.dispatcher)
            self._attention.subscribe()

    def stop_observing(self) -> Collection[Key]:
        """See `StepObserver`."""
        if self._attention is not None and (unseen := list(self._attention.unseen)):
            _warn_of_unseen_attention(self._errors, unseen)
        names = [] if self._matmuls is None else list(self._matmuls.not_multiplied)
        if names:
            self._errors.warn(
                f"{len(names)} parameters (first {names[0]}) are not observed: no torch operator multiplies them",
                kind="not multiplied",
            )
        return {(name, role) for name in names for role in self._roles}


def _add_operand(step: OpenStep, gemm: Gemm, role: str) -> None:
    """Count an operand on this rank if it is requested and no other rank counts it. Pass it to other observers too."""
    watched, config, key = step.watched, step.config, (gemm.name, role)
    copied = is_duplicate_operand(gemm, role)
    asked = bool(config.output_rows or config.verify_rows)
    is_multiplied = asked and gemm.name in step.chosen and not gemm.backend.in_forward
    counted = (gemm.name in step.chosen or gemm.name in step.dumped) and not copied
    if not counted and not is_multiplied and gemm.name not in step.dumped:
        return
    # Either all ranks have the same operand, or each rank of a mesh has a part of it. The operand's tensors show which.
    first = watched.shard_group.first[gemm.name] if copied is None else None
    counts = never_count_here if copied else partial(is_counted_here, rank=watched.rank, first=first)
    operand = OperandAccumulator(
        gemm, role, watched.model.scales.choose_operand_cast(gemm, role), config.what_if_recipes, counts
    )
    operand.measures_copies, operand.counts_block_scales = config.copies, config.block_scales
    step.seen.setdefault(gemm.name, {})[role] = operand
    if counted:
        step.operands[key] = operand
    step.sinks[key] = operand
    if watched.dump and gemm.name in step.dumped:
        step.sinks[key] = DumpedOperand(operand, watched.dump, watched.attempt, step.number, watched.rank)


def _warn_of_unseen_attention(errors: ErrorGuard, names: Sequence[str]) -> None:
    why = "its kernels show no operand; to see them, set NVTE_UnfusedDPA_Emulate_FP8=1, NVTE_FLASH_ATTN=0, NVTE_FUSED_ATTN=0"
    errors.warn(
        f"attention of {len(names)} layers (first {names[0]}) runs in FP8 and is quantized, but is not observed: {why}",
        kind="attention in FP8",
    )


class OperandObservation(TensorObservation):
    """Operands of GEMMs and attention. Emulated scales follow the amax of an operand over all ranks."""

    name = "operands"
    roles = METRICS_TABLE.roles

    def __init__(self, setup: RunSetup) -> None:
        kinds = setup.shard_group.kinds
        every = [(name, role) for name, kind in kinds.items() for role in list_roles(kind)]
        super().__init__({key: kinds[key[0]].removeprefix(ATTENTION) for key in every}, setup.ranks)
        self._scales = setup.scales

    def start_observer(self, step: OpenStep) -> OperandStep:
        """See `FeatureObservation`."""
        return OperandStep(step)

    def _observe(self, amax: Mapping[Key, float]) -> None:
        self._scales.update_amax_histories({key: value for key, value in amax.items() if key[1] in ROLES})

    def compute_single_rank_result(self, found: Stats) -> Stats:
        """See `FeatureObservation`."""
        self._observe({stat.key: stat.amax for stat in found})
        return found

    def collect_sums(self, plan: AgreedSampleSettings, packed: Arrays, extremes: torch.Tensor) -> Lanes:
        """See `FeatureObservation`."""
        self._observe(self._sums.read_amaxes(extremes))
        return super().collect_sums(plan, packed, extremes)

    def make_table_rows(self, sampled: CombinedObservations) -> dict[str, Columns]:
        """See `FeatureObservation`."""
        found = self.measure_tensors(sampled)
        keys = zip(found.metrics["layer"], found.metrics["role"], strict=True)
        sampled.norms.update(zip(keys, found.norms, strict=True))
        sampled.casts.update({stat.key: stat.cast for stat in sampled.whole[self.name]})
        return {
            "metrics": found.metrics,
            "what_if": found.what_if,
            "histograms": found.histograms,
            "copies": found.copies,
            "block_scales": found.block_scales,
        }

    def finish_tables(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> dict[str, Columns]:
        """See `FeatureObservation`."""
        # The table exists even if no rank observed any operand in a step.
        known = tables if "metrics" in tables else {"metrics": measure_tensors([]).metrics, **tables}
        multiplier = scalars.get("grad_scale")
        return {
            name: {**columns, **unscale_gradient_columns(columns, multiplier)}
            for name in _UNSCALED
            if (columns := known.get(name))
        }


class DumpedOperand:
    """Replaces an operand in a step that dumps it."""

    def __init__(self, operand: OperandAccumulator, dump: TensorDumper, attempt: int, step: int, rank: int) -> None:
        self.gemm: Gemm = operand.gemm
        self._operand, self._dump = operand, dump
        self._where = attempt, step, rank

    def add_tensor(self, x: torch.Tensor, order: int, use: CastInUse | None = None) -> None:
        """Count the tensor. Dump it if this rank counts it."""
        call = self._operand.calls + self._operand.copies
        self._operand.add_tensor(x, order, use)
        if self._operand.calls + self._operand.copies > call:
            use = use or self._operand.in_use
            scale = use.scale
            key, about = (*self._operand.key, call), (use.recipe.name, use.format, use.source)
            if isinstance(scale, BlockScalingRule):  # a dump has one scale, so we dump codes of current scaling
                scale, about = CurrentScaling(), (SHADOW.name, SHADOW.get_format(self._operand.role), "current")
            self._dump.dump_tensor(DumpedTensorInfo(*self._where, *key, *about), take_local_part(x.detach()), scale)
