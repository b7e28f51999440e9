"""What the clean runs that need care learn: with adapters, by reinforcement, or by heart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from fault_injection.families import family
from fault_injection.fault import Batch
from torch import nn

#: of adapters; steps that what they adapt was trained before, and the learning rate of these
RANK, BEFORE, BEFORE_RATE = 8, 60, 3e-3
#: of the two tasks of reinforcement learning
CONTEXTS, ACTIONS, PULLS, WIDTH = 16, 8, 64, 64
CARTS, MOMENTS, PUSH = 24, 16, 0.6
DISCOUNT, VALUE_PART, ENTROPY_PART = 0.95, 0.5, 0.01


class Task(Protocol):
    """A model, and a loss for each step that hangs on the step and the weights alone."""

    model: nn.Module
    #: patterns of the GEMMs that are quantized
    layers: Sequence[str]
    learning_rate: float
    #: samples of a step
    batch: int

    def loss(self, step: int) -> torch.Tensor:
        """Return the loss of a step."""


class Supervised:
    """A family's own task."""

    def __init__(self, name: str, seed: int, batches: int | None = None) -> None:
        """
        Args:
            name: of the family.
            seed: of weights and data.
            batches: the same come again after so many; None: none comes twice.
        """
        self._family, self._seed, self._batches = family(name), seed, batches
        self.model = self._family.build(seed, self._family.depth, "current")
        self.layers, self.batch = list(self._family.layers), self._family.batch
        self.learning_rate = self._family.learning_rate

    def draw(self, step: int) -> Batch:
        """Return the batch of a step."""
        return self._family.draw(self._seed, step if self._batches is None else step % self._batches)

    def loss(self, step: int) -> torch.Tensor:
        return self._family.loss(self.model, self.draw(step), True)


class Adapter(nn.Module):
    """A frozen product, with a product of two small matrices added, the second of which starts at 0."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        dtype = base.weight.dtype
        self.down = nn.Linear(base.in_features, RANK, bias=False, dtype=dtype)
        self.up = nn.Linear(RANK, base.out_features, bias=False, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(Supervised):
    """A family's model is trained for a while, frozen, and then adapted to what is told the other way round."""

    def __init__(self, name: str, seed: int, adapted: Sequence[str]) -> None:
        """
        Args:
            name: of the family.
            seed: of weights and data.
            adapted: last parts of the names of products that get an adapter.
        """
        super().__init__(name, seed)
        optimizer = torch.optim.AdamW(self.model.parameters(), BEFORE_RATE)
        for step in range(BEFORE):
            self._family.loss(self.model, self._family.draw(self._seed + 1, step), True).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.model.requires_grad_(False)
        for name_of, module in list(self.model.named_modules()):
            parent, _, last = name_of.rpartition(".")
            if isinstance(module, nn.Linear) and last in adapted:
                setattr(self.model.get_submodule(parent), last, Adapter(module))

    def draw(self, step: int) -> Batch:
        x, told = super().draw(step)
        return x.flip(1), told.flip(1)


class Policy(nn.Module):
    """An MLP with one head for actions and one for what a state is worth."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.actor, self.critic = nn.Linear(WIDTH, actions), nn.Linear(WIDTH, 1)
        nn.init.normal_(self.actor.weight, std=0.01)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.enter(states))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.actor(x).log_softmax(dim=-1), self.critic(x)[..., 0]


class Bandit:
    """Policy gradients: each context has arms of different worth. The loss is about 0 from the start, with either sign."""

    layers, batch, learning_rate = ("hidden.*",), PULLS, 3e-3

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self._seed = Policy(CONTEXTS, ACTIONS), seed
        self._worth = torch.randn(CONTEXTS, ACTIONS, generator=torch.Generator().manual_seed(5))

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        contexts = torch.randn(PULLS, CONTEXTS, generator=generator)
        logs, _ = self.model(contexts)
        arms = torch.multinomial(logs.detach().exp(), 1, generator=generator)
        rewards = torch.tanh(contexts @ self._worth / 2).gather(1, arms)[:, 0]
        rewards = rewards + 0.3 * torch.randn(PULLS, generator=generator)
        gained = -((rewards - rewards.mean()) * logs.gather(1, arms)[:, 0]).mean()
        return gained + ENTROPY_PART * (logs.exp() * logs).sum(dim=1).mean()


class Carts:
    """Actor and critic that keep poles on carts upright; states come from the policy itself."""

    layers, batch, learning_rate = ("hidden.*",), CARTS * MOMENTS, 3e-3

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self._seed = Policy(4, 2), seed

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        states, actions, rewards = self._play(generator)
        logs, values = self.model(states)
        returns, later = torch.zeros_like(rewards), torch.zeros(CARTS)
        for moment in range(MOMENTS - 1, -1, -1):
            later = rewards[moment] + DISCOUNT * later
            returns[moment] = later
        gained = returns - values.detach()
        gained = (gained - gained.mean()) / (gained.std() + 1e-6)
        chosen = logs.gather(-1, actions[..., None])[..., 0]
        entropy = (logs.exp() * logs).sum(dim=-1).mean()
        return -(gained * chosen).mean() + VALUE_PART * (returns - values).square().mean() + ENTROPY_PART * entropy

    def _play(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Play with all carts at once; states, actions and rewards by moment."""
        state = 0.3 * torch.randn(CARTS, 4, generator=generator)
        played: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for _ in range(MOMENTS):
                action = torch.multinomial(self.model(state)[0].exp(), 1, generator=generator)[:, 0]
                place, speed, angle, turning = state.unbind(dim=1)
                push = PUSH * (2.0 * action - 1)
                moved = (0.3 * speed, push, 0.3 * turning, torch.sin(angle) - push * torch.cos(angle))
                after = torch.stack([place, speed, angle, turning], dim=1) + torch.stack(moved, dim=1)
                after = after.clamp(-math.pi, math.pi)
                played.append((state, action, torch.cos(after[:, 2]) - 0.05 * after[:, 0].abs()))
                state = after
        states, actions, rewards = (torch.stack(list(one)) for one in zip(*played, strict=True))
        return states, actions, rewards


def make_task(name: str, seed: int, options: dict[str, Any]) -> Task:
    """Return the task of that name."""
    made: dict[str, Any] = {"supervised": Supervised, "adapted": Adapted, "bandit": Bandit, "carts": Carts}
    task: Task = made[name](seed=seed, **options)
    return task
