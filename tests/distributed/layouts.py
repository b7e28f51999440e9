"""The layouts of Megatron that are compared with one process, each with the same model, data and step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nemo_fp8_debug.core.keys import STATES

LAYERS, HIDDEN, SEQUENCE, MICRO_BATCH, VOCABULARY = 4, 64, 32, 2, 64
#: over all data-parallel ranks
MICRO_BATCHES = 2
EXPERTS = 4
#: whose gradient is averaged twice in the last step, where that is tried
TWICE = "decoder.layers.1.mlp.linear_fc1"
STEPS = 2


@dataclass(frozen=True)
class Layout:
    """How a model is spread over processes."""

    name: str
    world: int
    #: arguments of Megatron's `initialize_model_parallel`
    groups: Mapping[str, int] = field(default_factory=dict)
    #: options of the model's configuration
    options: Mapping[str, Any] = field(default_factory=dict)
    #: options of Megatron's DDP
    ddp: Mapping[str, Any] = field(default_factory=dict)
    experts: bool = False
    #: how far its own arithmetic carries activations and gradients off those of one process, in parts of their norm
    noise: float = 0.0
    #: steps in which it computes what one process does, but for that noise
    alike: int = STEPS

    @property
    def of_sequence(self) -> bool:
        """Whether tensor-parallel ranks split the sequence between their layers."""
        return bool(self.options.get("sequence_parallel"))

    @property
    def overlaps(self) -> bool:
        """Whether shared experts run while others wait for their tokens."""
        return bool(self.options.get("moe_shared_expert_overlap", True))


def _tp(size: int) -> dict[str, int]:
    return {"tensor_model_parallel_size": size}


def _pp(size: int) -> dict[str, int]:
    return {"pipeline_model_parallel_size": size}


def _ep(size: int) -> dict[str, int]:
    return {"expert_model_parallel_size": size}


_ETP = {"expert_tensor_parallel_size": 1}
_SP = {"sequence_parallel": True}
_SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
_INTERLEAVED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
#: gloo gathers no uneven parts, which an expert's tokens are where ranks share it
_EVEN = {"moe_token_dispatcher_type": "allgather", "moe_shared_expert_overlap": False}
#: BF16 sums over two ranks round once more: 0.0141 at most where this was measured, 0.0237 with experts
_ROUNDING, _MORE_ROUNDING = 0.02, 0.04

LAYOUTS = [
    Layout("dense", 1),
    Layout("tp", 2, _tp(2), noise=_ROUNDING),
    Layout("tp-sp", 2, _tp(2), _SP, noise=_ROUNDING),
    Layout("pp", 2, _pp(2)),
    Layout("pp-vpp", 2, _pp(2) | {"virtual_pipeline_model_parallel_size": 2}, _INTERLEAVED),
    Layout("dp", 2, ddp={"overlap_grad_reduce": True}),
    Layout("dp-sharded", 2, ddp=_SHARDED),
    Layout("dp-gathered-late", 2, ddp=_SHARDED | {"overlap_param_gather": True, "bucket_size": 5000}),
    Layout("tp-pp", 4, _tp(2) | _pp(2), noise=_ROUNDING),
    Layout("tp-sp-dp", 4, _tp(2), _SP, _SHARDED, noise=_ROUNDING),
    Layout("experts", 1, experts=True),
    # An expert multiplies the tokens of all ranks in one GEMM, so that its gradient rounds once; and after an update that
    # differs in its last bits, tokens for which two experts try nearly the same go elsewhere.
    Layout("ep", 2, _ep(2), experts=True, alike=1),
    Layout("ep-pp", 4, _ep(2) | _pp(2), experts=True, alike=1),
    Layout("ep-tp", 4, _ep(2) | _tp(2), _SP | _EVEN, experts=True, noise=_MORE_ROUNDING, alike=1),
    Layout("ep-tp-whole-experts", 4, _ep(2) | _tp(2) | _ETP, _SP, experts=True, noise=_MORE_ROUNDING, alike=1),
    # Megatron's attention over parts of a sequence needs Transformer Engine: two linear layers only.
    Layout("cp", 2, {"context_parallel_size": 2}),
]
#: those of the whole model over several processes
SPREAD = [layout for layout in LAYOUTS if layout.world > 1 and layout.name != "cp"]
BY_NAME = {layout.name: layout for layout in LAYOUTS}
_BESIDE = {"states": tuple(STATES), "activations": ("norm", "router", "attention")}
#: how each layout is watched
WATCHED: dict[str, dict[str, Any]] = {
    "auto": {"recipe": "auto", "what_if": ["current-e5m2", "mxfp8"], "output_rows": 1000, **_BESIDE},
    "delayed": {"recipe": "delayed", "verify_rows": 16, "replicas": True},
}


def sequences(step: int) -> torch.Tensor:
    """What two linear layers are fed with, bfloat16 [batch, sequence, hidden]."""
    return torch.randn(MICRO_BATCH, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(step)).bfloat16()
