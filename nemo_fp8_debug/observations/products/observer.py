"""Whether products of GEMMs are right, and gradients that ranks add up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from ...core.keys import Key
from ...core.observation import Arrays, Plan, SampledTables
from ...core.table import Columns
from ...measurement.reduced_gradients import GradientParts
from ...measurement.verification import FOUND, ProductsFound, verification_columns
from ...monitor.pipeline import Sampled
from ...monitor.run_setup import RunSetup
from ...numerics.gemm_error import PRODUCTS
from .gradient_sums import GradientSums
from .table import TABLES
from .worst_products import WorstProducts


@dataclass(frozen=True)
class VerifiedParts:
    """What a rank knows."""

    #: by (layer, product), as `verification.FOUND`
    products: ProductsFound = field(default_factory=dict)
    #: before and after ranks add them up, by layer
    gradients: Mapping[str, GradientParts] = field(default_factory=dict)


def observe(setup: RunSetup) -> ProductObservation | None:
    """Return what verifies products; None if that is not asked for."""
    return ProductObservation(setup) if setup.config.verify_rows else None


class ProductObservation:
    """Products, of which the rank that is farthest off is kept, and gradients, whose parts add up."""

    name = "products"

    def __init__(self, setup: RunSetup) -> None:
        rank = setup.ranks.rank
        self._keys = [(name, product) for name in setup.gemms for product in PRODUCTS]
        self._verified = WorstProducts(self._keys, rank)
        self._gradients = GradientSums(setup.gemms, setup.parts["weight_gradient"], rank)
        self._rows = max(setup.config.output_rows, setup.config.verify_rows)

    def collect(self, step: Sampled) -> VerifiedParts:
        """See `Observation`."""
        products = {key: checked for one in step.products for key, checked in one.checks().items()}
        return VerifiedParts(products, step.gradients.found() if step.gradients else {})

    def pack(self, plan: Plan, found: VerifiedParts | None, expected: Collection[Key]) -> Arrays:
        """See `Observation`."""
        found = found or VerifiedParts()
        mine = [(i, found.products[key].numpy()) for i, key in enumerate(self._keys) if key in found.products]
        return {
            "at": np.array([i for i, _ in mine], np.int64),
            "found": np.array([values for _, values in mine]).reshape(-1, len(FOUND)),
            "gradients": self._gradients.rows(found.gradients).numpy(),
        }

    def _found(self, packed: Arrays) -> ProductsFound:
        return {self._keys[i]: torch.tensor(row) for i, row in zip(packed["at"].tolist(), packed["found"], strict=True)}

    def extremes(self, packed: Arrays) -> torch.Tensor:
        """See `Observation`."""
        return self._verified.severities(self._found(packed))

    def sums(self, plan: Plan, packed: Arrays, extremes: torch.Tensor) -> torch.Tensor:
        """See `Observation`."""
        rows = self._verified.rows(self._found(packed), extremes)
        return torch.cat([rows.flatten(), torch.tensor(packed["gradients"]).flatten()])

    def whole(self, plan: Plan, sums: torch.Tensor, extremes: torch.Tensor) -> ProductsFound:
        """See `Observation`."""
        gradients = self._gradients.size
        products, added = sums.split([len(sums) - gradients, gradients])
        return self._verified.of_all(products) | self._gradients.of_all(added)

    def alone(self, found: VerifiedParts) -> ProductsFound:
        """See `Observation`."""
        return self._verified.alone(found.products) | self._gradients.of_all(self._gradients.rows(found.gradients))

    def rows(self, sampled: SampledTables) -> dict[str, Columns]:
        """See `Observation`."""
        found = sampled.whole[self.name]
        return {TABLES[0].name: verification_columns(found, sampled.kinds, self._rows, sampled.step)}

    def finish(self, tables: Mapping[str, Columns], scalars: Mapping[str, float]) -> dict[str, Columns]:
        """See `Observation`."""
        return {}
