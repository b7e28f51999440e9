"""Transformer Engine first, so that everything imported later finds it as it would on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import emulated_te
import pytest
import torch
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.quantization import FP8GlobalStateManager


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """No casts logged, no amaxes of an earlier test's modules to be updated, and the same random numbers."""
    emulated_te.CASTS.clear()
    FP8GlobalStateManager.reset()
    torch.manual_seed(0)
    yield
    # A checkpoint that is not reentrant would switch a fusion off for the rest of the process.
    distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = True
    emulated_te.CASTS.clear()
