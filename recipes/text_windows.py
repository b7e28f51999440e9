"""Real English text that is part of every Python installation (the topics of `help()`), as bytes."""

from __future__ import annotations

import pydoc_data.topics
import re

import torch
from torch.utils.data import Dataset

VOCABULARY = 256
BYTES = 8192


class TextWindows(Dataset):
    """A data set of windows of the text, in a fixed pseudo-random order and in Megatron's format."""

    def __init__(self, windows: int, sequence: int) -> None:
        text = "\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
        # Leave out ruled lines, because the loss of a window with a table is several times the loss of its neighbors.
        text = re.sub(r"([^\w])\1{2,}", r"\1\1", text)[:BYTES]
        self.bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        self.windows, self.sequence = windows, sequence
        # In Megatron's convention, True means masked.
        self.mask = torch.ones(1, sequence, sequence).triu(1) > 0

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        start = i * 7919 % (len(self.bytes) - self.sequence - 1)
        window = self.bytes[start : start + self.sequence + 1]
        return {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": torch.ones(self.sequence),
            "position_ids": torch.arange(self.sequence),
            "attention_mask": self.mask,
        }
