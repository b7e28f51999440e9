"""What a baseline calls the layers of a run, where the two name them differently: as `compare` has it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...analysis.comparison.layer_matching import Names, Sizes, matched, sizes_of_weights
from ...analysis.runs.metrics import Metrics
from ...errors import ConfigError, hearing
from ...record.storage import Storage
from .cache import Cache
from .layouts import Layers
from .part_matrices import Index, Parts
from .tables import layout_of, tensors_of_newest

#: pairs of records whose names are kept
_PAIRS = 64


class LayerNames:
    """Names of layers by pairs of records, kept as long as these stay the same."""

    def __init__(self, parts: Parts, renames: Sequence[str] = ()) -> None:
        """
        Args:
            renames: of every run's layers, as `compare` takes them.
        """
        self._parts, self._renames = parts, renames
        self._pairs: Cache[tuple[Names, str]] = Cache(_PAIRS, lambda _: 1)

    def told(self, run: Storage, baseline: Storage) -> dict[str, Any]:
        """`names`: by the run's name of a layer the baseline's, of layers that have another one there; and `how` they were
        matched, in a sentence."""
        names, how = self._matched(run, baseline)
        return {"names": names, "how": how}

    def of_run(self, run: Storage, baseline: Storage) -> Names:
        """By the run's name of a layer the baseline's, of layers that have another one there."""
        return self._matched(run, baseline)[0]

    def _matched(self, run: Storage, baseline: Storage) -> tuple[Names, str]:
        # Names are matched only if none is in common, which the newest parts tell as a rule.
        if not self._renames and not self._of_newest(run).keys().isdisjoint(self._of_newest(baseline)):
            return {}, ""
        versions = [self._parts.index(record).version for record in (run, baseline)]
        return self._pairs.get((str(run), str(baseline), *versions), partial(self._match, run, baseline))

    def _match(self, run: Storage, baseline: Storage) -> tuple[Names, str]:
        first, second = (list(self._of_all(record)) for record in (baseline, run))
        try:
            return matched(first, second, self._renames, lambda: (_sizes(baseline), _sizes(run)))
        except ConfigError:  # the renames are those of another run's layers
            return {}, ""

    def _of_newest(self, record: Storage) -> Layers:
        return self._parts.settled(record, partial(tensors_of_newest, self._parts, record)).layers

    def _of_all(self, record: Storage) -> Layers:
        def read(index: Index) -> Layers:
            layouts = (layout_of(self._parts, record, part) for part in index.held)
            different = dict.fromkeys(layout.tensors for layout in layouts if layout)
            return dict.fromkeys(layer for tensors in different for layer in tensors.layers)

        return self._parts.settled(record, read)


def _sizes(record: Storage) -> Sizes:
    with hearing():  # what is damaged is told of by `notes`
        return sizes_of_weights(Metrics.read(record, held=0))
