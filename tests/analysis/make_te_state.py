"""Makes te_state.pt: the state_dict of real Transformer Engine modules after three FP8 steps, and the tensors in their
extra states, for test_checkpoint.py and test_stored_scales.py.

`python tests/analysis/make_te_state.py --device cuda` with Transformer Engine on a GPU. The file beside this script was
made by Transformer Engine 2.20.2's own modules on a CPU, with its kernels emulated. Its modules are named as
Megatron's are. Under delayed scaling: layer 0 fits; layer 1's weights grew 4 times since the last step, so that its scales
clip; layer 2's shrank by 2^-6, so that its scales are far too small. Layer 3 ran under current scaling, which stores none.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

LAYERS, HIDDEN = 4, 32
CHANGED_SINCE = {1: 4.0, 2: 2.0**-6}


def layer(device: str) -> torch.nn.Module:
    options = {"bias": False, "device": device, "params_dtype": torch.bfloat16}
    block = torch.nn.Module()
    block.linear_qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, **options)
    block.linear_proj = te.Linear(3 * HIDDEN, HIDDEN, **options)
    return block


def main(device: str) -> None:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([layer(device) for _ in range(LAYERS)])
    delayed = DelayedScaling(amax_history_len=4, amax_compute_algo="max", fp8_format=Format.HYBRID)
    for _ in range(3):
        for i, block in enumerate(layers):
            with te.autocast(enabled=True, recipe=Float8CurrentScaling() if i == LAYERS - 1 else delayed):
                y = block.linear_proj(block.linear_qkv(torch.randn(16, HIDDEN, dtype=torch.bfloat16, device=device)))
            y.sum().backward()
    with torch.no_grad():
        for i, factor in CHANGED_SINCE.items():
            for parameter in layers[i].parameters():
                parameter *= factor
    state = {f"decoder.layers.{name}": value for name, value in layers.state_dict().items()}
    plain = {key: without_recipe(value) for key, value in state.items() if key.endswith("_extra_state") and value.numel()}
    torch.save({"model": state, "plain": plain}, Path(__file__).with_name("te_state.pt"))


def without_recipe(extra_state: torch.Tensor) -> dict[str, Any]:
    """What can be read where Transformer Engine is not installed."""
    return {k: v for k, v in pickle.loads(extra_state.numpy().tobytes()).items() if k != "recipe"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    main(parser.parse_args().device)
