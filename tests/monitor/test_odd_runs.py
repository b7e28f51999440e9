"""Runs that do what the monitor does not expect: none of it may change, hang or end them."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Samples
from processes import finished
from test_emulate import attached
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import FP8DebugWarning, Monitor


def monitored(model: nn.Module, **options: Any) -> tuple[Monitor, Samples]:
    samples = Samples()
    return Monitor(model, recorders=[samples], interval=1, **options), samples


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_layers_that_are_recorded_into_a_cuda_graph_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is told to say that it records, since without a GPU nothing can be recorded."""
    recording = False

    class Recorded(nn.Linear):
        def __call__(self, x: torch.Tensor) -> Any:
            nonlocal recording
            recording = True
            try:
                return super().__call__(x)
            finally:
                recording = False

    for asked in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, asked, lambda: recording)
    model = nn.Sequential(nn.Linear(4, 4), Recorded(4, 4), nn.Linear(4, 4))
    monitor, samples = monitored(model)
    with pytest.warns(FP8DebugWarning, match=r"1 of 3 layers gave no sample, first 1: .* in a CUDA graph"):
        with monitor.step(0):
            model(torch.randn(2, 4)).sum().backward()
        monitor.close()
    assert {layer for layer, _ in samples.rows(0)} == {"0", "2"}
    assert len(samples.rows(0)) == 6


def test_calls_under_vmap_are_left_out_and_the_others_stay() -> None:
    """Per-sample gradients beside the step itself, as for a noise scale."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))

    def per_sample(model: nn.Module) -> torch.Tensor:
        weights = dict(model.named_parameters())
        loss = lambda w, x: torch.func.functional_call(model, w, (x,)).square().sum()  # noqa: E731
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)["0.weight"]

    found, gradients = [], []
    for transforms in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        monitor, samples = monitored(model)
        with warnings.catch_warnings(record=True) as caught, monitor.step(0):
            warnings.simplefilter("always")
            model(x).square().sum().backward()
            if transforms:
                gradients.append(per_sample(model))
        assert hooks_on(model) == 0
        gradients.append(per_sample(model))
        monitor.close()
        found.append(samples.rows(0))
        told = [str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning)]
        assert ["0 is called under a transform of torch.func" in text for text in told] == [True] * transforms
    assert len(found[0]) == 6 and found[0] == found[1]
    assert torch.equal(gradients[1], gradients[2])


WORKERS_USE_POLARS = """
import sys
import polars as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from nemo_fp8_debug import Monitor

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        return torch.tensor(pl.DataFrame({"a": range(8)}).select(pl.col("a") + i)["a"].to_list()).float()

model = nn.Linear(8, 1)
monitor = Monitor(model, sys.argv[1], interval=1, table_rows=0)
for epoch in range(3):
    for i, x in enumerate(DataLoader(Rows(), num_workers=1, timeout=1200)):
        with monitor.step(4 * epoch + i):
            model(x).sum().backward()
monitor.close()
"""


def test_workers_forked_after_a_sample_can_use_polars(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", WORKERS_USE_POLARS, str(tmp_path)]
    done = finished(*command)
    assert done.returncode == 0, done.stderr[-2000:]


WITH_COMPILED_PART = """
import torch
from torch import nn
from nemo_fp8_debug import ConfigError
from nemo_fp8_debug.capture.gemms import find_gemms, require_matching_gemms

part = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
in_place = nn.Linear(4, 4)
in_place.compile(backend="eager")
print([g.name for g in require_matching_gemms(find_gemms([nn.Sequential(nn.Linear(4, 4), part, in_place)]), None)])
try:
    require_matching_gemms(find_gemms([part]), None)
except ConfigError as error:
    print(error)
