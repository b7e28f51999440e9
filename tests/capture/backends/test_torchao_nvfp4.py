"""The record of torchao's NVFP4 layer against its reference functions and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Samples
from nvfp4_on_cpu import on_cpu, values
from torch import nn
from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from nemo_fp8_debug import FP8DebugWarning, Monitor
from nemo_fp8_debug.capture.backends.base import UnknownCastError
from nemo_fp8_debug.capture.backends.torchao import casts
from nemo_fp8_debug.capture.backends.torchao.casts import find_cast
from nemo_fp8_debug.kernels import quantization_sums
from nemo_fp8_debug.numerics.formats import E2M1
from nemo_fp8_debug.numerics.nvfp4_scaling import TorchaoNVFP4Scaling

RULE = TorchaoNVFP4Scaling()


def tensors() -> dict[str, torch.Tensor]:
    of = torch.Generator().manual_seed(0)
    normal = torch.randn(128, 256, generator=of)
    loud, small = normal.clone(), normal.clone()
    loud[0] *= 1e6
    small[:, :32] *= 1e-6
    kinds = {"normal": normal, "one loud row": loud, "small blocks": small, "wide": normal.pow(5), "tiny": 1e-30 * normal}
    return {name: x.bfloat16() for name, x in kinds.items()}


@pytest.mark.parametrize("kind", tensors())
def test_scales_are_those_of_torchaos_reference_and_codes_but_for_ties(kind: str) -> None:
    """The reference divides in another order than the kernels, so that values next to a tie may be rounded otherwise."""
    x = tensors()[kind]
    whole = per_tensor_amax_to_scale(x.float().abs().max())
    stored, codes = nvfp4_quantize(x, per_tensor_scale=whole)
    found = RULE.quantize(x, "input", E2M1)
    same = found.scales.stored.view(torch.uint8) == stored.view(torch.uint8)
    assert same.float().mean() > 0.999
    theirs, ours = values(codes, stored, whole), found.dequantize()
    of_same = same.repeat_interleave(16, 1)
    step = found.scales.scale_inv.repeat_interleave(16, 1) * 2.001  # between codes 4 and 6
    differ = (theirs != ours) & of_same & ((theirs - ours).abs() > 1e-6 * ours.abs())
    assert differ.float().mean() < 2e-3
    assert ((theirs - ours).abs()[differ] <= step[differ]).all()


def in_float64(x: torch.Tensor, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes stand for, and the distance of each value from a tie, in units of its scale: all in float64."""
    x = x.double()
    tiles = x.unflatten(0, (-1, high)).unflatten(2, (-1, 16))
    of_block, whole = tiles.abs().amax((1, 3), keepdim=True), x.abs().max()
    stored = (of_block / 6 * (2688 / whole)).clamp(2**-6, 448)
    stored = stored.float().to(torch.float8_e4m3fn).double()
    scaled = (tiles / (stored * whole / 2688)).clamp(-6, 6)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    ties = (grid[1:] + grid[:-1]) / 2
    even = torch.bucketize(scaled.abs(), ties)  # a tie goes down here; none is left where it would matter
    code = grid[even] * scaled.sign()
    from_tie = (scaled.abs()[..., None] - ties).abs().amin(-1)
    return (code * stored * whole / 2688).reshape(x.shape), from_tie.reshape(x.shape)


@pytest.mark.parametrize("role", ["input", "weight"])
@pytest.mark.parametrize("kind", tensors())
def test_values_and_sums_are_those_of_a_model_in_float64(kind: str, role: str) -> None:
    x = tensors()[kind]
    want, from_tie = in_float64(x, 16 if role == "weight" else 1)
    found = RULE.quantize(x, role, E2M1).dequantize()
    clear = from_tie > 1e-5
    assert clear.float().mean() > 0.9
    assert torch.allclose(found[clear], want[clear], rtol=1e-6, atol=0)
    sums = quantization_sums(x, RULE, role, E2M1)
    assert float(sums.sum_q2) == pytest.approx(float(found.square().sum()), rel=1e-9)
    assert int(sums.underflows) == int(((found == 0) & (x != 0)).sum())


