"""The data of text_windows.py, for NeMo's MegatronStrategy."""

from __future__ import annotations

import lightning.pytorch as pl
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from text_windows import VOCABULARY, TextWindows
from torch.utils.data import DataLoader

__all__ = ["VOCABULARY", "Text"]


class Text(pl.LightningDataModule):
    """The data module. NeMo's sampler splits a global batch into micro-batches."""

    def __init__(self, sequence: int = 128, micro_batch_size: int = 4, global_batch_size: int = 8) -> None:
        super().__init__()
        self.sequence = sequence
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.tokenizer = None
        self.data_sampler = MegatronDataSampler(
            seq_len=sequence, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
        )

    def train_dataloader(self) -> DataLoader:
        self.data_sampler.init_global_step = self.trainer.global_step  # the sampler counts from the resumed run's first step
        return DataLoader(TextWindows(1_000_000, self.sequence))

    def state_dict(self) -> dict[str, int]:
        return {"consumed_samples": self.trainer.global_step * self.data_sampler.global_batch_size}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the sampler continue after the samples that were consumed before the checkpoint."""
        self.data_sampler.init_consumed_samples = self.data_sampler.prev_consumed_samples = state_dict["consumed_samples"]
