"""Expected sums of stochastic rounding, against the mean of many casts that are drawn; the Hadamard transform."""

from __future__ import annotations

import pytest
import torch

from nemo_fp8_debug.errors import ConfigError
from nemo_fp8_debug.kernels import quantization_sums
from nemo_fp8_debug.numerics.block_scaling import expected_sums
from nemo_fp8_debug.numerics.formats import E2M1, E4M3
from nemo_fp8_debug.numerics.nvfp4_scaling import NVFP4Scaling, hadamard_matrix

STEPS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def drawn(scaled: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
    """Values of E2M1, each drawn from its two neighbors."""
    grid = torch.tensor([-s for s in reversed(STEPS[1:])] + STEPS)
    x = scaled.clamp(-6, 6)
    high = torch.searchsorted(grid, x).clamp(1, len(grid) - 1)
    low, top = grid[high - 1], grid[high]
    return torch.where(torch.rand(x.shape, generator=dice) < (x - low) / (top - low), top, low)


def test_sums_are_the_means_of_what_is_drawn() -> None:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=dice)
    x[0, :4] = torch.tensor([0.0, 9.0, -9.0, 0.5])
    scale = 2.0
    draws = torch.stack([drawn(x * scale, dice) / scale for _ in range(2000)]).double()
    found = expected_sums(x, x * scale, torch.full((1,), 1 / scale, dtype=torch.float64), E2M1)
    assert found.sum_error2.item() == pytest.approx(float((draws - x).square().sum((1, 2)).mean()), rel=3e-3)
    assert found.sum_xq.item() == pytest.approx(float((draws * x).sum((1, 2)).mean()), rel=1e-3)
    assert found.sum_q2.item() == pytest.approx(float(draws.square().sum((1, 2)).mean()), rel=1e-3)
    lost = ((draws == 0) & (x != 0)).sum((1, 2)).double().mean()
    assert found.underflows.item() == pytest.approx(float(lost), abs=1)
    assert found.overflows.item() == int((x.abs() * scale > 6).sum())


def test_a_rule_that_rounds_by_chance_is_measured_so() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    by_chance = quantization_sums(x, NVFP4Scaling(stochastic=True), "grad_output", E2M1)
    nearest = quantization_sums(x, NVFP4Scaling(), "grad_output", E2M1)
    assert 1.5 < (by_chance.sum_error2 / nearest.sum_error2).item() < 2.5
    assert by_chance.sum_xq.item() == pytest.approx(float(x.double().square().sum()), rel=1e-2)


def test_other_formats_are_not_rounded_by_chance() -> None:
    with pytest.raises(ValueError, match="not for e4m3"):
        expected_sums(torch.ones(1), torch.ones(1), torch.ones(1), E4M3)


@pytest.mark.parametrize("signs", [False, True])
def test_the_hadamard_matrix_is_orthogonal(signs: bool) -> None:
    matrix = hadamard_matrix(signs, torch.device("cpu")).double()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16).double())
    assert bool((matrix[0] == 0.25).all()) and bool((matrix[3, 0] == -0.25).item()) is signs


def test_groups_of_16_along_the_columns_are_transformed() -> None:
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(2))
    found = NVFP4Scaling(hadamard="signs").transpose_for_columnwise(x)
    matrix = hadamard_matrix(True, x.device)
    assert torch.allclose(found[1, 16:], x[16:, 1] @ matrix, atol=1e-6)
    with pytest.raises(ValueError, match="24 rows"):
        NVFP4Scaling(hadamard="signs").transpose_for_columnwise(x[:24])
    with pytest.raises(ConfigError, match="hadamard"):
        NVFP4Scaling(hadamard="random")
