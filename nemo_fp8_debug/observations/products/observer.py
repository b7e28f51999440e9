"""Observe the errors and the correctness of GEMM products, and gradients summed over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from ...capture.device_to_host import Move
from ...capture.operand_stats import CastDescription
from ...capture.operands import OperandAccumulator
from ...core.keys import MIXED, Key
from ...core.layer_names import find_expert_aggregate
from ...core.observation import AgreedSampleSettings, Arrays, CombinedObservations, FeatureObservation, Lanes
from ...core.table import Columns
from ...monitor.open_step import OpenStep, RunSetup, StepObserver, make_weight_filter
from ...numerics.gemm_error import PRODUCTS, SUMS
from .checks import CheckQueue
from .gradient_parts import GradientOfRank, GradientSums
from .gradients import ReducedGradients
from .samples import GemmProducts, ProductMeasurementOptions
from .table import OUTPUT_METRICS, OUTPUTS, VERIFICATION
from .verification import FOUND, ProductsFound, WorstProductReduction, make_verification_columns

#: the sums of `numerics.gemm_error` and the number of ranks in these sums, float64 [6] by (layer, product)
OutputSums = Mapping[tuple[str, str], torch.Tensor]


def output_columns(sums: OutputSums, kinds: Mapping[str, str], casts: Mapping[Key, CastDescription]) -> dict[str, list[Any]]:
    """Return a row for each product, followed by a row for each product of all experts of a layer together.

    Args:
        kinds: kinds of GEMMs, by name.
        casts: casts of operands, by (layer, role), if known.
    """
    members: dict[tuple[str, str], list[str]] = {key: [key[0]] for key in sums}
    aggregates: dict[tuple[str, str], list[str]] = defaultdict(list)
    for layer, product in sums:
        if aggregate := find_expert_aggregate(layer):
            aggregates[aggregate, product].append(layer)
    rows = []
    for (layer, product), layers in [*members.items(), *aggregates.items()]:
        total = torch.stack([sums[member, product] for member in layers]).sum(0)
        found = [cast for m in layers for role, _ in PRODUCTS[product] if (cast := casts.get((m, role)))]
        rows.append(
            {
                "layer": layer,
                "gemm": kinds[layers[0]],
                "product": product,
                "recipe": _common([cast.recipe for cast in found]),
                "scale_source": _common([cast.source for cast in found]),
                "experts": len(layers) if find_expert_aggregate(layers[0]) else None,
                **_metrics(product, total.tolist()),
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _common(values: Sequence[str]) -> str | None:
    return values[0] if len(set(values)) == 1 else MIXED if values else None


def _metrics(product: str, total: Sequence[float]) -> dict[str, int | float | None]:
    *values, stats = total
    of = dict(zip(SUMS, values, strict=True))
    (first, _), (second, _) = PRODUCTS[product]
    errors = {f"error_of_{role}": None for role in ("input", "weight", "grad_output")} | {
        "relative_error": _relative(of["error2"], of["output2"]),
        f"error_of_{first}": _relative(of["first_error2"], of["output2"]),
        f"error_of_{second}": _relative(of["second_error2"], of["output2"]),
    }
    return {"ranks": int(stats), "n": int(of["n"]), **{name: errors[name] for name in OUTPUT_METRICS}}


def _relative(error2: float, output2: float) -> float | None:
    """Return the relative error, or None if the output is zero or an operand has NaN or infinity."""
    ratio = error2 / output2 if output2 > 0 else torch.nan
    return ratio**0.5 if ratio == ratio and ratio != torch.inf else None


@dataclass(frozen=True)
class ProductsOfRank:
    """The products that one rank has observed."""

    outputs: OutputSums = field(default_factory=dict)
    #: results by (layer, product), in the order of `verification.FOUND`
    products: ProductsFound = field(default_factory=dict)
    #: gradients before and after the sum over ranks, by layer
    gradients: Mapping[str, GradientOfRank] = field(default_factory=dict)


@dataclass(frozen=True)
class ProductsOfRanks:
    """The products that all ranks have observed together."""

    outputs: OutputSums
    #: results in the order of `verification.OF_RANKS`
    products: ProductsFound


def make_observation(setup: RunSetup) -> ProductObservation | None:
    """Return the observation of products, or None if it is not enabled."""
    return ProductObservation(setup) if setup.config.output_rows or setup.config.verify_rows else None


class ProductStep(StepObserver):
    """The observer of products in one sampled step."""

    def __init__(self, step: OpenStep) -> None:
        config = step.config
        chosen = ProductMeasurementOptions(config.output_rows, config.verify_rows, keeps_gradients="update" in config.states)
        gemms = {gemm.name: gemm for gemm in step.known if gemm.name in step.chosen and not gemm.backend.in_forward}
        self._queue, options = CheckQueue(), (chosen, step.number, step.guard)
        self.products = {
            name: GemmProducts(gemms[name], operands, *options, self._queue, step.dispatcher)
            for name, operands in step.seen.items()
            if name in gemms
        }
        step.products |= self.products
        self.gradients: ReducedGradients | None = None
        if chosen.verify and self.products:
            verified = [gemm for gemm in gemms.values() if gemm.name in self.products]
            keeps = partial(make_weight_filter, step.watched.shard_group, step.watched.rank)
            self.gradients = ReducedGradients(verified, step.scanned, step.number, keeps, step.guard, step.dispatcher)

    def subscribe(self, step: OpenStep) -> None:
        """See `StepObserver`."""
        if self.gradients is not None:
            self.gradients.subscribe()

    def move_tensors(self, to: Move) -> None:
        """See `StepObserver`."""
        for one in (*self.products.values(), self._queue, self.gradients):
            if one is not None:
                one.move_tensors(to)


class ProductObservation(FeatureObservation):
    """Sums over parts of outputs, parts of gradients, and each product's result on the rank with the largest error."""

    name = "products"

    def __init__(self, setup: RunSetup) -> None:
        keys, config = [(name, product) for name in setup.gemm_names for product in PRODUCTS], setup.config
        self._outputs, self._keys = keys if config.output_rows else [], keys if config.verify_rows else []
        self._verified = WorstProductReduction(self._keys, setup.ranks.rank)
        gemms = setup.gemm_names if config.verify_rows else []
        self._gradients = GradientSums(gemms, setup.parts["weight_gradient"], setup.ranks.rank)
        self._rows = max(config.output_rows, config.verify_rows)

    def start_observer(self, step: OpenStep) -> ProductStep:
        """See `FeatureObservation`."""
        return ProductStep(step)

    def collect_results(self, mine: ProductStep | None, operands: Sequence[OperandAccumulator]) -> ProductsOfRank:
        """See `FeatureObservation`."""
        if mine is None:
            return ProductsOfRank()
        outputs = {key: sums for one in mine.products.values() for key, sums in one.collect_output_sums().items()}
        products = {key: checked for one in mine.products.values() for key, checked in one.collect_product_checks().items()}
        return ProductsOfRank(outputs, products, mine.gradients.collect_gradients_of_rank() if mine.gradients else {})

    def pack_results(self, plan: AgreedSampleSettings, found: ProductsOfRank | None, expected: Collection[Key]) -> Arrays:
        """See `FeatureObservation`."""
        found = found or ProductsOfRank()
        outputs = np.zeros((len(self._outputs), len(SUMS) + 1))
        for row, key in zip(outputs, self._outputs, strict=True):
            if (sums := found.outputs.get(key)) is not None:
                row[:] = sums.numpy()
        mine = [(i, found.products[key].numpy()) for i, key in enumerate(self._keys) if key in found.products]
        return {
            "outputs": outputs,
            "at": np.array([i for i, _ in mine], np.int64),
            "found": np.array([values for _, values in mine]).reshape(-1, len(FOUND)),
            "gradients": self._gradients.collect_sums(found.gradients).numpy(),
        }

    def _found(self, packed: Arrays) -> ProductsFound:
        return {self._keys[i]: torch.tensor(row) for i, row in zip(packed["at"].tolist(), packed["found"], strict=True)}

    def collect_maxima(self, packed: Arrays) -> torch.Tensor:
        """See `FeatureObservation`."""
        return self._verified.compute_severities(self._found(packed))

    def collect_sums(self, plan: AgreedSampleSettings, packed: Arrays, extremes: torch.Tensor) -> Lanes:
        """See `FeatureObservation`."""
        rows = self._verified.collect_sums(self._found(packed), extremes)
        parts = {3: torch.tensor(packed["outputs"]), 4: rows, 6: torch.tensor(packed["gradients"])}
        return {lane: part.flatten() for lane, part in parts.items()}

    def combine_all_ranks(self, plan: AgreedSampleSettings, sums: Lanes, extremes: torch.Tensor) -> ProductsOfRanks:
        """See `FeatureObservation`."""
        rows = zip(self._outputs, sums[3].view(-1, len(SUMS) + 1), strict=True)
        verified = self._verified.unpack_all_ranks(sums[4]) | self._gradients.unpack_all_ranks(sums[6])
        return ProductsOfRanks({key: row for key, row in rows if row[-1] > 0}, verified)

    def compute_single_rank_result(self, found: ProductsOfRank) -> ProductsOfRanks:
        """See `FeatureObservation`."""
        gradients = self._gradients.unpack_all_ranks(self._gradients.collect_sums(found.gradients))
        return ProductsOfRanks(found.outputs, self._verified.compute_single_rank_result(found.products) | gradients)

    def make_table_rows(self, sampled: CombinedObservations) -> dict[str, Columns]:
        """See `FeatureObservation`."""
        found: ProductsOfRanks = sampled.whole[self.name]
        return {
            OUTPUTS.name: output_columns(found.outputs, sampled.kinds, sampled.casts),
            VERIFICATION.name: make_verification_columns(found.products, sampled.kinds, self._rows, sampled.step),
        }