"""


def test_layers_inside_torch_compile_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    command = [sys.executable, "-W", "ignore", "-c", WITH_COMPILED_PART]
    chosen, refused = finished(*command).stdout.splitlines()
    assert chosen == "['0']"
    assert refused.startswith("'0' and all other chosen layers run inside torch.compile")


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_after_a_forward_without_grad_counts_once(reentrant: bool) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4).requires_grad_()
    monitor, samples = monitored(model, on_error="raise")
    with monitor.step(0):
        with torch.no_grad():
            model(x)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert [row["calls"] for row in samples.rows(0).values()] == [1, 1, 1]


def test_an_operand_in_two_dtypes_is_left_out_and_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monitor, samples = monitored(model)
    with pytest.warns(
        FP8DebugWarning, match=r"X of 0, dY of 0 are missing.*float32 in one call and torch.bfloat16 in another"
    ):
        with monitor.step(0):
            model(torch.randn(2, 4)).sum().backward()
            with torch.autocast("cpu", torch.bfloat16):
                model[0](torch.randn(2, 4)).sum().backward()
        monitor.close()
    assert ("0", "input") not in samples.rows(0)
    assert ("1", "input") in samples.rows(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_dtype_that_fp8_does_not_stand_in_for(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4, dtype=dtype)
    monitor, samples = monitored(model)
    with pytest.warns(FP8DebugWarning, match="which FP8 does not replace"):
        with monitor.step(0):
            model(torch.randn(2, 4, dtype=dtype)).abs().sum().backward()
        monitor.close()
    assert len(samples.samples[0]) == 0


@pytest.mark.parametrize("recipe", ["current", {"name": "delayed", "amax_history_len": 2}])
def test_a_bfloat16_default_dtype_changes_no_metric(recipe: Any) -> None:
    def rows() -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Linear(16, 16, dtype=torch.bfloat16)
        monitor, samples = monitored(model, recipe=recipe, on_error="raise")
        for step in range(3):
            with monitor.step(step):
                model(torch.randn(8, 16, dtype=torch.float32).bfloat16()).sum().backward()
        return [row for step in range(3) for row in samples.rows(step).values()]

    expected = rows()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert rows() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_copies_made_in_a_sampled_step_carry_no_hook_that_acts() -> None:
    model = nn.Linear(4, 4)
    monitor, samples = monitored(model, on_error="raise")
    with monitor.step(0):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for each in copies:
            each(torch.randn(2, 4)).sum().backward()
        model(torch.randn(2, 4)).sum().backward()
    assert [row["calls"] for row in samples.rows(0).values()] == [1, 1, 1]


def test_an_emulated_model_can_be_copied_and_pickled() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    plain = model(x)
    attached(model, "current")
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each(x), plain)


def test_an_interrupted_forward_does_not_keep_the_quantized_weight() -> None:
    class Interrupted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = Interrupted(4, 4)
    own = model.weight
    emulation = attached(model, "current")
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 4))
    emulation.detach()
    assert model.weight is own


def test_warnings_turned_into_errors_do_not_stop_the_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monitor, samples = monitored(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monitor.step(0):
            model[0](torch.randn(2, 4)).sum().backward()
        monitor.close()
    assert len(samples.samples[0]) == 3


def test_a_step_begun_twice_leaves_no_hook() -> None:
    model = nn.Linear(4, 4)
    monitor, _ = monitored(model)
    monitor.begin_step(0)
    monitor.begin_step(1)
    monitor.close()
    assert hooks_on(model) == 0


def test_what_is_no_scalar_costs_only_itself() -> None:
    model = nn.Linear(4, 4)
    monitor, samples = monitored(model)
    with pytest.warns(FP8DebugWarning, match="loss of a step is not recorded: it is not a scalar but Tensor"):
        for step in range(3):
            with monitor.step(step) as report:
                model(torch.randn(2, 4)).sum().backward()
                report(loss=torch.ones(2) if step == 1 else torch.tensor(2.0), lr=0.5)
        monitor.close()
    assert [scalars.get("loss") for scalars in samples.steps.values()] == [2.0, None, 2.0]
    assert [scalars["lr"] for scalars in samples.steps.values()] == [0.5, 0.5, 0.5]


def test_modules_that_compute_their_weight_or_multiply_inside() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    monitor, samples = monitored(model := Model(), on_error="raise")
    x = torch.randn(3, 1, 8)
    with monitor.step(0):
        model.normed(model.attention(x, x, x)[0]).sum().backward()
    layers = ("attention.in_proj", "attention.out_proj", "normed")
    rows = samples.rows(0)
    assert set(rows) == set(itertools.product(layers, ("input", "weight", "grad_output")))
    assert rows["normed", "weight"]["amax"] == model.normed.weight.abs().max().item()
    assert {row["scale_source"] for row in rows.values()} == {"current"}
