"""A run in Weights & Biases."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..start_here import LayerMap
from .sink import PREFIX

#: the step that all of ours are drawn over
STEP = f"{PREFIX}step"


class WandbSink:
    """Rows of the history with a step metric of their own.

    W&B counts the rows of a history, and users may log under numbers of theirs, which must grow. So in a run that the user
    made nothing of ours ends a row: it rides in the next row of the user's, one sample a row.
    """

    name = "wandb"

    def __init__(self, run: Any = None, settings: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            run: that the user made; None: one is started.
            settings: for `wandb.init`.
        """
        self._run, self._settings = run, dict(settings or {})
        self.owned = run is None
        self._waiting: deque[dict[str, float]] = deque()
        #: the row that has a sample of ours
        self._row: int | None = None

    def open(self, fingerprint: Mapping[str, Any]) -> None:
        """Start the run unless there is one, and declare our step."""
        if self._run is None:
            import wandb

            # W&B would pass what the program prints through itself, in the thread that prints.
            self._run = wandb.init(**{"reinit": "create_new", "settings": {"console": "off"}, **self._settings})
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric(f"{PREFIX}*", step_metric=STEP)
        self._run.define_metric("fp8_*", step_metric=STEP)
        self._run.config.update({"fp8_debug": _plain(fingerprint)}, allow_val_change=True)

    def log(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """A row each."""
        for step, scalars in rows.items():
            row = {**scalars, STEP: step}
            if self.owned:
                self._run.log(row)
            else:
                self._waiting.append(row)
        self._ride()

    def _ride(self) -> None:
        """Put the sample that has waited longest into the user's row, if that has none yet."""
        if self._waiting and self._run.step != self._row:
            self._run.log(self._waiting.popleft(), commit=False)
            self._row = self._run.step

    def tell(self, texts: Mapping[str, str]) -> None:
        """In the summary."""
        self._run.summary.update(dict(texts))

    def show(self, layer_map: LayerMap) -> None:
        """A table."""
        self._show("layers", layer_map.header, layer_map.rows, layer_map.step)

    def _show(self, name: str, header: Any, rows: Any, step: int) -> None:
        import wandb

        table = wandb.Table(columns=list(header), data=[list(row) for row in rows])
        if self.owned:
            self._run.log({f"{PREFIX}{name}": table, STEP: step})
        else:
            self._run.log({f"{PREFIX}{name}": table}, commit=False)

    def attach(self, page: Path) -> None:
        """An artifact."""
        import wandb

        artifact = wandb.Artifact(f"fp8_report_{self._run.id}", type="fp8_report")
        artifact.add_file(str(page))
        self._run.log_artifact(artifact)

    def close(self, failed: bool) -> None:
        """Show what found no row, and end the run if it is ours."""
        self._ride()
        if self._waiting:
            names = list(dict.fromkeys([STEP, *(name for row in self._waiting for name in row)]))
            rows = [[row.get(name) for name in names] for row in self._waiting]
            self._show("samples_without_a_row", names, rows, 0)
        if self.owned:
            self._run.finish(exit_code=int(failed))


def _plain(value: Any) -> Any:
    """Without objects that a configuration cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(of) for key, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(of) for of in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
