"""Writes the logs of other tools that tests/record/tool_logs.py names: `make_logs.py te|msprobe FOLDER`.

Made with transformer-engine 2.20.2 and nvdlfw_inspect 0.2.2, and with mindstudio-probe 26.2.0, each in an environment of its
own, with torch 2.13.0. Transformer Engine needs a GPU; see tests/record/logs/README.md for how it ran without one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

STEPS = 3
WIDTH = 32


def transformer_engine(folder: Path) -> None:
    """A text log and an event file of the same statistics, and the operands of the last step."""
    import nvdlfw_inspect.api as nvdlfw
    import transformer_engine.debug.features as features
    import transformer_engine.pytorch as te
    from safetensors.torch import save_file
    from torch.utils.tensorboard import SummaryWriter
    from transformer_engine.common.recipe import DelayedScaling

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)  # the logs name their folder
    operands = {"tensors": ["activation", "weight", "gradient"], "enabled": True}
    in_use = [
        f"fp8_delayed_scaling_{stat}" for stat in ("underflows%", "overflows%", "mse", "scale_inv_min", "scale_inv_max")
    ]
    config = {
        "everything": {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": ".*linear.*"},
            "transformer_engine": {
                "LogTensorStats": operands | {"stats": ["min", "max", "std", "cur_amax", "dynamic_range"]},
                "LogFp8TensorStats": operands | {"stats": [*in_use, "fp8_current_scaling_mse"]},
                "DumpTensors": operands | {"high_precision_tensor": True, "start_step": STEPS - 1},
            },
        }
    }
    writer = SummaryWriter("tensorboard")
    nvdlfw.initialize(
        config_file=config,
        feature_dirs=[os.path.dirname(features.__file__)],
        log_dir=".",
        tb_writer=writer,
        default_logging_enabled=True,
    )
    device = os.environ.get("DEVICE", "cuda")
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": device}

    class Layer(nn.Module):
        """Named as a layer of Megatron."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_number = number
            self.mlp = nn.Module()
            self.mlp.linear_fc1 = te.Linear(WIDTH, WIDTH, **options)
            self.mlp.linear_fc2 = te.Linear(WIDTH, WIDTH, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp.linear_fc2(torch.relu(self.mlp.linear_fc1(x)))

    torch.manual_seed(0)
    model, wrapper = nn.Module(), nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(Layer(number) for number in (1, 2))
    wrapper.module = model
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)
    nvdlfw.infer_and_assign_layer_names([wrapper])
    for step in range(STEPS):
        # Outliers, so that values underflow, that grow, so that they overflow under the scale of the step before.
        x = torch.randn(16, WIDTH, device=device) * (2 * torch.randn(16, WIDTH, device=device)).exp() * 2**step
        x = x.bfloat16().requires_grad_()
        with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")):
            for layer in model.decoder.layers:
                x = layer(x)
        loss = (x.float() ** 2).sum()
        loss.backward()
        nvdlfw.step()
        writer.add_scalar("lm loss", loss, step + 1)  # as Megatron counts
    nvdlfw.end_debug()
    writer.close()

    dumped = sorted(folder.glob(f"tensor_dumps/rank_0/iter_{STEPS - 1:06d}/*.pt"))
    save_file(
        {path.stem: torch.load(path)["high_precision"].cpu().contiguous() for path in dumped},
        folder / f"operands_of_step_{STEPS - 1}.safetensors",
    )
    shutil.rmtree(folder / "tensor_dumps")


class Net(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.fc2 = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(self.fc1(x)).relu())


def msprobe(folder: Path) -> None:
    """CSV files of the first and the second monitor over the same run, of two micro-batches a step."""
    from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

    shutil.rmtree(folder, ignore_errors=True)
    for storage in ("monitor_v2", "monitor"):
        (folder / storage).mkdir(parents=True)
    ops = ["min", "max", "nans", "norm"]
    (folder / "second.json").write_text(
        json.dumps(
            {
                "output_dir": str(folder / "monitor_v2"),
                "step_count_per_record": STEPS,
                "monitors": {name: {"enabled": True, "ops": ops} for name in ("module", "param", "weight_grad")},
            }
        )
    )
    train(lambda model, optimizer: TrainerMonitorV2(str(folder / "second.json")).start(model, optimizer))

    os.environ["MONITOR_OUTPUT_DIR"] = str(folder / "monitor")
    from msprobe.pytorch import TrainerMon

    (folder / "first.json").write_text(
        json.dumps(
            {
                "targets": {"fc1": {}, "fc2": {}},
                "xy_distribution": True,
                "param_distribution": True,
                "wg_distribution": True,
                "format": "csv",
                "ops": ops,
                "step_count_per_record": 2,
            }
        )
    )
    monitor = TrainerMon(str(folder / "first.json"), params_have_main_grad=False)
    train(lambda model, optimizer: monitor.set_monitor(model, grad_acc_steps=2, optimizer=optimizer))
    for left in folder.glob("*.json"):
        left.unlink()


def train(watch) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    for _ in range(STEPS):
        for _ in range(2):
            model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    {"te": transformer_engine, "msprobe": msprobe}[sys.argv[1]](Path(sys.argv[2]).absolute())
