"""Train in a plain PyTorch loop: `python recipes/plain_loop.py`."""

from __future__ import annotations

import argparse
from contextlib import closing

import torch
from text_windows import VOCABULARY, TextWindows
from torch import nn
from torch.utils.data import DataLoader

from nemo_fp8_debug import Monitor


class Layer(nn.Module):
    """A transformer layer of plain linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(-2))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.output_layer = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(x)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def train(output: str, steps: int, interval: int) -> None:
    gpt = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
    data = DataLoader(TextWindows(4 * steps, 64), batch_size=4)

    # Close the monitor even if the loop fails, so that all data until then is recorded.
    with closing(Monitor(gpt, output, interval=interval)) as monitor:
        for step, batch in enumerate(data):
            with monitor.step(step) as report:
                loss = nn.functional.cross_entropy(gpt(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
                loss.backward()
                norm = nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                report(loss=loss, grad_norm=norm, lr=optimizer.param_groups[0]["lr"])
    print(f"The record is in {output}; look at it with: tensorboard --logdir {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/plain_loop")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--interval", type=int, default=10)
    options = parser.parse_args()
    train(options.output, options.steps, options.interval)
