"""A model that torch.compile is called on after the monitor was attached, in each way that there is: prints JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from helpers import Samples
from torch import nn

from nemo_fp8_debug import FP8DebugWarning, Monitor

WAYS = ("wrapped", "in place", "a part", "a part replaced", "a function")


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of a batch."""
        return self.fc2(self.fc1(x).relu())


class Model(nn.Module):
    """A block and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of a batch."""
        return self.head(self.block(x))


def compiled(model: nn.Module, way: str, backend: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    if way == "wrapped":
        return torch.compile(model, backend=backend)
    if way == "a function":
        return torch.compile(lambda x: model(x), backend=backend)
    if way == "a part replaced":
        model.block = torch.compile(model.block, backend=backend)
    else:
        (model if way == "in place" else model.block).compile(backend=backend)
    return model


def train(way: str, monitored: bool, eager: bool = False) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, graphs, samples, losses = Model(), [], Samples(), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    monitor = Monitor(model, recorders=[samples] if monitored else [], interval=2, eager=eager)
    run = compiled(model, way, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            with monitor.step(step) as report:
                loss = run(torch.randn(4, 8)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                report(loss=loss)
            losses.append(loss.item())
        monitor.close()
    said = [str(w.message) for w in caught if issubclass(w.category, FP8DebugWarning)]
    layers = {step: sorted(set(sample.operand_columns.get("layer", []))) for step, sample in samples.samples.items()}
    return {"losses": losses, "said": said, "graphs": sorted(set(map(tuple, graphs))), "layers": layers}


if __name__ == "__main__":
    later = {way: [train(way, monitored) for monitored in (False, True)] for way in WAYS}
    print(json.dumps({"later": later, "eager": {way: train(way, True, eager=True) for way in WAYS}}))
