"""What is asked of a logger. All of it happens in one thread of the logger's own, so that it may wait, fail or hang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..start_here import LayerMap

#: before the names of all that loggers get
PREFIX = "fp8/"


class Sink(Protocol):
    """One run in one logger."""

    #: for messages and the name of the thread
    name: str
    #: whether the run was started here: it gets the losses too, and is ended
    owned: bool

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start or join the run, and note how it is set up."""

    def log(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Keep finite scalars by step."""

    def tell(self, texts: Mapping[str, str]) -> None:
        """Keep texts by name; later ones take the place of earlier ones."""

    def show(self, layer_map: LayerMap) -> None:
        """Show the layers of a step."""

    def attach(self, page: Path) -> None:
        """Keep a file."""

    def close(self, failed: bool) -> None:
        """The last call; end the run if it was started here."""
