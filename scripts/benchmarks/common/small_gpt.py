"""The GPT of recipes/nemo_gpt.py in a plain loop over Megatron-core, for benchmarks: its BF16 step is all that is timed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron compiles small fusions, which takes longer than the benchmark

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_on_cpu import megatron_on_cpu
from text_windows import VOCABULARY, TextWindows
from torch.utils.data import DataLoader

__all__ = ["GEMMS", "SmallGPT", "one_process"]

SEQUENCE, MICRO_BATCH, MICRO_BATCHES = 128, 4, 2
#: batches that the loop goes round, loaded beforehand
BATCHES = 16
#: names of the modules whose operands are looked at
GEMMS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Megatron's groups for a single process, on a CPU and one thread."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        yield
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


class SmallGPT:
    """A model, its optimizer and its data; enter `one_process` first."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=4,
            hidden_size=128,
            ffn_hidden_size=512,
            num_attention_heads=4,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            bias_activation_fusion=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        self.model = GPTModel(config, spec, VOCABULARY, SEQUENCE, share_embeddings_and_output_weights=False).bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        windows = TextWindows(BATCHES * MICRO_BATCHES * MICRO_BATCH, SEQUENCE)
        loaded = list(DataLoader(windows, batch_size=MICRO_BATCH))
        self._batches = [loaded[i : i + MICRO_BATCHES] for i in range(0, len(loaded), MICRO_BATCHES)]
        self._steps = 0

    def step(self) -> torch.Tensor:
        """Forward, backward and optimizer; returns the loss."""
        batch = self._batches[self._steps % BATCHES]
        self._steps += 1
        self.optimizer.zero_grad()
        losses = []
        for micro in batch:
            output = self.model(micro["tokens"], micro["position_ids"], micro["attention_mask"], labels=micro["labels"])
            loss = output.float().mean()
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return torch.stack(losses).mean()
