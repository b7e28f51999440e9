"""Cases about what a model is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from safety_net.losses.case import Family, Watch
from safety_net.losses.learning import build_mlp, draw, learn, make_adam, regress
from safety_net.models import add_low_rank, build_gpt, draw_tokens

family = Family()
BF16 = torch.bfloat16


def _first(module: nn.Module) -> nn.Module:
    """Return a module that gives the first of several outputs."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = module, nn.LazyLinear(16)

        def forward(self, *given: torch.Tensor, **options: Any) -> torch.Tensor:
            out = self.inner(*given, **options)
            y: torch.Tensor = self.head(out[0] if isinstance(out, tuple) else out)
            return y

    return First()


def _learn_sequence(watch: Watch, module: nn.Module, *shape: int) -> None:
    model = _first(module)
    model(torch.randn(shape))  # which gives the head its shape
    learn(watch, model, loss_of=regress(model, *shape))


def _add_sequence(name: str, make: Any, *shape: int) -> None:
    family.add(name, lambda watch: _learn_sequence(watch, make(), *shape))


_add_sequence("conv1d", lambda: nn.Conv1d(4, 8, 3), 2, 4, 16)
_add_sequence("conv2d", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(1)), 2, 3, 8, 8)
_add_sequence("conv3d", lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.Flatten(1)), 2, 2, 4, 4, 4)
_add_sequence("depthwise convolution", lambda: nn.Conv1d(8, 8, 3, groups=8, padding=1), 2, 8, 16)
_add_sequence("transposed convolution", lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), 2, 3, 4, 4)
_add_sequence("batch norm", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(1)), 4, 3, 6, 6)
_add_sequence("group norm", lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8)), 2, 4, 16)
_add_sequence("RMS norm", lambda: nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32)), 8, 32)
_add_sequence("LSTM", lambda: nn.LSTM(8, 16, batch_first=True), 4, 6, 8)
_add_sequence("LSTM, two directions", lambda: nn.LSTM(8, 16, 2, dropout=0.2, bidirectional=True), 6, 4, 8)
_add_sequence("LSTM with projection", lambda: nn.LSTM(8, 16, proj_size=8), 6, 4, 8)
_add_sequence("GRU", lambda: nn.GRU(8, 16, 2, dropout=0.2), 6, 4, 8)
_add_sequence("transformer layer", lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), 2, 6, 16)
_add_sequence("dropout", lambda: nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.AlphaDropout(0.1)), 8, 32)
_add_sequence("in place", lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32)), 8, 32)
_add_sequence("weight norm", lambda: parametrizations.weight_norm(nn.Linear(32, 24)), 8, 32)
_add_sequence("weight norm by hooks", lambda: nn.utils.weight_norm(nn.Linear(32, 24)), 8, 32)
_add_sequence("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(32, 24)), 8, 32)
_add_sequence("spectral norm by hooks", lambda: nn.utils.spectral_norm(nn.Linear(32, 24)), 8, 32)
_add_sequence("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(32, 24)), 8, 32)


@family.case("MLP in float32")
def _mlp(watch: Watch) -> None:
    learn(watch, build_mlp())


@family.case("MLP in float64")
def _mlp64(watch: Watch) -> None:
    """Of float64 the monitor measures nothing, which it warns of."""
    model, head = build_mlp(dtype=torch.float64), nn.Linear(32, 8)
    loss = regress(lambda x: head(model(x).float()), dtype=torch.float64)
    learn(watch, nn.ModuleList([model, head]), loss_of=loss, on_error="warn")


@family.case("GPT in BF16")
def _gpt(watch: Watch) -> None:
    learn(watch, build_gpt().bfloat16())


@family.case("GPT with dropout")
def _dropout(watch: Watch) -> None:
    learn(watch, build_gpt(dropout=0.2), micro_batches=2)


@family.case("mixture of experts")
def _experts(watch: Watch) -> None:
    learn(watch, build_gpt(num_experts=4).bfloat16(), micro_batches=2)


@family.case("LoRA")
def _low_rank(watch: Watch) -> None:
    learn(watch, add_low_rank(build_gpt()).bfloat16())


class _DoRA(nn.Module):
    """A frozen weight with a trained addition of low rank, whose columns have trained norms."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)
        self.magnitude = nn.Parameter(base.weight.norm(dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.base.weight + self.lora_B @ self.lora_A
        scale = (self.magnitude / weight.norm(dim=1).detach())[:, None]
        return nn.functional.linear(x, weight * scale, self.base.bias)


@family.case("DoRA")
def _dora(watch: Watch) -> None:
    model = nn.Sequential(_DoRA(nn.Linear(32, 48)), nn.GELU(), nn.Linear(48, 32))
    learn(watch, model)


@family.case("tied embedding")
def _tied(watch: Watch) -> None:
    model = build_gpt()
    model.output_layer.weight = model.embedding.weight
    learn(watch, model, micro_batches=2)


@family.case("a layer that is called twice")
def _twice(watch: Watch) -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(32, 8))
    learn(watch, model)


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@family.case("a parametrization of one's own")
def _parametrized(watch: Watch) -> None:
    layer = nn.Linear(32, 32)
    register_parametrization(layer, "weight", _Symmetric())
    learn(watch, nn.Sequential(layer, nn.Linear(32, 8)))


@family.case("frozen layers")
def _frozen(watch: Watch) -> None:
    model = build_mlp()
    model[0].requires_grad_(False)
    learn(watch, model)


@family.case("a frozen weight with a trained bias")
def _bias_only(watch: Watch) -> None:
    model = build_mlp()
    for layer in (model[0], model[3]):
        layer.weight.requires_grad_(False)
    learn(watch, model)


class _Inside(nn.Module):
    """Products of parameters within a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(32, 24) * 0.1), nn.Parameter(torch.randn(2, 12, 16) * 0.1)
        self.bilinear, self.third = nn.Bilinear(16, 16, 8), nn.Parameter(torch.randn(8, 8) * 0.1)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self.first).unflatten(-1, (2, 12))
        x = torch.einsum("beh,eho->beo", x, self.second).sum(1)
        x = torch.addmm(torch.zeros(8), self.bilinear(x, x), self.third)
        y: torch.Tensor = self.last(x)
        return y


