"""Builds every architecture of the installed transformers, and compares training with and without the monitor.

    PYTHONPATH=scripts/validation .venv/bin/python scripts/validation/architectures.py [--output FILE] [TYPE ...]

Each model type gets a tiny configuration and a process of its own. A model that runs with generic inputs trains three steps,
once without the monitor and once with, from the same weights. Losses, gradients, weights and buffers must be the same to the
last bit. Layers must be recorded under the names of `named_modules()`, without what wrappers put into them. To others the
monitor is attached. Everywhere it has `on_error="raise"`. Without a type, all are tried, and architectures.json has what
came of them. Types that are given replace their results in `--output`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import random
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
import torchao.quantization  # noqa: F401 - which transformers imports late: once, and not in each process
import transformers
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.models.auto import configuration_auto, modeling_auto

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.capture.gemms import find_gemms
from nemo_fp8_debug.core.layer_names import strip_wrappers
from nemo_fp8_debug.core.sample import Recorder

RESULTS = Path(__file__).with_suffix(".json")
STEPS = 3
#: of an architecture: seconds, bytes of address space, and parameters of a model that is small enough
SECONDS, MEMORY, MOST_PARAMETERS = 90, 12 << 30, 60_000_000
#: what may come of an architecture: the last two are failures
IDENTICAL, ATTACHED, NOT_BUILT, NO_GEMM = "identical", "attached", "not built", "no GEMM"
DIFFERENT, RAISED = "different", "raised"
#: by head, the first that a type has counts; a model without a head comes last
_HEADS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CTC", "IMAGE_CLASSIFICATION")
_MAPPINGS = (*(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in _HEADS), "MODEL_MAPPING_NAMES")

#: sizes of tiny models, by the name of an option; the first that fits counts
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size"), 128),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "projection_dim", "word_embed_proj_dim", "d_embed"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "ffn_hidden_size", "mlp_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **{
        "rotary_dim": 4,
        "expand": 1,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "image_size": 32,
        "patch_size": 8,
    },
}
#: options of types whose sizes go together with others
_OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
}
_LAYERS = {name: size for name, size in _SIZES.items() if "layer" in name or name == "vocab_size"}


def config_of(kind: type[Any], sizes: dict[str, int]) -> Any:
    """Return a configuration whose sizes, and those of the configurations in it, are small.

    Args:
        kind: class of the configuration.
        sizes: by the name of an option.
    """
    default = kind()
    options: dict[str, Any] = dict(_OPTIONS.get(kind.model_type, {}))
    for name, value in vars(default).items():
        if isinstance(value, transformers.PretrainedConfig):
            options[name] = config_of(type(value), sizes)
        elif name in sizes and type(value) is int and value > sizes[name]:
            options[name] = sizes[name]
        elif name.endswith(("_token_id", "_token_index")) and type(value) is int:
            options[name] = value % sizes["vocab_size"]
    if not options:
        return default
    try:
        return kind(**options)
    except TypeError:  # some take parts as dictionaries alone
        parts = {n: v.to_dict() if isinstance(v, transformers.PretrainedConfig) else v for n, v in options.items()}
        return kind(**parts)


def class_of(model_type: str) -> type[Any] | None:
    """Return the class of model that is trained of a type; None: it has none of its own."""
    for mapping in _MAPPINGS:
        names = getattr(modeling_auto, mapping).get(model_type)
        if names:
            return getattr(transformers, names if isinstance(names, str) else names[0], None)
    return None


def build(kind: type[Any], config: Any) -> nn.Module:
    """Return the model, with the same weights each time."""
    torch.manual_seed(0)
    model: nn.Module = kind._from_config(config)
    return model.float().train()


def check_size(kind: type[Any], config: Any) -> None:
    """Find how large a model is without its memory.

    Raises:
        ValueError: it is too large.
    """
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in kind._from_config(config).parameters())
    except Exception:  # some compute with their weights: those tell by the memory that they ask for
        return
    if size > MOST_PARAMETERS:
        raise ValueError(f"its small configuration has {size / 1e6:.0f} million parameters")


def inputs_of(config: Any, kind: type[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield generic inputs, one of which a model may take."""
    vocabulary = max(8, min(getattr(config.get_text_config(), "vocab_size", 128) or 128, 100))
    tokens, classes = torch.randint(5, vocabulary, (2, 16)), torch.zeros(2, dtype=torch.long)
    of_images = getattr(config, "vision_config", None) or config
    size = getattr(of_images, "image_size", 32)
    high, wide = size if isinstance(size, (list, tuple)) else (size, size)
    images = torch.randn(2, getattr(of_images, "num_channels", 3), high, wide)
    bins = getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 80))
    whole = torch.randn(2, bins, 2 * getattr(config, "max_source_positions", 64))  # Whisper takes no less
    sound, frames, words = torch.randn(2, 8000), torch.randn(2, 64, bins), torch.randint(5, 20, (2, 3))
    video = images[:, None].repeat(1, getattr(config, "num_frames", 2), 1, 1, 1)
    takes, main = inspect.signature(kind.forward).parameters, kind.main_input_name
    every = {
        **{"input_ids": tokens, "decoder_input_ids": tokens, "pixel_values": images, "input_features": frames},
        **{"input_values": sound, "bbox": torch.zeros(2, 16, 4, dtype=torch.long)},
    }
    yield from {
        "input_ids": [{"input_ids": tokens, "labels": tokens}, {"input_ids": tokens, "decoder_input_ids": tokens}],
        "pixel_values": [{"pixel_values": images, "labels": classes}, {"pixel_values": images}, {"pixel_values": video}],
        "input_values": [{"input_values": sound, "labels": words}, {"input_values": sound}, {"input_values": frames}],
        "input_features": [
            {"input_features": whole, "decoder_input_ids": tokens},
            {"input_features": frames, "labels": words},
            {"input_features": frames},
        ],
    }.get(main if isinstance(main, str) else main[0], [])
    yield {"input_ids": tokens}
    yield {name: given for name, given in every.items() if name in takes}


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of a model, or the mean square of the first output that has a gradient.

    Raises:
        LookupError: none has.
    """
    if (loss := getattr(output, "loss", None)) is not None and loss.requires_grad:
        return loss.sum()  # type: ignore[no-any-return]
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple) else [output]
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
            return value.float().square().mean()
    raise LookupError("no output has a gradient")


class Layers(Recorder):
    """A recorder that keeps the names of layers."""

    in_callers_thread = True

    def __init__(self) -> None:
        self.found: set[str] = set()

    def record(self, sample: Any) -> None:
        """Keep those of a sample; what experts have together is no layer."""
        self.found |= {name for name in sample.operand_columns["layer"] if "*" not in name}


def seed(number: int) -> None:
    """Seed all random numbers: Wav2Vec2 masks by numpy's."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def train(model: nn.Module, given: dict[str, torch.Tensor], monitor: Monitor | None) -> list[torch.Tensor]:
    """Train three steps, and return all that must not depend on the monitor: losses, gradients, weights and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        loss = loss_of(model(**given))
        loss.backward()
        found.append(loss.detach().clone())
        found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number in range(STEPS):
        seed(number)
        if monitor is None:
            step()
        else:
            with monitor.step(number) as report:
                report(loss=step())
        found += [torch.random.get_rng_state(), torch.tensor([random.random(), np.random.rand()])]
    return [*found, *(x.detach().clone() for x in (*model.parameters(), *model.buffers()))]


def linears_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers by the names of `named_modules()`."""
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    found = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    return {name: m for name, m in found.items() if not isinstance(m, NonDynamicallyQuantizableLinear)}


