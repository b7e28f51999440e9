"""A small Megatron GPT trained in emulated FP8, on a CPU, step by step; faults act under it, between it and its engine."""

from __future__ import annotations

import copy
import pydoc_data.topics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fault_injection.fault import Fault
from nemo_fp8_debug.capture.gemms import find_gemms, select
from nemo_fp8_debug.interventions.emulate import Emulation
from nemo_fp8_debug.numerics.delayed_state import DelayedState
from nemo_fp8_debug.numerics.recipe import parse_recipe
from nemo_fp8_debug.plan.plan import NO_CHANGES, Plan

LAYERS, HIDDEN, SEQUENCE, BATCH, VOCABULARY = 4, 64, 32, 8, 256
LEARNING_RATE, WARM_UP = 4e-3, 20
RECIPE = "delayed(amax_history_len=16)"

_TEXT = "\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
#: little enough to be learned by heart, which takes every layer
_BYTES = torch.frombuffer(bytearray(_TEXT[:4000].encode()), dtype=torch.uint8).long()


def gpt(seed: int) -> GPTModel:
    """The model, in BF16."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        init_method_std=HIDDEN**-0.5,  # so that each layer counts
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).bfloat16()


def batch(order: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [BATCH, SEQUENCE] each, of a step in one order of the data."""
    generator = torch.Generator().manual_seed(order * 1_000_003 + step)
    starts = torch.randint(len(_BYTES) - SEQUENCE - 1, (BATCH,), generator=generator)
    windows = torch.stack([_BYTES[s : s + SEQUENCE + 1] for s in starts])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class Training:
    """A run that can be stepped, saved and resumed.

    Column 0 of every weight is zero and stays so: what a fault puts into channel 0 of an X changes nothing but the X.
    """

    def __init__(self, seed: int, order: int, fault: Fault, recipe: str = RECIPE, plan: Plan = NO_CHANGES) -> None:
        """
        Args:
            seed: of the weights.
            order: of the data.
            fault: what goes wrong, under a plan too.
        """
        self.model = gpt(seed)
        self.gemms = select(find_gemms([self.model]), ["layers.*"])
        self.order, self.fault = order, fault
        fault.build_into({g.name: g.module for g in self.gemms}, self.model)
        self.emulation = Emulation.of_gemms(self.gemms, parse_recipe(recipe), plan)
        self.emulation.attach()
        weights = {id(gemm.module.weight) for gemm in self.gemms}
        self._is_gemm = [id(p) in weights for p in self.model.parameters()]
        self._masters = [p.detach().float() for p in self.model.parameters()]
        self._clear_column(self._masters)
        self._write_back()
        self._adam = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, weight_decay=0.01)
        self._mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1) > 0
        self._positions = torch.arange(SEQUENCE).expand(BATCH, -1)

    def step(self, i: int) -> float:
        """One optimizer step; returns the loss."""
        self.fault.before_step(i, self)
        tokens, labels = self.fault.data(i, *batch(self.order, i))
        loss = self.model(tokens, self._positions, self._mask, labels=labels).float().mean()
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        self.emulation.end_step()
        self.fault.after_backward(i, self)
        self._optimize(i)
        return float(loss.detach())

    def _optimize(self, i: int) -> None:
        for parameter, master in self._pairs():
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
        self._clear_column([m.grad for m in self._masters])
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (i + 1) / WARM_UP) * self.fault.learning_rate_factor(i)
        self._adam.step()
        self._write_back()

    def _clear_column(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor, is_gemm in zip(tensors, self._is_gemm, strict=True):
            if is_gemm:
                tensor[:, 0] = 0

    def _pairs(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        return zip(self.model.parameters(), self._masters, strict=True)

    def _write_back(self) -> None:
        for parameter, master in self._pairs():
            parameter.data.copy_(master)

    def slot(self, layer: str, role: str) -> tuple[DelayedState, int] | None:
        """Where the engine keeps the delayed scale of an operand; None where it casts it otherwise."""
        for state in self.emulation.states.values():
            if (layer, role) in state.index:
                return state, state.index[layer, role]
        return None

    def reinitialize(self, layer: int) -> None:
        """Give a layer the weights of a fresh model."""
        fresh = dict(gpt(12345).named_parameters())
        for name, master in zip(fresh, self._masters, strict=True):
            if name.startswith(f"decoder.layers.{layer}."):
                master.copy_(fresh[name])
        self._clear_column(self._masters)
        self._write_back()

    def shake(self, relative: float, seed: int) -> None:
        """Change every weight by a random part of itself, as two runs on GPUs get out of sync."""
        generator = torch.Generator().manual_seed(seed)
        for master in self._masters:
            master *= 1 + relative * torch.randn(master.shape, generator=generator)
        self._write_back()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        state = {"masters": self._masters, "adam": self._adam.state_dict(), "scales": self.emulation.state_dict()}
        return copy.deepcopy(state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        saved = copy.deepcopy(dict(saved))
        for master, value in zip(self._masters, saved["masters"], strict=True):
            master.data.copy_(value)
        self._adam.load_state_dict(saved["adam"])
        self.emulation.load_state_dict(saved["scales"])
        self._write_back()
