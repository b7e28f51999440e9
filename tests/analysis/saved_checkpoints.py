"""Checkpoints for tests of the audit: weights, Megatron's and Hugging Face's files, Transformer Engine's saved states."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: real Transformer Engine modules after three FP8 steps: see make_te_state.py
TE_STATE = Path(__file__).with_name("te_state.pt")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * (1 + x.abs())).to(dtype)


def te_states() -> dict[str, torch.Tensor]:
    return torch.load(TE_STATE, weights_only=True)["model"]


def te_extra(module: str) -> dict[str, Any]:
    """What is in a module's extra state, but for the recipe."""
    return torch.load(TE_STATE, weights_only=True)["plain"][f"decoder.layers.{module}._extra_state"]


def pickled(extra: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(extra)), dtype=torch.uint8)


def gemm_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    kinds = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight", "output_layer.weight")
    return {n.removesuffix(".weight"): p for n, p in model.named_parameters() if n.endswith(kinds)}


def save_megatron(state: dict[str, Any], folder: Path) -> Path:
    from megatron.core import dist_checkpointing

    folder.mkdir()
    dist_checkpointing.save(state, str(folder))
    return folder


HF = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.gate.weight": (4, 8),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 8, 12),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.conv.weight": (8, 1, 4),
    "lm_head.weight": (32, 8),
}


def hf_state(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: normal(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(HF.items())}


def hf_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    experts = state["model.layers.0.mlp.experts.gate_up_proj"]
    names = ("model.layers.0.self_attn.q_proj", "lm_head")
    weights = {name: state[f"{name}.weight"] for name in names}
    return weights | {f"model.layers.0.mlp.experts.{i}.gate_up_proj": w for i, w in enumerate(experts)}


def save_indexed(state: dict[str, torch.Tensor], folder: Path) -> list[Path]:
    """As Hugging Face does: files of a tensor or more, and an index."""
    folder.mkdir(exist_ok=True)
    weight_map = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(state)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in state.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / file for file in weight_map.values()]