def misnamed(model: nn.Module, layers: set[str], called: set[str]) -> list[str]:
    """Return layers that are recorded under a name that no module has, and linear layers that are not recorded.

    Args:
        layers: that were recorded.
        called: linear layers whose output had a gradient.
    """
    modules = {strip_wrappers(name): module for name, module in model.named_modules()}
    strange = [
        name
        for name in layers - modules.keys()
        # Of products of a parameter the record has the name of that, of `nn.MultiheadAttention` those of its projections.
        if name.rpartition(".")[0] not in modules or name.rpartition(".")[2] in modules[name.rpartition(".")[0]]._modules
    ]
    return [f"{name} is recorded, and no module" for name in sorted(strange)] + [
        f"{name} multiplies, and is not recorded" for name in sorted(called - layers)
    ]


def monitored(model: nn.Module) -> tuple[Monitor, Layers]:
    """Attach a monitor that raises whatever goes wrong."""
    layers = Layers()
    return Monitor(model, recorders=[layers], interval=1, on_error="raise", table_rows=0), layers


def compared(kind: type[Any], config: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Train with the monitor and without, and tell what differs."""
    called: set[str] = set()
    model = build(kind, config)

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if (out[0] if isinstance(out, tuple) else out).requires_grad:
                called.add(strip_wrappers(name))

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in linears_of(model).items()]
    without = train(model, given, None)
    for hook in hooks:
        hook.remove()
    watched = build(kind, config)
    monitor, layers = monitored(watched)
    found = train(watched, given, monitor)
    monitor.close()
    told: dict[str, Any] = {"class": kind.__name__, "outcome": IDENTICAL, "layers": len(layers.found)}
    if differ := count_differences(without, found):
        if count_differences(without, train(build(kind, config), given, None)):
            return told | {"outcome": ATTACHED, "why": "two runs without the monitor differ"}
        return told | {"outcome": DIFFERENT, "why": f"{differ} tensors differ"}
    if wrong := misnamed(watched, layers.found, called):
        return told | {"outcome": DIFFERENT, "why": "; ".join(wrong[:3])}
    return told


def count_differences(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> int:
    """Return how many tensors do not have the same bits."""

    def bits(x: torch.Tensor) -> bytes:
        return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    return abs(len(one) - len(other)) + sum(bits(a) != bits(b) for a, b in zip(one, other, strict=False))


def run_generic(kind: type[Any], config: Any) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Return inputs that a model trains with, or why there are none."""
    why = ""
    for given in inputs_of(config, kind):
        try:
            seed(0)
            loss_of(build(kind, config)(**given)).backward()
            return given, ""
        except Exception as error:  # whatever the model says of inputs that it cannot take
            why = why or _words(error)
    return None, why


def examine(model_type: str) -> dict[str, Any]:
    """Tell what comes of one architecture."""
    kind = class_of(model_type)
    if kind is None:
        return {"outcome": NOT_BUILT, "why": "it has no model class of its own"}
    told: dict[str, Any] = {"class": kind.__name__, "outcome": NOT_BUILT}
    for sizes in (_SIZES, _LAYERS):
        try:
            config = config_of(configuration_auto.CONFIG_MAPPING[model_type], dict(sizes))
            check_size(kind, config)
            model = build(kind, config)
        except Exception as error:  # a generic configuration may make no sense
            told.setdefault("why", _words(error))
            continue
        if not find_gemms([model], in_forward=True):
            return told | {"outcome": NO_GEMM, "why": "none of its layers is known as a GEMM, and the monitor refuses it"}
        given, why = run_generic(kind, config)
        try:
            if given is not None:
                return compared(kind, config, given)
            if told["outcome"] == NOT_BUILT:
                monitor, _ = monitored(model)
                told |= {"outcome": ATTACHED, "layers": len(linears_of(model)), "why": why}
                monitor.close()
        except Exception as error:
            return told | {"outcome": RAISED, "why": _words(error)}
    return told


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def _work(model_type: str, answers: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nothing, stream.fileno())
    warnings.simplefilter("ignore")
    try:
        answers.send(examine(model_type))
    except Exception as error:  # of this script
        answers.send({"outcome": RAISED, "why": _words(error)})


def examine_apart(model_type: str) -> dict[str, Any]:
    """Examine an architecture in a process of its own, with limits of time and memory."""
    processes = multiprocessing.get_context("fork")
    answers, there = processes.Pipe(duplex=False)
    process = processes.Process(target=_work, args=(model_type, there))
    process.start()
    there.close()
    try:
        if not answers.poll(SECONDS):
            return {"outcome": NOT_BUILT, "why": f"not done within {SECONDS} s"}
        return answers.recv()  # type: ignore[no-any-return]
    except EOFError:
        return {"outcome": NOT_BUILT, "why": "its process ended"}
    finally:
        process.kill()
        process.join()


def main() -> int:
    """Examine architectures, print a table, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types, as gpt_neox_japanese; all if none is given")
    parser.add_argument("--output", type=Path, help="file to write; architectures.json if all are tried")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for model_type in options.types or sorted(configuration_auto.CONFIG_MAPPING_NAMES):
        found[model_type] = told = examine_apart(model_type)
        print(f"{model_type:32} {told['outcome']:10} {told.get('layers', ''):>5}  {told.get('why', '')}", flush=True)
    counts = dict(Counter(told["outcome"] for told in found.values()))
    print(counts)
    if output := options.output or (None if options.types else RESULTS):
        known = json.loads(output.read_text())["architectures"] if options.types and output.exists() else {}
        every = dict(sorted((known | found).items()))
        of_all = dict(Counter(told["outcome"] for told in every.values()))
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        output.write_text(json.dumps({**versions, "counts": of_all, "architectures": every}, indent=1) + "\n")
    return int(DIFFERENT in counts or RAISED in counts)


if __name__ == "__main__":
    sys.exit(main())
