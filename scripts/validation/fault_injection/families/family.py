"""What all families have in common, and the data of those that learn text."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import nn

from fault_injection.fault import Batch, Site

#: of a batch of text
BATCH, SEQUENCE, VOCABULARY = 8, 32, 256
#: which a family has that does not quantize for itself
EMULATED = ("delayed", "current", "delayed", "current", "blockwise", "mxfp8", "delayed", "current", "nvfp4", "blockwise")
#: bytes of text, little enough to be learned by heart, which takes every layer
TEXT = 4000


class Family(Protocol):
    """A kind of model, with its data."""

    name: str
    #: layers
    depth: int
    #: samples of a batch
    batch: int
    learning_rate: float
    #: of its parts, in turn
    engines: Sequence[str]
    #: patterns of the GEMMs that are quantized
    layers: Sequence[str]
    #: last parts of names: GEMMs whose X a fault can change without changing what high precision computes
    changeable: Sequence[str]

    def build(self, seed: int, depth: int, engine: str) -> nn.Module:
        """A model with random weights, in BF16."""

    def draw(self, order: int, step: int) -> Batch:
        """The batch of a step in one order of the data."""

    def loss(self, model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
        """Mean over the batch, in float32; without its mask attention sees what it should not."""

    def site_of(self, gemm: str) -> Site:
        """Where the X of a GEMM comes from."""

    def prefix_of(self, layer: int) -> str:
        """How the names of a layer's parameters begin."""


def find_site(sites: Mapping[str, str], gemm: str) -> Site:
    """Return where the X of a GEMM comes from.

    Args:
        sites: by the reader of an X, or several with commas, its producer, each behind the name of their layer.
        gemm: its name.

    Raises:
        KeyError: no site has it.
    """
    for readers, producer in sites.items():
        for reader in readers.split(","):
            if gemm.endswith(f".{reader}"):
                layer = gemm.removesuffix(reader)
                return Site(layer + producer, tuple(layer + one for one in readers.split(",")))
    raise KeyError(gemm)


@cache
def _bytes() -> torch.Tensor:
    text = "\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
    return torch.frombuffer(bytearray(text[:TEXT].encode()), dtype=torch.uint8).long()


def text_batch(order: int, step: int) -> Batch:
    """Tokens and labels, [BATCH, SEQUENCE] each."""
    generator = torch.Generator().manual_seed(order * 1_000_003 + step)
    starts = torch.randint(len(_bytes()) - SEQUENCE - 1, (BATCH,), generator=generator)
    windows = torch.stack([_bytes()[s : s + SEQUENCE + 1] for s in starts])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@cache
def additive_mask(masked: bool) -> torch.Tensor:
    """What is added to attention's scores, [1, 1, SEQUENCE, SEQUENCE]."""
    hidden = torch.finfo(torch.bfloat16).min
    mask = torch.full((SEQUENCE, SEQUENCE), hidden).triu(1) if masked else torch.zeros(SEQUENCE, SEQUENCE)
    return mask.bfloat16()[None, None]
