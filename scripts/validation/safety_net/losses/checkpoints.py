"""Cases about activations that are computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from safety_net.losses.case import Family, Watch
from safety_net.losses.learning import learn, predict, regress
from safety_net.models import build_gpt

family = Family()


def _train(how: Callable[..., Any], watch: Watch, dropout: float = 0.1, dtype: torch.dtype | None = None) -> None:
    model = build_gpt(dropout=dropout)
    model.checkpoint = how
    learn(watch, model, micro_batches=2, dtype=dtype)


def _add(name: str, how: Callable[..., Any], **options: Any) -> None:
    family.add(name, lambda watch: _train(how, watch, **options))


def _save_products(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _save_every_other() -> Callable[..., CheckpointPolicy]:
    counts = {False: 0, True: 0}

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.addmm.default:
            counts[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if counts[ctx.is_recompute] % 2 else CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.MUST_RECOMPUTE

    return policy


def _select(policy: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    contexts: Any = create_selective_checkpoint_contexts(policy)
    return contexts  # type: ignore[no-any-return]


def _nest(layer: nn.Module, x: torch.Tensor, inner: bool, outer: bool) -> Any:
    return checkpoint(lambda y: checkpoint(layer, y, use_reentrant=inner) + 0.5 * y, x, use_reentrant=outer)


def _offload(layer: nn.Module, x: torch.Tensor) -> Any:
    with save_on_cpu():
        return checkpoint(layer, x, use_reentrant=False)


def _with_keyword(layer: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(lambda *, y: layer(y), y=x, use_reentrant=False)


for _reentrant in (True, False):
    _kind = "reentrant" if _reentrant else "not reentrant"
    _add(_kind, partial(checkpoint, use_reentrant=_reentrant))
    _add(f"{_kind}, under autocast", partial(checkpoint, use_reentrant=_reentrant), dtype=torch.bfloat16)
    _no_rng = partial(checkpoint, use_reentrant=_reentrant, preserve_rng_state=False)
    _add(f"{_kind}, without random numbers", _no_rng, dropout=0.0)
_add("selective, products are saved", partial(checkpoint, use_reentrant=False, context_fn=partial(_select, _save_products)))
_add(
    "selective, every other product is saved",
    lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=lambda: _select(_save_every_other())),
)
_add(
    "selective, by a list",
    partial(checkpoint, use_reentrant=False, context_fn=partial(_select, [torch.ops.aten.mm.default])),
)
_add("nested, not reentrant", partial(_nest, inner=False, outer=False))
_add("nested, reentrant in not reentrant", partial(_nest, inner=True, outer=False))
_add("nested, not reentrant in reentrant", partial(_nest, inner=False, outer=True))
_add("offloaded and computed again", _offload)
_add("keyword arguments", _with_keyword)
_add("without a check of determinism", partial(checkpoint, use_reentrant=False, determinism_check="none"))


@family.case("sequential")
def _sequential(watch: Watch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU()) for _ in range(4)))
    learn(watch, model, loss_of=regress(lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False)))


@family.case("sequential, reentrant")
def _sequential_reentrant(watch: Watch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU()) for _ in range(4)))
    loss = regress(lambda x: checkpoint_sequential(model, 2, x.requires_grad_(), use_reentrant=True))
    learn(watch, model, loss_of=loss)


@family.case("without an early stop")
def _no_early_stop(watch: Watch) -> None:
    with set_checkpoint_early_stop(False):
        _train(partial(checkpoint, use_reentrant=False), watch)


@family.case("the whole model")
def _whole(watch: Watch) -> None:
    model = build_gpt(dropout=0.1)
    loss = predict(model)
    learn(watch, model, loss_of=lambda step, number: checkpoint(loss, step, number, use_reentrant=False))


@family.case("wrapped")
def _wrapped(watch: Watch) -> None:
    model = build_gpt(dropout=0.1)
    model.layers[0] = checkpoint_wrapper(model.layers[0], CheckpointImpl.NO_REENTRANT)
    model.layers[1] = checkpoint_wrapper(model.layers[1], CheckpointImpl.REENTRANT)
    learn(watch, model)


@family.case("wrapped, offloaded")
def _wrapped_offloaded(watch: Watch) -> None:
    model = build_gpt(dropout=0.1)
    model.layers[0] = offload_wrapper(model.layers[0])
    learn(watch, model)


@family.case("of experts")
def _experts(watch: Watch) -> None:
    model = build_gpt(num_experts=4, dropout=0.1).bfloat16()
    model.checkpoint = partial(checkpoint, use_reentrant=False)
    learn(watch, model, micro_batches=2)


def _train_llama(watch: Watch, reentrant: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    learn(watch, model, loss_of=predict(_Logits(model)))


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens).logits
        return logits


family.add("by transformers", partial(_train_llama, reentrant=False))
family.add("by transformers, reentrant", partial(_train_llama, reentrant=True))