def test_zeros_stand_for_zeros() -> None:
    found = RULE.quantize(torch.zeros(16, 32).bfloat16(), "weight", E2M1)
    assert not found.dequantize().any()
    assert (found.scales.stored.float() == 2**-6).all()


def layer(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(NVFP4Linear(128, 256, bias=dtype == torch.bfloat16, dtype=dtype))


def step(model: nn.Module, x: torch.Tensor, **options: Any) -> Samples:
    samples = Samples()
    monitor = Monitor(model, recorders=[samples], interval=1, **options)
    with monitor.step(0):
        model(x).float().square().mean().backward()
    monitor.close()
    return samples


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_metrics_are_those_of_what_its_gemms_multiplied(dtype: torch.dtype) -> None:
    model = layer(dtype)
    x = torch.randn(2, 128, 128, dtype=dtype, requires_grad=True)
    with on_cpu() as gemms, pytest.warns(FP8DebugWarning, match="rounds dY stochastically, so its codes"):
        samples = step(model, x)
    rows = samples.rows(0)
    (by_x, by_w), (_, by_wt), _ = gemms.seen
    assert torch.equal(by_w, by_wt.t())  # one copy of W, turned
    for role, given, codes in (("input", x.flatten(0, 1), by_x), ("weight", model[0].weight, by_w)):
        row, of = rows["0", role], given.detach().bfloat16().double()
        assert (row["scale_source"], row["recipe"], row["format"]) == ("engine", "nvfp4_torchao", "e2m1")
        error = ((of - codes).square().sum() / of.square().sum()).sqrt()
        assert row["relative_error"] == pytest.approx(float(error), rel=1e-3)
        assert row["underflow_pct"] == pytest.approx(100 * float(((of != 0) & (codes == 0)).double().mean()), abs=1e-2)
    assert rows["0", "grad_output"]["scale_source"] == "unknown"
    assert samples.fingerprint["recipe"]["fp8_engine"] == "torchao"


@on_cpu()
def test_outputs_and_gradients_are_bit_identical_with_the_monitor() -> None:
    results = []
    for monitored in (False, True):
        model, x = layer(), torch.randn(128, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        torch.manual_seed(2)  # torchao draws the offsets of its random numbers from the default generator
        if monitored:
            with pytest.warns(FP8DebugWarning):
                step(model, x, output_rows=8)
        else:
            model(x).float().square().mean().backward()
        results.append([x.grad, *(p.grad for p in model.parameters()), torch.rand(3)])
    assert all(map(torch.equal, *results))


UNKNOWN = {
    "an attribute": (lambda m: setattr(m, "four_over_six", True), "has an unsupported attribute 'four_over_six'"),
    "a buffer": (lambda m: m.register_buffer("_amax", torch.ones(1)), "has an unsupported buffer '_amax'"),
    "a kernel": (lambda m: setattr(m, "kernel_preference", "cutedsl"), "kernel_preference=cutedsl"),
    "a group": (lambda m: setattr(m, "process_group", object()), "split by tensor parallelism"),
    "a forward": (lambda m: setattr(m, "forward", m.forward), "forward of its .*NVFP4Linear was replaced"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_of_a_layer_is_named(case: str) -> None:
    change, named = UNKNOWN[case]
    module = layer()[0]
    assert find_cast(module, "input").source == "engine"
    change(module)
    with pytest.raises(UnknownCastError, match=named):
        find_cast(module, "input")


def test_a_release_whose_kernels_were_not_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "NVFP4_RELEASES", ("0.17",))
    with pytest.raises(UnknownCastError, match=r"NVFP4Linear of torchao 0\.18\.0.* is not supported"):
        find_cast(layer()[0], "weight")


def test_every_attribute_of_the_release_that_is_installed_is_in_a_list() -> None:
    plain, module = vars(nn.Linear(1, 1)), NVFP4Linear(128, 128)
    assert vars(module).keys() - plain.keys() == casts.NVFP4_OPTIONS
    assert module._buffers.keys() == casts.NVFP4_BUFFERS
