"""Multiply-adds of single operators against closed formulas, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_fp8_debug import ConfigError, observe_coverage


class Called(nn.Module):
    """A module whose forward is a function of tensors, which are its parameters."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self) -> Tensor:
        return self.function(*self.tensors)


def counted(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> tuple[float, float, float]:
    model = nn.Sequential(Called(function, *shapes))
    with observe_coverage(model) as found:
        model[0]().square().sum().backward()
    assert not found.not_counted
    assert {name for name, *_ in found.multiply_adds} == {"0"}
    return found.total("forward"), found.total("backward"), found.total("recompute")


@pytest.mark.parametrize(
    ("function", "shapes", "forward"),
    [
        (torch.mm, [(3, 4), (4, 5)], 3 * 4 * 5),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)], 2 * 3 * 4 * 5),
        (torch.matmul, [(2, 6, 3, 4), (4, 5)], 2 * 6 * 3 * 4 * 5),
        (torch.addmm, [(3, 5), (3, 4), (4, 5)], 3 * 4 * 5),
        (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 2 * 3 * 4 * 5),
        (lambda a, b: torch.einsum("bij,kj->bik", a, b), [(2, 3, 4), (5, 4)], 2 * 3 * 4 * 5),
        (F.linear, [(2, 3, 4), (5, 4), (5,)], 2 * 3 * 4 * 5),
        (lambda x, w: F.conv1d(x, w, padding=2, dilation=2), [(2, 4, 9), (6, 4, 3)], 2 * 9 * 6 * 4 * 3),
        (lambda x, w: F.conv2d(x, w, stride=(2, 3), groups=2), [(2, 4, 8, 9), (6, 2, 2, 3)], 2 * 4 * 3 * 6 * 2 * 6),
        (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 4, 3, 5), (4, 6, 2, 2)], 2 * 3 * 5 * 4 * 6 * 4),
        (F.conv3d, [(1, 2, 4, 4, 4), (3, 2, 2, 2, 2)], 27 * 3 * 2 * 8),
    ],
)
def test_products(function: Callable[..., Tensor], shapes: list[tuple[int, ...]], forward: int) -> None:
    assert counted(function, *shapes) == (forward, 2 * forward, 0)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention(backend: SDPBackend) -> None:
    """Both ways multiply the same, but for the scores that the fused one makes anew in its backward."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    scores = 2 * 4 * 6 * 10 * 8
    again = scores if backend is SDPBackend.FLASH_ATTENTION else 0
    assert counted(attend, (2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 8)) == (2 * scores, 4 * scores, again)


def test_grouped_products() -> None:
    """Rows of three groups, each multiplied by a matrix of its own."""

    def grouped(x: Tensor, w: Tensor) -> Tensor:
        ends = torch.tensor([8, 8, 24], dtype=torch.int32)
        return F.grouped_mm(x.bfloat16(), w.bfloat16(), offs=ends).float()

    forward, backward, again = counted(grouped, (24, 16), (3, 16, 32))
    assert (forward, backward, again) == (24 * 16 * 32, 2 * 24 * 16 * 32, 0)


def test_what_cannot_be_counted_is_said() -> None:
    model = nn.Sequential(nn.LSTM(4, 8))
    model.eval()
    with observe_coverage(model) as found, torch.no_grad():
        model(torch.randn(3, 2, 4))
    assert found.total() > 0 or found.not_counted


@pytest.mark.parametrize("model", [None, [], [3], "model"])
def test_no_model(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"observe_coverage takes a torch\.nn\.Module"), observe_coverage(model):
        pass


def test_the_block_may_raise() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(RuntimeError), observe_coverage(model):
        model(torch.randn(2, 4))
    with observe_coverage(model) as found:
        model(torch.randn(2, 3))
    assert found.total() == 2 * 3 * 3
    assert not model._forward_hooks
