"""The recipe's GPT (recipes/megatron_bridge.py) for Megatron-Bridge 0.3, which has no vanilla GPT to start from."""

from __future__ import annotations

from typing import Any

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
from megatron.bridge.training import config as bridge
from megatron.bridge.training.mixed_precision import get_mixed_precision_config


def configured(output: str, steps: int) -> Any:
    """A GPT of two layers, its TensorBoard events going to `output`."""
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(lr_warmup_iters=500, max_lr=3e-4, min_lr=3e-5)
    precision = get_mixed_precision_config("bf16_with_fp8_delayed_scaling_mixed")
    precision.fp8_param_gather = False
    return bridge.ConfigContainer(
        model=GPTModelProvider(num_layers=2, hidden_size=256, num_attention_heads=4),
        train=bridge.TrainingConfig(train_iters=steps, global_batch_size=8, micro_batch_size=2, eval_iters=0),
        optimizer=optimizer,
        scheduler=scheduler,
        ddp=bridge.DistributedDataParallelConfig(use_distributed_optimizer=False),
        dataset=bridge.MockGPTDatasetConfig(
            seq_length=1024,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
        ),
        logger=bridge.LoggerConfig(tensorboard_dir=output),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=32000),
        checkpoint=bridge.CheckpointConfig(save=None),
        rng=bridge.RNGConfig(seed=1234),
        mixed_precision=precision,
    )
