"""What a step left behind comes to the host as it was, all of it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nemo_fp8_debug.capture import packed_transfer
from nemo_fp8_debug.capture.backends import torch_linear
from nemo_fp8_debug.capture.backends.base import ScaleInUse
from nemo_fp8_debug.capture.collect import collect
from nemo_fp8_debug.capture.gemms import Gemm
from nemo_fp8_debug.capture.operands import Operand
from nemo_fp8_debug.capture.packed_transfer import GROUP, copied_to_host, packed, unpacked
from nemo_fp8_debug.kernels import histogram_of
from nemo_fp8_debug.measurement.measure import measure
from nemo_fp8_debug.numerics.block_scaling import MXFP8Scaling
from nemo_fp8_debug.numerics.delayed_state import EmulatedScales
from nemo_fp8_debug.numerics.formats import E4M3, E5M2
from nemo_fp8_debug.numerics.histogram import BINS
from nemo_fp8_debug.numerics.precomputed import Histograms
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.numerics.tensor_scaling import CurrentScaling

DTYPES = [torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (2, 5)]


@settings(max_examples=60, deadline=None)
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
    histograms = [histogram_of(torch.randn(500 * (i % 3)).bfloat16()).counts for i in range(n)]
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


def operand(use: ScaleInUse, dtype: torch.dtype) -> Operand:
    """Five calls, of which those beyond the first two are kept in sums where scales differ."""
    what_if = [parse_recipe(name) for name in ("mxfp8", "bf16")]
    seen = Operand(Gemm("fc", nn.Linear(1, 1), torch_linear.BACKEND), "input", use, what_if)
    for call in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(call)).to(dtype)
        x[0, 0] = torch.inf if call == 3 else 1
        scale = use.scale * (call + 1) if isinstance(use.scale, torch.Tensor) else use.scale
        seen.add(x, call, replace(use, scale=scale))
    return seen


def tensors_of(seen: Operand) -> dict[int, torch.Tensor]:
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


CASES: dict[str, Callable[[], Operand]] = {
    "delayed": lambda: operand(ScaleInUse(torch.tensor(8.0), E4M3, "delayed-e4m3", "engine"), torch.bfloat16),
    "current": lambda: operand(ScaleInUse(CurrentScaling(), E4M3, "current-e4m3", "engine"), torch.float16),
    "blocks": lambda: operand(ScaleInUse(MXFP8Scaling(), E4M3, "mxfp8-e4m3", "engine"), torch.bfloat16),
    "float32": lambda: operand(ScaleInUse(torch.tensor(8.0), E4M3, "delayed-e4m3", "engine"), torch.float32),
}


def come_done(seen: Operand, others: Sequence[EmulatedScales] = ()) -> int:
    """Brings what was collected of an operand, and returns how many bytes were copied."""
    requests, on_the_way, copied = seen.requests(others), dict[int, torch.Tensor](), list[int]()

    def note(x: torch.Tensor) -> torch.Tensor:
        on_the_way[id(x)] = x
        return x

    def copy(away: torch.Tensor) -> torch.Tensor:
        copied.append(away.numel())
        return away.clone()

    seen.move(note)
    home = dict(zip(on_the_way, copied_to_host(list(on_the_way.values()), copy, requests), strict=True))
    seen.move(lambda x: home[id(x)])
    assert len(copied) == 1
    return copied[0]


def others_of(seen: Operand, samples: int) -> list[EmulatedScales]:
    """Recipes to what_if, after some samples of another amax."""
    names = "delayed(margin=1)", "current-e5m2", "bf16", "mxfp8"
    others = [EmulatedScales(parse_recipe(name), [seen.key]) for name in names]
    for amax in range(samples):
        for other in others:
            other.observe([seen.key], torch.tensor([3.0 + amax]))
    return others


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_all_that_was_collected_moves_and_gives_the_same_metrics(case: str, samples: int) -> None:
    stayed, moved = CASES[case](), CASES[case]()
    before = tensors_of(moved)
    come_done(moved, others_of(moved, samples))
    assert not before.keys() & tensors_of(moved).keys()
    a, b = (measure(collect([seen]), others_of(seen, samples)) for seen in (stayed, moved))
    assert a.metrics == b.metrics
    assert a.what_if == b.what_if
    for x, y in zip(a.histograms["counts"], b.histograms["counts"], strict=True):
        np.testing.assert_array_equal(x, y)
    assert a.metrics["nonfinite_order"] == [3]


def test_metrics_take_what_was_found_on_the_way() -> None:
    """Were it computed once more, other sums on the way would change nothing."""
    seen = CASES["delayed"]()
    come_done(seen, others_of(seen, 1))
    before = measure(collect([seen]), others_of(seen, 1))
    assert seen.total.precomputed
    found, _ = seen.total.precomputed
    sums = [replace(of, overflows=of.overflows + 7) for of in found.sums]
    changed = replace(found, moments=replace(found.moments, sum_x4=found.moments.sum_x4 * 3), sums=sums)
    for of in [*seen.histograms, seen.total]:
        assert of.precomputed
        of.precomputed = changed, of.precomputed[1]
    after = measure(collect([seen]), others_of(seen, 1))
    assert after.metrics["kurtosis"] == pytest.approx([3 * before.metrics["kurtosis"][0]])
    changed_rows = [y > x for x, y in zip(before.what_if["overflow_pct"], after.what_if["overflow_pct"], strict=True)]
    assert changed_rows == ["mxfp8" not in recipe for recipe in before.what_if["recipe"]]
    assert after.metrics["overflow_pct"][0] > before.metrics["overflow_pct"][0]


def test_what_was_not_asked_for_is_computed() -> None:
    stayed, moved = (histogram_of(torch.randn(500, generator=torch.Generator().manual_seed(1)).bfloat16()) for _ in range(2))
    requests = [(moved, [(torch.tensor(2.0), E4M3), (CurrentScaling(), E5M2)])]
    (moved.counts,) = copied_to_host([moved.counts], torch.clone, requests)
    a, b = Histograms([stayed]), Histograms([moved])
    current = CurrentScaling().scale(a.amax(), E5M2.max)
    for scale, fmt in ((torch.tensor([2.0]), E4M3), (current, E5M2), (current, E4M3), (torch.tensor([3.0]), E4M3)):
        x, y = (of.quantization_sums(scale, [fmt]) for of in (a, b))
        assert vars(x) == vars(y)
    assert Histograms([stayed, moved]).moments.n.tolist() == [500, 500]


@pytest.mark.parametrize("portion", [1, 3000, 1 << 17])
def test_portions_of_many_histograms_are_put_together(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_transfer, "AT_ONCE", portion)
    kinds = [torch.bfloat16, torch.float16]
    histograms = [histogram_of((10.0**i * torch.randn(100 * (i % 4))).to(kinds[i % 2])) for i in range(2 * GROUP + 3)]
    want = Histograms(histograms).moments
    requests = [(of, [(torch.tensor(1.5 + i), E4M3)] * (i % 3)) for i, of in enumerate(histograms)]
    for of, counts in zip(histograms, copied_to_host([of.counts for of in histograms], torch.clone, requests), strict=True):
        of.counts = counts
    found = [of.precomputed for of in histograms]
    assert all(precomputed and precomputed[0] is found[0][0] for precomputed in found if found[0])  # one table for all
    moments = Histograms(histograms).moments
    for name, column in vars(want).items():
        torch.testing.assert_close(getattr(moments, name), column, rtol=0, atol=0, equal_nan=True)
