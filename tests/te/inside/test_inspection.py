"""What Transformer Engine's inspection hands over of the inside of LayerNormMLP, and what it changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvdlfw_inspect.api as nvdlfw
import pytest
import torch
from emulated_te import te
from host_runs import DELAYED, checked, run, tokens
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.debug.features.api import TEDefaultFeatures
from transformer_engine.debug.pytorch.debug_quantization import DebugQuantizer
from transformer_engine.debug.pytorch.debug_state import TEDebugState

from nemo_fp8_debug import ConfigError, FP8DebugWarning, Monitor
from nemo_fp8_debug.capture.backends.transformer_engine import inspection
from nemo_fp8_debug.record.reader import read_table

CURRENT = Float8CurrentScaling()
FEATURE = Path(inspection.__file__).parent / "feature"
pytestmark = pytest.mark.usefixtures("fresh_session")

RECIPES = pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
GEMMS = {"mlp.fc1": ("mlp", 0), "mlp.fc2": ("mlp", 1)}
HIDDEN = {("mlp.fc2", "input"), ("mlp.fc1", "grad_output")}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors for which a module asked whether they are to be inspected."""
    asked: list[str] = []
    init = DebugQuantizer.__init__

    def remember(self: Any, layer: str, tensor: str, *args: Any) -> None:
        asked.append(tensor)
        init(self, layer, tensor, *args)

    monkeypatch.setattr(DebugQuantizer, "__init__", remember)
    return asked


def mlp(**options: Any) -> nn.ModuleDict:
    options = {"params_dtype": torch.bfloat16, "bias": False} | options
    return nn.ModuleDict({"mlp": te.LayerNormMLP(32, 64, **options)})


def stepping(model: nn.ModuleDict, recipe: Any) -> Callable[[int], None]:
    def step(number: int) -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model["mlp"](tokens(number, size=1 + number))
        y.float().square().sum().backward()

    return step


@RECIPES
class TestOperands:
    @pytest.mark.parametrize("activation", ["gelu", "swiglu"])
    @pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
    def test_scales_and_codes(self, tmp_path: Path, recipe: Any, activation: str, normalization: str) -> None:
        inspection.enable()
        model = mlp(activation=activation, normalization=normalization)
        casts = run(tmp_path, model, stepping(model, recipe), steps=5)
        assert checked(tmp_path, model, casts, GEMMS) == 5 * 6

    def test_micro_batches(self, tmp_path: Path, recipe: Any) -> None:
        inspection.enable()
        model = mlp()

        def step(number: int) -> None:
            for i in range(3):
                with te.autocast(enabled=True, recipe=recipe):
                    y = model["mlp"](tokens(10 * number + i, size=4.0**i), is_first_microbatch=i == 0)
                y.float().square().sum().backward()

        # Every other step, so that a cached weight passes from one path to the other.
        casts = run(tmp_path, model, step, steps=5, interval=2)
        assert checked(tmp_path, model, casts, GEMMS) == 3 * (2 + 3 * 4)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_recompute(self, tmp_path: Path, recipe: Any, reentrant: bool) -> None:
        inspection.enable()
        model = mlp()

        def step(number: int) -> None:
            with te.autocast(enabled=True, recipe=recipe):
                y = te.checkpoint(model["mlp"], tokens(number, size=1 + number), use_reentrant=reentrant)
            y.float().square().sum().backward()

        casts = run(tmp_path, model, step, steps=4)
        assert any(cast.recompute for cast in casts[2])
        # A first pass without gradient leaves no word of which features of nvdlfw_inspect took part in its casts.
        untold = [("mlp.fc1", "input"), ("mlp.fc1", "weight"), ("mlp.fc2", "weight")] if reentrant else []
        assert checked(tmp_path, model, casts, GEMMS, untold) == 4 * (6 - len(untold))
        metrics = read_table(tmp_path, "metrics")
        assert set(metrics["calls"]) == {1}
        unknown = metrics.filter(scale_source="unknown").select("layer", "role").unique().rows()
        assert sorted(unknown) == sorted(untold)

    def test_the_module_recomputes_for_itself(self, tmp_path: Path, recipe: Any) -> None:
        inspection.enable()
        model = mlp(checkpoint=True)
        run(tmp_path, model, stepping(model, recipe), dump=[])
        metrics = read_table(tmp_path, "metrics")
        assert set(metrics["calls"]) == {1}
        assert set(metrics.select("layer", "role").rows()) >= HIDDEN

    def test_the_order_of_execution(self, tmp_path: Path, recipe: Any) -> None:
        """What a weight breaks is found broken after the weight, not with it."""
        inspection.enable()
        model = mlp()
        with torch.no_grad():
            model["mlp"].fc1_weight[0, 0] = torch.nan
        run(tmp_path, model, stepping(model, recipe), steps=1, dump=[])
        metrics = read_table(tmp_path, "metrics").filter(layer="mlp.fc2")
        order = dict(metrics.select("role", "nonfinite_order").rows())
        broken = read_table(tmp_path, "metrics").filter(layer="mlp.fc1", role="weight")["nonfinite_order"].item()
        assert broken is not None and order["input"] == broken + 1


@RECIPES
class TestUnsampledSteps:
    def test_no_module_asks(self, tmp_path: Path, recipe: Any, asked: list[str]) -> None:
        inspection.enable()
        model = mlp()
        step = stepping(model, recipe)
        monitor = Monitor(model, str(tmp_path), interval=3, first_step=1, table_rows=0, on_error="raise")
        found = {}
        for number in range(1, 8):
            asked.clear()
            with monitor.step(number):
                step(number)
            step(number)  # as validation does, between steps
            found[number] = len(asked)
        monitor.close()
        assert [number for number, times in found.items() if times] == [3, 6]
        metrics = read_table(tmp_path, "metrics")
        assert set(metrics["step"]) == {3, 6}
        assert monitor.fingerprint["sampled"]["gemms_inspected"] == 2
        assert set(metrics.select("layer", "role").rows()) >= HIDDEN

    def test_layers_that_are_not_chosen(self, tmp_path: Path, recipe: Any) -> None:
        inspection.enable()
        model = mlp()
        casts = run(tmp_path, model, stepping(model, recipe), dump=["*fc1"], layers=["*fc1"])
        assert checked(tmp_path, model, casts, GEMMS) == 3 * 3


