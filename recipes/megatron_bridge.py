"""Train a small GPT in FP8 with Megatron-Bridge 0.4 or later, on a GPU and with mock data.

    torchrun --nproc-per-node=1 recipes/megatron_bridge.py

Bridge needs Transformer Engine, which needs a GPU. scripts/validation/compat/te_bridge.sh runs this recipe on a CPU, with
emulated kernels.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
from megatron.bridge.training.pretrain import pretrain

from nemo_fp8_debug import FP8DebugBridgeCallback


def configured(output: str, steps: int) -> Any:
    """Return the configuration of a GPT with two layers, whose TensorBoard events go to `output`."""
    config = vanilla_gpt_pretrain_config()
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 2, 256, 4
    config.train.train_iters, config.train.global_batch_size = steps, 8
    config.validation.eval_iters = 0
    config.logger.tensorboard_dir = output
    config.checkpoint.save = None
    config.mixed_precision = get_mixed_precision_config("bf16_with_fp8_delayed_scaling_mixed")
    # Bridge's FP8 presets store weights in FP8. A plan cannot change the cast of such weights, so switch this off.
    config.mixed_precision.fp8_param_gather = False
    return config


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/megatron_bridge")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=10)
    options = parser.parse_args()
    config = configured(options.output, options.steps)
    pretrain(config, forward_step, callbacks=[FP8DebugBridgeCallback(interval=options.interval)])
    print(f"The record is in {options.output}/fp8_debug; look at it with: tensorboard --logdir {options.output}")
