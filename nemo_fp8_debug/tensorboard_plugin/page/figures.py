"""Which views a report shows of a verdict, in which order, and about which tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.keys import SHOWN_AS
from ..records import metadata

#: where nothing says what is wrong with a tensor
_METRIC = "relative_error"


@dataclass(frozen=True)
class Tensor:
    """A tensor that matters, since when, and by which metric."""

    layer: str
    role: str
    since: int | None
    metric: str

    @property
    def title(self) -> str:
        """As people say it."""
        return f"{SHOWN_AS[self.role]} of {self.layer}"


@dataclass(frozen=True)
class Figure:
    """A view of a report; its state is what the address has of a tab."""

    title: str
    view: str
    tensor: Tensor | None = None
    step: int | None = None
    metric: str | None = None

    def state(self, names: Mapping[str, str | None]) -> dict[str, str]:
        """What the page looks at, of runs by part."""
        about = {"layer": self.tensor.layer, "role": self.tensor.role} if self.tensor else {}
        table = {} if self.tensor is None else {"table": metadata.table_of(self.tensor.role)}
        parts = {part: name or "" for part, name in names.items()}
        state: dict[str, Any] = {"view": self.view, **parts, **about, **table, "step": self.step, "metric": self.metric}
        return {name: str(value) for name, value in state.items() if value is not None}


def that_matter(result: Mapping[str, Any], most: int) -> list[Tensor]:
    """The first of the tensors that the story of a verdict tells of, which ranks them by harm."""
    return [Tensor(row["layer"], row["role"], row["since"], _metric(row)) for row in result["story"]["tensors"][:most]]


def _metric(row: Mapping[str, Any]) -> str:
    name = row.get("metric")
    return name if name in metadata.NUMBERS else _METRIC


def figures_of(result: Mapping[str, Any], tensors: list[Tensor], unit: str) -> list[Figure]:
    """The verdict first, then all tensors where it began, then the tensors that matter."""
    divergence = result["diagnosis"]["divergence_step"]

    def step(of: Tensor | None) -> int | None:
        since = of.since if of and of.since is not None else divergence
        return since if unit == "step" else None  # the page counts steps

    first = tensors[0] if tensors else None
    metric = first.metric if first else _METRIC
    label = next(one["label"] for one in metadata.metrics_of() if one["name"] == metric)
    figures = [
        Figure("Verdict", "verdict"),
        Figure(f"All tensors over all steps: {label}", "course", first, step(first), metric),
        Figure(f"All tensors at one step: {label}", "map", first, step(first), metric),
    ]
    for tensor in tensors:
        figures.append(Figure(f"{tensor.title} over the steps", "timeline", tensor, step(tensor)))
        figures.append(Figure(f"The values of {tensor.title}", "distribution", tensor, step(tensor)))
    return figures