class TestWhatItChanges:
    """Losses with and without, bit for bit, over emulated kernels; those of a GPU round in the same places."""

    @staticmethod
    def losses(folder: Path, recipe: Any, inspected: bool, sampled: int, lr: float, activation: str) -> list[float]:
        nvdlfw.end_debug()
        TEDebugState._reset()
        if inspected:
            inspection.enable()
        torch.manual_seed(0)
        model = nn.Sequential(mlp(activation=activation, bias=True)["mlp"], te.Linear(32, 32, params_dtype=torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        window = {"interval": 1, "first_step": sampled, "last_step": sampled}
        monitor = Monitor(model, str(folder / str(inspected)), **window, table_rows=0, on_error="raise")
        losses = []
        for number in range(7):
            optimizer.zero_grad()
            with monitor.step(number):
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    y = model(tokens(number))
                loss = y.float().square().mean()
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        monitor.close()
        return losses

    def changed(self, folder: Path, recipe: Any, sampled: int = 3, lr: float = 0.1, activation: str = "swiglu") -> list[int]:
        plain, inspected = (self.losses(folder, recipe, on, sampled, lr, activation) for on in (False, True))
        return [number for number, (a, b) in enumerate(zip(plain, inspected, strict=True)) if a != b]

    @pytest.mark.parametrize("recipe", [DELAYED, CURRENT, None], ids=["delayed", "current", "bf16"])
    def test_nothing_where_nothing_is_sampled(self, tmp_path: Path, recipe: Any) -> None:
        assert self.changed(tmp_path, recipe, sampled=100) == []

    @pytest.mark.parametrize("recipe", [CURRENT, None], ids=["current", "bf16"])
    def test_nothing_where_the_engine_rounds_to_bf16_before_it_casts(self, tmp_path: Path, recipe: Any) -> None:
        """As it does without a delayed scale: the amax has to be known first. BF16 with GELU fuses, and is not emulated."""
        assert self.changed(tmp_path, recipe) == []

    def test_gelu_under_current_scaling(self, tmp_path: Path) -> None:
        assert self.changed(tmp_path, CURRENT, activation="gelu") == []

    @pytest.mark.parametrize("activation", ["gelu", "swiglu"])
    def test_delayed_scaling(self, tmp_path: Path, activation: str) -> None:
        """Norm and activation cast their FP32 result otherwise, and BF16 here; from then on weights differ."""
        assert self.changed(tmp_path, DELAYED, activation=activation) == [3, 4, 5, 6]

    def test_amaxes_that_were_rounded_move_later_scales(self, tmp_path: Path) -> None:
        """With weights that stay as they are: the sampled step, and those whose scale comes from its amax."""
        assert self.changed(tmp_path, DelayedScaling(amax_history_len=1), lr=0.0) == [3, 4]


class TestRefusals:
    def test_after_the_first_module(self) -> None:
        mlp()
        with pytest.raises(ConfigError, match="exists already"):
            inspection.enable()
        assert not inspection.enabled()

    def test_somebody_else_inspects(self, tmp_path: Path) -> None:
        inspection.enable()
        inspection.enable()
        nvdlfw.end_debug()
        assert not inspection.enabled()
        nvdlfw.initialize(inspection._CONFIG, feature_dirs=[str(FEATURE)], log_dir=str(tmp_path))
        with pytest.raises(ConfigError, match="in use already"):
            inspection.enable()

    def test_a_version_that_cannot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TEDefaultFeatures, "inspect_tensor", lambda self, tensor: None)
        with pytest.raises(ConfigError, match=r"2\.7 or later"):
            inspection.enable()

    def test_no_nvdlfw_inspect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "nvdlfw_inspect.api", None)
        with pytest.raises(ConfigError, match="nvdlfw_inspect"):
            inspection.enable()

    def test_modules_that_share_a_name(self, tmp_path: Path) -> None:
        """They cannot be told apart: their inside is left out, everything else is sampled."""
        inspection.enable()
        model = mlp(name="same")
        model["other"] = mlp(name="same")["mlp"]
        with pytest.warns(FP8DebugWarning, match="share the `name` 'same'"):
            run(tmp_path, model, stepping(model, DELAYED), dump=[], on_error="warn")
        found = set(read_table(tmp_path, "metrics").select("layer", "role").rows())
        assert not HIDDEN & found and ("mlp.fc1", "input") in found

    def test_a_delayed_weight_gradient(self, tmp_path: Path) -> None:
        """Every module asks for features at the first sampled step, and one that delays raises then."""
        inspection.enable()
        model = mlp()
        model["proj"] = te.Linear(32, 32, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
        with pytest.raises(ConfigError, match="proj has delay_wgrad_compute"):
            Monitor(model, str(tmp_path))

    def test_tensor_parallelism(self, tmp_path: Path) -> None:
        """Its communication differs on the debug path, which other ranks would have to take as well."""
        inspection.enable()
        model = mlp()
        model["mlp"].tp_size = 2
        with pytest.warns(FP8DebugWarning, match=r"inside of 1 layers.*mlp.fc1.*tensor parallelism"):
            Monitor(model, str(tmp_path), layers=["*fc1"]).close()
