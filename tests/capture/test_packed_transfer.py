"""What a step left behind comes to the host as it was, all of it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nemo_fp8_debug.capture.backends import torch_linear
from nemo_fp8_debug.capture.backends.base import CastInUse
from nemo_fp8_debug.capture.device_to_host import GROUP, copied_to_host, packed, unpacked
from nemo_fp8_debug.capture.gemms import Gemm
from nemo_fp8_debug.capture.operand_stats import collect_operand_stats
from nemo_fp8_debug.capture.operands import OperandAccumulator
from nemo_fp8_debug.kernels import count_histogram
from nemo_fp8_debug.numerics.block_scaling import MXFP8Scaling
from nemo_fp8_debug.numerics.delayed_state import EmulatedScales
from nemo_fp8_debug.numerics.formats import E4M3
from nemo_fp8_debug.numerics.histogram import BINS
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling
from nemo_fp8_debug.observations.operands.measure import measure_tensors

DTYPES = [torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (2, 5)]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.booleans()), min_size=1, max_size=8))
def test_one_copy_holds_tensors_of_any_kind(kinds: list[tuple[torch.dtype, tuple[int, ...], bool]]) -> None:
    made = [(100 * torch.randn(shape)).to(dtype) for dtype, shape, _ in kinds]
    tensors = [x.t() if turned and x.dim() == 2 else x for x, (*_, turned) in zip(made, kinds, strict=True)]
    found = unpacked(packed(tensors), tensors)
    for x, y in zip(tensors, found, strict=True):
        assert y.dtype == x.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("n", [0, 1, GROUP, GROUP + 1, 3 * GROUP])
def test_of_histograms_only_what_they_hold_is_copied(n: int) -> None:
    histograms = [count_histogram(torch.randn(500 * (i % 3)).bfloat16()).counts for i in range(n)]
    tensors = [*histograms, torch.tensor(8.0), *histograms[:1], torch.arange(BINS - 1)]
    bytes_copied = []

    def copy(away: torch.Tensor) -> torch.Tensor:
        bytes_copied.append(away.numel())
        return away.clone()

    found = copied_to_host(tensors, copy)
    assert all(torch.equal(x, y) and x.data_ptr() != y.data_ptr() for x, y in zip(tensors, found, strict=True))
    assert len(bytes_copied) == 1
    held = sum(int((x != 0).sum()) for x in tensors if len(x.shape) and len(x) == BINS)
    assert bytes_copied[0] == 12 * held + 4 + 8 * (BINS - 1)


def operand(use: CastInUse, dtype: torch.dtype) -> OperandAccumulator:
    """Five calls, of which those beyond the first two are kept in sums where scales differ."""
    what_if = [parse_recipe(name) for name in ("mxfp8", "bf16")]
    seen = OperandAccumulator(Gemm("fc", nn.Linear(1, 1), torch_linear.BACKEND), "input", use, what_if)
    for call in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(call)).to(dtype)
        x[0, 0] = torch.inf if call == 3 else 1
        scale = use.scale * (call + 1) if isinstance(use.scale, torch.Tensor) else use.scale
        seen.add_tensor(x, call, replace(use, scale=scale))
    return seen


def tensors_of(seen: OperandAccumulator) -> dict[int, torch.Tensor]:
    """All tensors that hang on what was collected, as pickle finds them."""
    found: dict[int, torch.Tensor] = {}

    class Finder(pickle.Pickler):
        def persistent_id(self, x: Any) -> int | None:
            if isinstance(x, torch.Tensor):
                found[id(x)] = x
                return id(x)
            return None

    about = {name: value for name, value in vars(seen).items() if name not in ("gemm", "in_use", "is_counted")}
    Finder(io.BytesIO()).dump(about)
    return found


CASES: dict[str, Callable[[], OperandAccumulator]] = {
    "delayed": lambda: operand(CastInUse(torch.tensor(8.0), E4M3, parse_recipe("delayed-e4m3"), "engine"), torch.bfloat16),
    "current": lambda: operand(CastInUse(CurrentScaling(), E4M3, parse_recipe("current-e4m3"), "engine"), torch.float16),
    "blocks": lambda: operand(CastInUse(MXFP8Scaling(), E4M3, parse_recipe("mxfp8-e4m3"), "engine"), torch.bfloat16),
    "float32": lambda: operand(CastInUse(torch.tensor(8.0), E4M3, parse_recipe("delayed-e4m3"), "engine"), torch.float32),
}


def brought_home(seen: OperandAccumulator) -> int:
    """Brings what was collected of an operand, and returns how many bytes were copied."""
    on_the_way, copied = dict[int, torch.Tensor](), list[int]()

    def note(x: torch.Tensor) -> torch.Tensor:
        on_the_way[id(x)] = x
        return x

    def copy(away: torch.Tensor) -> torch.Tensor:
        copied.append(away.numel())
        return away.clone()

    seen.move_tensors(note)
    home = dict(zip(on_the_way, copied_to_host(list(on_the_way.values()), copy), strict=True))
    seen.move_tensors(lambda x: home[id(x)])
    assert len(copied) == 1
    return copied[0]


def others_of(seen: OperandAccumulator, samples: int) -> list[EmulatedScales]:
    """Recipes to what_if, after some samples of another amax."""
    names = "delayed(margin=1)", "current-e5m2", "bf16", "mxfp8"
    others = [EmulatedScales(parse_recipe(name), [seen.key]) for name in names]
    for amax in range(samples):
        for other in others:
            other.update_amax_histories([seen.key], torch.tensor([3.0 + amax]))
    return others


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_all_that_was_collected_moves_and_gives_the_same_metrics(case: str, samples: int) -> None:
    stayed, moved = CASES[case](), CASES[case]()
    before = tensors_of(moved)
    brought_home(moved)
    assert not before.keys() & tensors_of(moved).keys()
    a, b = (measure_tensors(collect_operand_stats([seen]), others_of(seen, samples)) for seen in (stayed, moved))
    assert a.metrics == b.metrics
    assert a.what_if == b.what_if
    for x, y in zip(a.histograms["counts"], b.histograms["counts"], strict=True):
        np.testing.assert_array_equal(x, y)
    assert a.metrics["nonfinite_order"] == [3]
