"""Numbers in the layer names that nvdlfw_inspect makes, as the 0-based index that the record has.

`infer_and_assign_layer_names` numbers the children of a `ModuleList` by their attribute `layer_number`, where they have one,
and else by their index. Megatron's `layer_number` counts from 1 over all pipeline stages. How other models count is known if
the names that nvdlfw_inspect has assigned are there too: an index would begin with 0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

#: everything before the first number of a name, that number, and the rest
_NUMBERED = re.compile(r"((?:[^.]+\.)*?)(\d{1,9})((?:\..+)?)")
_MEGATRON = re.compile(r"(?:.*\.)?decoder\.layers\.\d{1,9}\.(?:self_attention|cross_attention|mlp)\b.*")


class LayerNumbers:
    """How the layers of each list of a model are counted."""

    def __init__(self, logged: Iterable[str], assigned: Iterable[str]) -> None:
        """
        Args:
            logged: names of the layers that have statistics.
            assigned: names of all modules, if nvdlfw_inspect's own log tells them.
        """
        logged = list(logged)
        seen, whole = _by_list(logged), _by_list(assigned)
        megatron = {found[1] for name in logged if _MEGATRON.fullmatch(name) and (found := _NUMBERED.fullmatch(name))}
        from_1 = {name for name, numbers in whole.items() if numbers == set(range(1, len(numbers) + 1))}
        from_0 = {name for of in (seen, whole) for name, numbers in of.items() if 0 in numbers}
        self._shifted = (megatron | from_1) - from_0
        #: lists whose numbers may be an index or one more
        self.unverified = sorted(set(seen) - self._shifted - from_0)

    def indexed(self, layer: str) -> str:
        """The name with the 0-based index of its layer, or as it is if that is not known."""
        found = _NUMBERED.fullmatch(layer)
        if not found or found[1] not in self._shifted:
            return layer
        return f"{found[1]}{int(found[2]) - 1}{found[3]}"

    def notes(self) -> list[str]:
        """What is not known, a sentence for each list."""
        return [
            f"The layers of {name.removesuffix('.') or 'the model'} keep the numbers that the log has: it does not tell "
            "whether they count from 0 or from 1. Import the folder that has nvdlfw_inspect_logs too, which tells it, or "
            "compare with --rename."
            for name in self.unverified
        ]


def _by_list(names: Iterable[str]) -> Mapping[str, set[int]]:
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if found := _NUMBERED.fullmatch(name):
            numbers[found[1]].add(int(found[2]))
    return numbers
