"""Describe a run: versions, devices, environment, recipe, parallel layout, the model, and the sampled part of the model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..capture.backends import torchao
from ..capture.backends.torchao.layers import list_configurations
from ..capture.gemms import Gemm
from ..capture.scan import ScannedModule
from ..options.config import Config

#: packages whose versions can explain a difference between two runs
_PACKAGES = (
    "nemo-fp8-debug",
    "torch",
    "lightning",
    "nemo-toolkit",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "deepspeed",
    "torchao",
    "transformers",
    "bitsandbytes",
    "numpy",
    "numba",
)

#: Megatron options that are off by default and have caused failures of FP8 runs
_RISKY = (
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "fp8_param",
    "fp8_param_gather",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "tp_comm_overlap",
    "overlap_p2p_comm",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "recompute_granularity",
    "gradient_accumulation_fusion",
    "enable_cuda_graph",
    "external_cuda_graph",
    "cuda_graph_impl",
)

#: options of Megatron's TransformerConfig about precision, the model's shape and its layout
_HOST_OPTIONS = (
    "fp8",
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_output_proj",
    "fp8_quantizer_factory",
    "recompute_modules",
    "tp_only_amax_red",
    # set by `--te-precision-config-file`
    "quant_recipe",
    "te_precision_config_file",
    "activation_func_fp8_input_store",
    "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl",
    "moe_router_dtype",
    "moe_dispatch_fwd_dtype",
    "moe_combine_bwd_dtype",
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "params_dtype",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_moe_experts",
    "mtp_num_layers",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
)
#: prefix of further options about precision. Their full names differ between releases
_HOST_PREFIX = "fp4"
#: prefix of environment variables about precision
_ENVIRONMENT = "NVTE_"


def make_fingerprint(
    scanned: Sequence[ScannedModule], gemms: Sequence[Gemm], config: Config, recipe: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a run in plain values, by section."""
    host, parameters = _options(scanned, _HOST_OPTIONS, _HOST_PREFIX), _find_parameters(scanned)
    return {
        "versions": _versions(),
        "devices": _devices(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)},
        "recipe": dict(recipe) | {"fp8_engine": _engine(host, recipe, gemms)},
        **_torchao(scanned),
        "backend_options": host,
        "risky_features_on": {k: v for k, v in _options(scanned, _RISKY).items() if v and v != "none"},
        "model": {
            "class": type(scanned[0].root).__name__,
            "parameters": sum(p.numel() for p in parameters if not is_lazy(p)),
            "parameter_dtypes": dict(Counter(str(p.dtype) for p in parameters)),
            # FP8 parameters report bfloat16 as their dtype.
            "parameter_types": dict(Counter(type(p).__name__ for p in parameters)),
            "training_ranks": torch.distributed.get_world_size() if _distributed() else 1,
        },
        "sampled": {
            "gemms": len(gemms),
            "gemm_kinds": dict(Counter(g.kind for g in gemms)),
            "backends": sorted({g.backend.name for g in gemms}),
            **{f.name: getattr(config, f.name) for f in fields(config) if f.name not in ("recipe", "output", "loggers")},
            "loggers": list(map(str, config.logger_choices)),
        },
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    versions |= {package: found for package in _PACKAGES if (found := _version_of(package))}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


@cache
def _version_of(package: str) -> str | None:
    """Return a package's version, cached because each lookup reads a file and takes a millisecond."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    if not torch.cuda.is_initialized():
        return {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    return {
        "gpu": torch.cuda.get_device_name(),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "count": torch.cuda.device_count(),
        "driver": _driver(),
        "cudnn": _cudnn(),
    }


def _cudnn() -> int | str | None:
    """Return cuDNN's version. Torch raises if an older version was loaded first, although training may work."""
    try:
        found: int | None = torch.backends.cudnn.version()
        return found
    except RuntimeError as error:
        return f"unknown: {str(error).partition('. ')[0]}"


def _driver() -> str | None:
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found[1] if found else None


def _options(scanned: Sequence[ScannedModule], names: Sequence[str], prefix: str | None = None) -> dict[str, Any]:
    """Return these options from the configurations of Megatron modules. Other frameworks have no such configurations.

    Args:
        prefix: prefix of further options to return.
    """
    carried = [getattr(one.module, name, None) for name in ("config", "ddp_config") for one in scanned]
    known = ("tensor_model_parallel_size", "overlap_grad_reduce")
    options: dict[str, Any] = {}
    for config in {id(c): c for c in carried if any(hasattr(c, name) for name in known)}.values():
        more = sorted(n for n in getattr(config, "__dict__", {}) if prefix and n.startswith(prefix))
        options = {name: getattr(config, name) for name in (*names, *more) if hasattr(config, name)} | options
    return {name: _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    """Return a plain value unchanged, and any other value as a string without memory addresses, which differ between
    runs.
    """
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if hasattr(value, "matchers") and hasattr(value, "configs"):  # Megatron's RecipeConfig, which does not define __str__
        return str({"configs": value.configs, "matchers": value.matchers})
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _engine(host: Mapping[str, Any], recipe: Mapping[str, Any], gemms: Sequence[Gemm]) -> str:
    """Return the library that quantizes. Without Transformer Engine, Megatron ignores FP8 options and trains in high
    precision.
    """
    if recipe["gemms_quantized_by_emulation"] and not recipe["gemms_switched_in_engine"]:
        return "emulation"
    present = "transformer_engine" in sys.modules
    if name := torchao.find_quantizing_engine(g.module for g in gemms if g.backend is torchao.BACKEND):
        return f"Transformer Engine and {name}" if host.get("fp8") and present else name
    formats = [name for name in ("fp8", "fp4") if host.get(name)]
    if formats and not present:
        return f"none: {formats[0]} is configured but has no effect without Transformer Engine"
    return "Transformer Engine" if formats else "none"


def _find_parameters(scanned: Sequence[ScannedModule]) -> list[nn.Parameter]:
    """Return the parameters of all roots. A shared parameter appears once."""
    found = {(id(one.root), id(p)): p for one in scanned for p in one.module._parameters.values() if p is not None}
    return list(found.values())


def _torchao(scanned: Sequence[ScannedModule]) -> dict[str, Any]:
    found = list_configurations((one.global_name, one.module) for one in scanned)
    return {"torchao": {"configurations": found}} if found else {}


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
