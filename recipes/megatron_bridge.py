"""A small GPT trained by Megatron-Bridge 0.4 or later: `torchrun --nproc-per-node=1 recipes/megatron_bridge.py`, on a GPU.

Bridge imports Transformer Engine, so that this one does not run on a CPU. The data are mock data.
"""

from __future__ import annotations

import argparse

from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from nemo_fp8_debug.adapters.megatron_bridge import FP8DebugBridgeCallback

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/megatron_bridge")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=10)
    options = parser.parse_args()
    config = vanilla_gpt_pretrain_config()
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 2, 256, 4
    config.train.train_iters, config.train.global_batch_size = options.steps, 8
    config.validation.eval_iters = 0
    config.logger.tensorboard_dir = options.output
    config.checkpoint.save = None
    pretrain(config, forward_step, callbacks=[FP8DebugBridgeCallback(interval=options.interval)])
    print(f"The record is in {options.output}/fp8_debug; look at it with: tensorboard --logdir {options.output}")
