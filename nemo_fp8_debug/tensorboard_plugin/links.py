"""Addresses of the FP8 tab."""

from __future__ import annotations

from urllib.parse import quote


def link(address: str = "http://localhost:6006", **state: object) -> str:
    """The address that shows a state of the tab.

    Args:
        address: of TensorBoard.
        state: `view` (verdict, course, map, timeline, distribution, what_if, runs, fingerprints), `run`, `baseline` and
            `reference` (names of runs as the tab has them), `metric`, `step`, `layer`, `role`; what is None is left out.
    """
    kept = [f"p.fp8.{key}={quote(str(value), safe='')}" for key, value in state.items() if value is not None]
    return "&".join([f"{address.rstrip('/')}/#fp8", *kept])
