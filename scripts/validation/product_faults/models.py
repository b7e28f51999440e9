"""The models whose products are verified: families, recipes and dtypes that nothing here was set on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_fp8_debug import Emulation, Monitor
from nemo_fp8_debug.core.sample import Recorder

#: emulated engines; "": none
RECIPES = ("", "delayed", "current", "blockwise", "mxfp8", "nvfp4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: rows and columns that are looked at
ROWS = 64
VOCABULARY = 512


class Verified(Recorder):
    """Keeps the rows of what was verified."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def record(self, sample: Any) -> None:
        """Keep the rows of a sample."""
        of = sample.get_table("verification")
        self.rows += [dict(zip(of, row, strict=True)) | {"step": sample.step} for row in zip(*of.values(), strict=True)]


@dataclass(frozen=True)
class Case:
    """A model, and what a step does with it."""

    name: str
    model: nn.Module
    #: the loss of a step
    loss: Callable[[int], torch.Tensor]


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Models of a dtype, with random weights."""
    yield _mlp(dtype)
    yield _transformer("Llama", "LlamaForCausalLM", dtype, 0, num_key_value_heads=2)
    yield _transformer("GPT-NeoX", "GPTNeoXForCausalLM", dtype, 1)
    yield _transformer("BERT", "BertForMaskedLM", dtype, 2)


def _mlp(dtype: torch.dtype) -> Case:
    model = nn.Sequential(nn.Linear(384, 1024), nn.ReLU(), nn.Linear(1024, 384), nn.Tanh(), nn.Linear(384, 96, bias=False))
    model = model.to(dtype)

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(8, 96, 384, generator=torch.Generator().manual_seed(step)).to(dtype)
        x[:, 80:] = 0  # padding
        return (model(x).float() ** 2).mean()

    return Case("MLP, padded", model, loss)


def _tokens(step: int) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (8, 96), generator=torch.Generator().manual_seed(step))
    tokens[:, 64:80] = tokens[:, :16]  # what repeats gives rows that are the same
    return tokens


def _transformer(name: str, kind: str, dtype: torch.dtype, seed: int, **options: Any) -> Case:
    import transformers

    torch.manual_seed(seed)
    made = getattr(transformers, kind)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = made(made.config_class(**sizes, vocab_size=VOCABULARY, **options)).to(dtype)
    return Case(name, model, lambda step: model(input_ids=(t := _tokens(step)), labels=t).loss)


def verified(case: Case, recipe: str, steps: Sequence[int], train: bool = True) -> list[dict[str, Any]]:
    """Rows of what was verified while a model was trained.

    Args:
        recipe: of the emulated engine; empty: there is none.
        train: whether weights move.
    """
    rows = Verified()
    emulation = Emulation(case.model, recipe) if recipe else None
    if emulation:
        emulation.attach()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.05)
    monitor = Monitor(case.model, recorders=[rows], interval=1, table_rows=0, on_error="raise", verify_rows=ROWS)
    try:
        for step in steps:
            with monitor.step(step) as report:
                loss = case.loss(step)
                loss.backward()
                if train:
                    optimizer.step()
                optimizer.zero_grad()
                report(loss=loss)
                if emulation:
                    emulation.end_step()
    finally:
        monitor.close()
        if emulation:
            emulation.detach()
    return rows.rows
