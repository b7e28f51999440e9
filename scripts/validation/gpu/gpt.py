"""A megatron-core GPT on Transformer Engine's layers in real FP8, in a plain loop: a billion parameters, or a tiny one."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .parts import Part

#: (layers, hidden size, sequence, micro-batch): about 1.1 billion parameters, and what a CPU can do
SIZES = {"1b": (20, 2048, 2048, 2), "tiny": (2, 32, 16, 2)}
VOCABULARY = {"1b": 32000, "tiny": 64}


@dataclass(frozen=True)
class Setup:
    """What is trained, and where."""

    recipe: str
    size: str
    device: str

    @classmethod
    def of(cls, part: Part, device: str) -> Setup:
        """Of a part of a recipe; a CPU trains the tiny one."""
        assert part.recipe
        return cls(part.recipe, "tiny" if device == "cpu" else "1b", device)

    def model(self) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
        from megatron.core.transformer import TransformerConfig

        seed(self.device)
        layers, hidden, sequence, _ = SIZES[self.size]
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=4 * hidden,
            num_attention_heads=max(4, hidden // 128),
            use_cpu_initialization=self.device == "cpu",
            add_bias_linear=False,
            normalization="RMSNorm",
            attention_dropout=0.0,
            hidden_dropout=0.0,
            gradient_accumulation_fusion=False,
            bf16=True,
            params_dtype=torch.bfloat16,
            fp8="hybrid",
            fp8_recipe=self.recipe,
        )
        spec = get_gpt_layer_with_transformer_engine_spec()
        model = GPTModel(config, spec, vocab_size=VOCABULARY[self.size], max_sequence_length=sequence)
        return model.bfloat16().to(self.device)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, _, sequence, rows = SIZES[self.size]
        seed = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY[self.size] // 8, (rows, sequence), generator=seed).to(self.device)
        return tokens, torch.arange(sequence, device=self.device).expand(rows, sequence)


def seed(device: str) -> None:
    """Let every model begin with the same weights; Megatron draws them on a device from states of its own."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(0)
    if device != "cpu":
        model_parallel_cuda_manual_seed(0)


class GPT:
    """A model, its optimizer and its data; enter `megatron` first."""

    def __init__(self, setup: Setup, rate: float = 1e-4) -> None:
        self.setup, self.model = setup, setup.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self._steps = 0

    def step(self) -> torch.Tensor:
        """Forward, backward and optimizer; returns the loss."""
        self.model.set_is_first_microbatch()
        tokens, positions = self.setup.batch(self._steps)
        self._steps += 1
        loss = self.model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def forget_models() -> None:
    """Let go of models that are not used any longer; Transformer Engine would go on updating their delayed scales."""
    from transformer_engine.pytorch.module.base import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def megatron(emulate: bool) -> Iterator[str]:
    """One rank, and the device that it trains on; over emulated kernels where there is no GPU."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as store:
        if emulate:
            import emulated_te  # noqa: F401
            from megatron_on_cpu import megatron_on_cpu
        from megatron.core import parallel_state

        backend = "gloo" if emulate else "nccl"
        torch.distributed.init_process_group(backend, init_method=f"file://{store}/store", rank=0, world_size=1)
        if emulate:
            stack.enter_context(megatron_on_cpu())
        parallel_state.initialize_model_parallel()
        try:
            yield "cpu" if emulate else "cuda"
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
