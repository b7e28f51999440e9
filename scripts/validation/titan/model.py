"""torchtitan's debug Llama as a trainer's configuration: short, with attention that runs on a CPU, and random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.quantization import Float8LinearConverter, MXFP8LinearConverter, NVFP4LinearConverter
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

#: of the debug model, of which the first layers are taken
WIDTH, HIDDEN, LAYERS, HEADS, VOCABULARY = 256, 768, 2, 16, 2048
BATCH, TOKENS, ACCUMULATED, STEPS = 1, 128, 2, 3

#: multiply-adds of a forward for each token
OF_A_LAYER = WIDTH * 3 * WIDTH + WIDTH * WIDTH + 3 * WIDTH * HIDDEN
FORWARD = LAYERS * OF_A_LAYER + WIDTH * VOCABULARY
#: of the scores of a batch, forward
SCORES = LAYERS * BATCH * HEADS * TOKENS * TOKENS * 2 * (WIDTH // HEADS)


class Tokenizer(BaseTokenizer):
    """None: tokens are drawn."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Has nothing of its own."""

    def __init__(self, config: Config, **_: Any) -> None:
        BaseTokenizer.__init__(self)

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Tokens(BaseDataLoader):
    """The same in every run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Has nothing of its own."""

    def __init__(self, config: Config, **_: Any) -> None:
        self._drawn = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=self._drawn)
            positions = torch.arange(TOKENS).expand(BATCH, -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class EmulatedFloat8(Float8LinearConverter):
    """Keeps the recipe that torchtitan's converter drops under `emulate`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Float8LinearConverter.Config):
        """Has nothing of its own."""

    def __init__(self, config: Config) -> None:
        from torchao.float8 import Float8LinearConfig

        Float8LinearConverter.__init__(self, config)
        self.torchao_config = replace(Float8LinearConfig.from_recipe_name(config.recipe_name), emulate=True)


#: cases, and the converter of each
CONVERTERS = {
    "bf16": None,
    "float8, rowwise asked for, emulate": Float8LinearConverter.Config(emulate=True, recipe_name="rowwise"),
    "float8, rowwise, emulated": EmulatedFloat8.Config(emulate=True, recipe_name="rowwise"),
    "float8, rowwise_with_gw_hp, emulated": EmulatedFloat8.Config(emulate=True, recipe_name="rowwise_with_gw_hp"),
    "mxfp8, emulated": MXFP8LinearConverter.Config(fqns=["layers"]),
    "nvfp4, its kernels stood in": NVFP4LinearConverter.Config(fqns=["layers"]),
}


def config_of(case: str, folder: str) -> Trainer.Config:
    """One that trains a few steps on a CPU."""
    converter = CONVERTERS[case]
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", converters=None if converter is None else [converter])
    del config.model_spec.model.layers[LAYERS:]
    for _, _, parent, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())  # FlexAttention has no backward on a CPU
    config.tokenizer, config.dataloader = Tokenizer.Config(), Tokens.Config()
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = BATCH, TOKENS, STEPS
    training.global_batch_size = BATCH * ACCUMULATED
    training.disable_cuda_graphs = True
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed, config.dump_folder = 0, folder
    return config
