"""Where each version of Transformer Engine keeps its scales, by modules that look like its own.

The real modules of 2.20 run in tests/te. These have the attributes of older versions, read from their sources: where the
state manager lives, what holds a scale, and which slot is whose.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Samples
from torch import nn

from nemo_fp8_debug import ConfigError, Monitor
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.interventions.emulate import Emulation
from nemo_fp8_debug.numerics.recipe import parse_recipe

EXPERTS = 2


class Format(Enum):
    HYBRID = 1


class Float8Quantizer:
    """Up to 1.13 there is none."""

    def __init__(self, scale: torch.Tensor, dtype: str) -> None:
        self.scale, self.amax, self.dtype = scale, torch.zeros(1), SimpleNamespace(name=dtype)
        self.rowwise_usage = self.columnwise_usage = True
        self.internal = False


class FP8TensorMeta:
    """What holds a direction's scales in 1.13."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale, self.scale_inv = scale, 1 / scale


class Call(torch.autograd.Function):
    """What the modules' functions leave for their backward in all versions."""

    @staticmethod
    def forward(ctx: Any, module: Any, out: torch.Tensor) -> torch.Tensor:
        ctx.fp8 = module.fp8
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grads[0]


@dataclass
class DelayedScaling:
    """As in all versions; 1.13's has no method that tells its kind."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 16
    amax_compute_algo: str = "max"


@dataclass(frozen=True)
class Version:
    #: submodule of transformer_engine.pytorch that has FP8GlobalStateManager
    holder: str
    #: slot of LayerNormMLP's fc2 dY
    fc2_dy: int
    #: GroupedLinear: whether slots lie expert by expert, and are counted a GEMM
    by_expert: bool
    debug: bool
    has_quantizers: bool = True


VERSIONS = {
    "1.13": Version("fp8", 0, False, False, has_quantizers=False),
    "2.2": Version("fp8", 0, False, False),
    "2.8": Version("fp8", 2, True, True),
    "2.15": Version("quantization", 2, True, True),
}


class Base(nn.Module):
    def __init__(self, version: Version, slots: int) -> None:
        super().__init__()
        self.fp8 = True
        scales = {"scaling_fwd": 100.0, "scaling_bwd": 1000.0}  # each slot a scale of its own
        self.fp8_meta: dict[str, Any] = {"recipe": DelayedScaling()}
        formats = {"scaling_fwd": "kFloat8E4M3", "scaling_bwd": "kFloat8E5M2"}
        for key, first in scales.items():
            state = self.fp8_meta[key] = FP8TensorMeta(first + torch.arange(slots))
            if version.has_quantizers:
                self.quantizers = getattr(self, "quantizers", {})
                self.quantizers[key] = [Float8Quantizer(scale, formats[key]) for scale in state.scale]
        self._fp8_workspaces: dict[str, Any] = {}
        self.eps, self.normalization, self.zero_centered_gamma = 1e-5, "LayerNorm", False
        if version.debug:
            self._get_debug_quantizers = lambda: None

    def add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.randn(shape).bfloat16()))


class Linear(Base):
    """Called as te.Linear is: `forward(inp, is_first_microbatch=None)`, returning (out, bias)."""

    def __init__(self, version: Version) -> None:
        super().__init__(version, 3)
        self.add("weight", 8, 8)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> tuple[torch.Tensor, None]:
        return Call.apply(self, inp @ self.weight.t()), None  # type: ignore[no-untyped-call]


class LayerNormLinear(Linear):
    def __init__(self, version: Version) -> None:
        super().__init__(version)
        self.add("layer_norm_weight", 8)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> tuple[torch.Tensor, None]:
        return super().forward(nn.functional.layer_norm(inp, (8,), self.layer_norm_weight))


class LayerNormMLP(Base):
    def __init__(self, version: Version) -> None:
        super().__init__(version, 6)
        for name, shape in (("layer_norm_weight", (8,)), ("fc1_weight", (16, 8)), ("fc2_weight", (8, 16))):
            self.add(name, *shape)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        hidden = nn.functional.layer_norm(inp, (8,), self.layer_norm_weight) @ self.fc1_weight.t()
        return Call.apply(self, hidden.relu() @ self.fc2_weight.t())  # type: ignore[no-any-return, no-untyped-call]


class GroupedLinear(Base):
    def __init__(self, version: Version) -> None:
        super().__init__(version, 3 * EXPERTS)
        self.num_gemms = EXPERTS
        if version.by_expert:
            self._offsets = {"input": 0, "weight": 1, "output": 2, "grad_output": 0, "grad_input": 1}
            self._num_fp8_tensors_per_gemm = {"fwd": 3, "bwd": 2}
        else:
            self._offsets = {"input": 0, "weight": EXPERTS, "output": 2 * EXPERTS, "grad_output": 0, "grad_input": EXPERTS}
        for i in range(EXPERTS):
            self.add(f"weight{i}", 8, 8)

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> torch.Tensor:
        rows = inp.split(m_splits)
        outs = [x @ getattr(self, f"weight{i}").t() for i, x in enumerate(rows)]
        return Call.apply(self, torch.cat(outs))  # type: ignore[no-any-return, no-untyped-call]


class Layer(nn.Module):
    def __init__(self, version: Version) -> None:
        super().__init__()
        self.fc1, self.fc2 = LayerNormLinear(version), Linear(version)
        self.mlp, self.experts = LayerNormMLP(version), GroupedLinear(version)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc2(inp=self.fc1(x, is_first_microbatch=True)[0])[0]
        return self.experts(self.mlp(x), [3, 1])


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Version:
    found = VERSIONS[request.param]
    te: Any = ModuleType("transformer_engine.pytorch")
    te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.GroupedLinear = Linear, LayerNormLinear, LayerNormMLP, GroupedLinear
    holder: Any = ModuleType(f"transformer_engine.pytorch.{found.holder}")
    holder.FP8GlobalStateManager = SimpleNamespace(
        is_fp8_enabled=lambda: True, get_fp8_recipe=DelayedScaling, FP8_AUTOCAST_DEPTH=1
    )
    root: Any = ModuleType("transformer_engine")
    root.__version__ = "2.20.2"
    for cls, place in ((Float8Quantizer, "tensor.float8_tensor"), (Call, "module"), (DelayedScaling, "recipe")):
        monkeypatch.setattr(cls, "__module__", f"transformer_engine.pytorch.{place}")
    for module in (root, te, holder):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    return found


def sampled(layer: nn.Module, on_error: str = "raise") -> dict[tuple[str, str], dict[str, Any]]:
    samples = Samples()
    monitor = Monitor(layer, recorders=[samples], interval=1, on_error=on_error)
    with monitor.step(0):
        layer(torch.randn(4, 8).bfloat16()).float().square().sum().backward()
    monitor.close()
    return samples.rows(0)


def test_every_scale_is_that_of_the_slot_that_the_version_gives_it(version: Version) -> None:
    rows = sampled(Layer(version))
    assert {row["scale_source"] for row in rows.values()} == {"engine"}
    expected = {
        **{(name, role): slot for name in ("fc1", "fc2") for role, slot in (("input", 100), ("weight", 101))},
        **{(name, "grad_output"): 1000 for name in ("fc1", "fc2")},
        ("mlp.fc1", "input"): 100,
        ("mlp.fc1", "weight"): 101,
        ("mlp.fc2", "weight"): 104,
        ("mlp.fc2", "grad_output"): 1000 + version.fc2_dy,
    }
    for i in range(EXPERTS):
        slots = (3 * i, 3 * i + 1, 2 * i) if version.by_expert else (i, EXPERTS + i, i)
        for role, first, slot in zip(("input", "weight", "grad_output"), (100, 100, 1000), slots, strict=True):
            expected[f"experts.{i}", role] = first + slot
            expected.setdefault(("experts.*", role), first + slot)  # the smallest
    assert {key: row["scale"] for key, row in rows.items()} == expected


def test_a_state_that_has_changed_costs_one_warning_an_operand_and_no_metric(version: Version) -> None:
    layer = Layer(version)
    if version.has_quantizers:
        for quantizer in layer.fc2.quantizers["scaling_fwd"]:
            del quantizer.scale
    else:
        del layer.fc2.fp8_meta["scaling_fwd"].scale
    with pytest.warns(UserWarning, match="could not read how the engine casts X of fc2") as caught:
        rows = sampled(layer, on_error="warn")
    assert len([w for w in caught if "fc2" in str(w.message)]) == 2
    assert rows["fc2", "input"]["scale_source"] == rows["fc2", "weight"]["scale_source"] == "unknown"
    assert rows["fc2", "input"]["mse"] > 0
    assert rows["fc2", "grad_output"]["scale_source"] == rows["fc1", "input"]["scale_source"] == "engine"


def test_emulation_is_refused(version: Version) -> None:
    with pytest.raises(ConfigError, match=r"fc1 is a module of Transformer Engine.*does its own quantization"):
        Emulation.from_gemms(find_gemms([Layer(version)]), parse_recipe("delayed"))
