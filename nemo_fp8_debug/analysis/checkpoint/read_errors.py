"""What of a checkpoint could not be read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ReadErrors:
    """What could not be read, each fault once with the weights it costs."""

    weights: dict[str, list[str]] = field(default_factory=dict)

    def add(self, fault: str, weight: str) -> None:
        """Note a fault, and the weight that it costs."""
        self.weights.setdefault(fault, []).append(weight)

    def sentences(self) -> list[str]:
        """A sentence a fault."""
        return [
            f"{fault} (costs {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''})"
            for fault, names in self.weights.items()
        ]