@family.case("products within a forward")
def _inside(watch: Watch) -> None:
    learn(watch, _Inside())


@family.case("multi-head attention")
def _attention(watch: Watch) -> None:
    attention, head = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True), nn.Linear(32, 8)
    model = nn.ModuleDict({"attention": attention, "head": head})
    loss = regress(lambda x: head(attention(x, x, x, need_weights=True)[0]), 2, 6, 32)
    learn(watch, model, loss_of=loss)


@family.case("embedding bag with sparse gradients")
def _sparse(watch: Watch) -> None:
    bag, head = nn.EmbeddingBag(64, 16, sparse=True, mode="sum"), nn.Linear(16, 8)
    model = nn.ModuleDict({"bag": bag, "head": head})
    sparse = torch.optim.SparseAdam(bag.parameters(), lr=0.1)

    def loss(step: int, number: int) -> torch.Tensor:
        return head(bag(draw_tokens(step)[0])).square().mean()

    learn(
        watch,
        model,
        torch.optim.SGD(head.parameters(), lr=0.1),
        loss,
        before_update=sparse.step,
        after_step=sparse.zero_grad,
    )


@family.case("recurrent cell in a loop")
def _cell(watch: Watch) -> None:
    cell, head = nn.GRUCell(8, 16), nn.Linear(16, 4)
    model = nn.ModuleDict({"cell": cell, "head": head})

    def loss(step: int, number: int) -> torch.Tensor:
        state = torch.zeros(4, 16)
        for x in draw(step, number, 5, 4, 8):
            state = cell(x, state)
        return head(state).square().mean()

    learn(watch, model, loss_of=loss)


@family.case("an expert without tokens")
def _no_rows(watch: Watch) -> None:
    model = nn.ModuleDict({"used": nn.Linear(32, 16), "empty": nn.Linear(32, 16)})

    def loss(step: int, number: int) -> torch.Tensor:
        x = draw(step, number)
        return (model["used"](x).square().mean() + model["empty"](x[:0]).sum()).float()

    learn(watch, model, loss_of=loss)


@family.case("a layer without use")
def _unused(watch: Watch) -> None:
    model = nn.ModuleDict({"used": nn.Linear(32, 16), "unused": nn.Linear(32, 16)})
    learn(watch, model, loss_of=regress(model["used"]))


@family.case("strided and transposed inputs")
def _strided(watch: Watch) -> None:
    model = nn.Linear(32, 16)
    loss = regress(lambda x: model(x.t()[::2].transpose(1, 2) if x.dim() == 3 else x.t()), 32, 16)
    learn(watch, nn.Sequential(model), loss_of=loss)


@family.case("NaN and infinity")
def _nonfinite(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        x = draw(step, number)
        x[0, step], x[1, 2] = torch.inf, torch.nan
        return model(x)[2:].square().mean() + model(x)[:2].nan_to_num(0.0, 1.0, -1.0).mean()

    learn(watch, model, make_adam(model), loss)
