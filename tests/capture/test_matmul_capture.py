"""Operands that exist inside a forward only: experts in 3-D parameters, nn.MultiheadAttention, linear layers of others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from helpers import Samples
from inside_forwards import look_at, sorted_rows
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from nemo_fp8_debug import Monitor

E, T, H, W = 4, 8, 32, 48
OFFSETS = torch.tensor([8, 16, 24, 32], dtype=torch.int32)


class Experts(nn.Module):
    """All experts in two parameters; each gets as many rows."""

    def __init__(self, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], outputs_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.multiply = multiply
        shapes = ((E, W, H), (E, H, W)) if outputs_first else ((E, H, W), (E, W, H))
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 6) for shape in shapes)
        self.up_bias = nn.Parameter(torch.randn(E, W))
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(F.silu(self.multiply(x, self.up)), self.down)


def in_loop(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows @ w[i] for i, rows in enumerate(x.chunk(E))])


def in_loop_with_tensor_index(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows.unsqueeze(0) @ w[torch.tensor(i)] for i, rows in enumerate(x.chunk(E))], 1)[0]


def in_batches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.view(E, -1, x.shape[-1]), w).flatten(0, 1)


def by_einsum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("etk,ekn->etn", x.view(E, -1, x.shape[-1]), w).flatten(0, 1)


def in_groups(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x.bfloat16(), w.bfloat16(), offs=OFFSETS)


def in_groups_transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As torchtitan's GroupedExperts do."""
    return F.grouped_mm(x, w.bfloat16().transpose(-2, -1), offs=OFFSETS)


def weights_first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(w, x.view(E, -1, x.shape[-1]).transpose(1, 2)).transpose(1, 2).reshape(len(x), -1)


INPUTS_FIRST = [in_loop, in_loop_with_tensor_index, in_batches, by_einsum, in_groups]
OUTPUTS_FIRST = [in_groups_transposed, weights_first]


@pytest.mark.parametrize(
    ("multiply", "outputs_first"),
    [*((f, False) for f in INPUTS_FIRST), *((f, True) for f in OUTPUTS_FIRST)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operands_of_experts_are_what_is_multiplied(multiply: Any, outputs_first: bool, dtype: torch.dtype) -> None:
    experts = Experts(multiply, outputs_first)
    x = torch.randn(E * T, H).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        seen = look_at(experts.to(dtype), lambda: experts(x).float().square().sum().backward())

    # The same by hand: an expert after the other, and gradients kept.
    w1, w2 = (w.detach().bfloat16() if not outputs_first else w.detach().bfloat16().mT for w in (experts.up, experts.down))
    first = [(rows @ w).requires_grad_() for rows, w in zip(x.detach().chunk(E), w1, strict=True)]
    hidden = [F.silu(h) for h in first]
    out = [(h @ w) for h, w in zip(hidden, w2, strict=True)]
    for y in out:
        y.retain_grad()
    sum(y.float().square().sum() for y in out).backward()
    expected = {
        ("up", "input"): x.detach(),
        ("down", "input"): torch.cat(hidden).detach(),
        ("up", "weight"): w1.mT.reshape(-1, H),
        ("down", "weight"): w2.mT.reshape(-1, W),
        ("up", "grad_output"): torch.cat([h.grad for h in first]),
        ("down", "grad_output"): torch.cat([y.grad for y in out]),
    }
    assert not seen.faults and not seen.not_multiplied
    assert set(seen.tensors) == set(expected)
    for (name, role), rows in expected.items():
        assert torch.equal(seen.together(name, role), sorted_rows(rows)), (name, role)
    assert all(seen.all_told(role) for role in ("input", "weight", "grad_output"))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 24, "vdim": 40}], ids=["packed", "apart"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_projections_of_multihead_attention(dtype: torch.dtype, sizes: dict[str, int], batch_first: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(H, 4, batch_first=batch_first, **sizes).to(dtype)
    q = torch.randn(5, 3, H, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(5, 3, sizes[s], dtype=dtype) if sizes else q for s in ("kdim", "vdim"))
    wide: dict[str, torch.Tensor] = {}

    def step() -> None:
        out = attention(q, k, v, need_weights=False)[0]
        out.register_hook(lambda grad: wide.setdefault("out", grad))
        out.float().square().sum().backward()

    seen = look_at(attention, step)
    assert not seen.faults and not seen.not_multiplied
    into = ("q_proj", "k_proj", "v_proj") if sizes else ("in_proj",)
    assert {name for name, _ in seen.tensors} == {*into, "out_proj"}
    for name, x in zip(into, (q, k, v), strict=False):
        assert torch.equal(seen.together(name, "input"), sorted_rows(x.detach()))
        assert torch.equal(seen.tensors[name, "weight"][0], getattr(attention, f"{name}_weight").detach())
        # What the product has brought is what wgrad multiplies with X.
        dy, rows = seen.tensors[name, "grad_output"][0], seen.tensors[name, "input"][0]
        grad = getattr(attention, f"{name}_weight").grad.float()
        torch.testing.assert_close(
            dy.reshape(-1, dy.shape[-1]).float().T @ rows.reshape(-1, rows.shape[-1]).float(), grad, rtol=2e-2, atol=2e-2
        )
    assert torch.equal(seen.tensors["out_proj", "weight"][0], attention.out_proj.weight.detach())
    assert torch.equal(seen.together("out_proj", "grad_output"), sorted_rows(wide["out"]))
    assert all(seen.all_told(role) for role in ("input", "weight", "grad_output"))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x + 1, self.weight * 1.5, self.bias)


class Merged(nn.Linear):
    """A low-rank update added to the weight before it is multiplied."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.a, self.b = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.randn(sizes[1], 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight + self.b @ self.a).T


@pytest.mark.parametrize("kind", [Scaled, Merged])
def test_of_a_transformed_weight_what_is_multiplied(kind: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    linear, x = kind(H, W).bfloat16(), torch.randn(T, H).bfloat16().requires_grad_()
    seen = look_at(nn.Sequential(linear), lambda: linear(x).sum().backward())
    with torch.no_grad():
        scaled = isinstance(linear, Scaled)
        multiplied = linear.weight * 1.5 if scaled else linear.weight + linear.b @ linear.a  # type: ignore[operator]
        rows = x + 1 if scaled else x
    assert torch.equal(seen.tensors["0", "weight"][0], multiplied)
    assert torch.equal(seen.tensors["0", "input"][0], rows.detach())
    assert torch.equal(seen.tensors["0", "grad_output"][0], torch.ones(T, W).bfloat16())
    assert all(seen.all_told(role) for role in ("input", "weight", "grad_output"))


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def to_int8(x: torch.Tensor) -> torch.Tensor:
    unit = x.abs().amax() / 127
    return (x / unit).to(torch.int8) * unit


def straight_through(x: torch.Tensor) -> torch.Tensor:
    return x + (to_fp8(x) - x).detach()


def by_addend(x: torch.Tensor) -> torch.Tensor:
    return x + 192.0 - 192.0


def by_tensor_addend(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor(192.0, dtype=x.dtype) - torch.tensor(192.0, dtype=x.dtype)


def by_floor(x: torch.Tensor) -> torch.Tensor:
    return torch.div(x, 0.125, rounding_mode="floor") * 0.125


def by_bits(x: torch.Tensor) -> torch.Tensor:
    return (x.detach().clone().view(torch.int16) & -16).view(x.dtype) + 0 * x


def out_of_sight(x: torch.Tensor) -> torch.Tensor:
    """A kernel of somebody's that writes to memory."""
    out = torch.empty_like(x)
    out.detach().view(torch.int16).numpy()[:] = x.detach().contiguous().view(torch.int16).numpy() & -16
    return out + 0 * x


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


ROUNDINGS = [
    to_fp8,
    to_int8,
    straight_through,
    by_addend,
    by_tensor_addend,
    by_floor,
    by_bits,
    out_of_sight,
    _Rounding.apply,
]


class Rounds(nn.Linear):
    def __init__(self, rounds: Callable[[torch.Tensor], torch.Tensor], role: str) -> None:
        super().__init__(H, W, bias=False)
        self.rounds, self.role = rounds, role

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.role == "input":
            return F.linear(self.rounds(x), self.weight)
        return F.linear(x, self.rounds(self.weight))


@pytest.mark.parametrize("role", ["input", "weight"])
@pytest.mark.parametrize("rounds", ROUNDINGS, ids=lambda f: f.__qualname__)
def test_what_may_have_been_rounded_is_unknown(rounds: Any, role: str) -> None:
    linear = Rounds(rounds, role).bfloat16()
    x = torch.randn(T, H).bfloat16().requires_grad_()
    seen = look_at(nn.Sequential(linear), lambda: linear(x).sum().backward())
    # What it was given, since what it has made of it may be codes.
    assert torch.equal(seen.tensors["0", "input"][0], x.detach())
    assert torch.equal(seen.tensors["0", "weight"][0], linear.weight.detach())
    assert seen.told["0", "input"] == seen.told["0", "weight"] == seen.told["0", "grad_output"] == [False]


@pytest.mark.parametrize("rounds", ROUNDINGS, ids=lambda f: f.__qualname__)
def test_experts_whose_operands_may_have_been_rounded(rounds: Any) -> None:
    experts = Experts(lambda x, w: in_batches(rounds(x), w))
    x = torch.randn(E * T, H).bfloat16().requires_grad_()
    seen = look_at(experts, lambda: experts(x).sum().backward())
    assert not any(told for (_, role), calls in seen.told.items() if role == "input" for told in calls)
    assert seen.all_told("weight")


class _QuantizedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return to_fp8(grad)


def with_function(y: torch.Tensor) -> torch.Tensor:
    return _QuantizedGradient.apply(y)


def with_hook(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(to_fp8)
    return y


def with_hook_later(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    z.register_hook(to_fp8)
    return z + 0


@pytest.mark.parametrize("quantizes", [with_function, with_hook, with_hook_later])
def test_gradients_that_a_forward_may_have_quantized_are_unknown(quantizes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return quantizes(F.linear(x, self.weight))

    layer, x = Layer(H, W).bfloat16(), torch.randn(T, H).bfloat16().requires_grad_()
    seen = look_at(nn.Sequential(layer), lambda: layer(x).square().sum().backward())
    assert seen.told["0", "grad_output"] == [False]
    assert seen.told["0", "weight"] == [True]
    assert torch.equal(seen.tensors["0", "grad_output"][0], to_fp8(2 * F.linear(x, layer.weight)).detach())


def test_parameters_in_one_piece_of_memory_are_told_apart() -> None:
    """As sharding optimizers lay them."""
    experts = Experts(in_batches)
    flat = torch.cat([experts.up.detach().reshape(-1), experts.down.detach().reshape(-1)])
    experts.up.data, experts.down.data = flat[: E * H * W].view(E, H, W), flat[E * H * W :].view(E, W, H)
    x = torch.randn(E * T, H).bfloat16().requires_grad_()
    seen = look_at(experts, lambda: experts(x).sum().backward())
    assert torch.equal(seen.tensors["up", "weight"][0], experts.up.detach().mT)
    assert torch.equal(seen.tensors["down", "weight"][0], experts.down.detach().mT)


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_a_recompute_one_pass_counts(reentrant: bool) -> None:
    experts = Experts(in_loop).train()
    x = torch.randn(E * T, H).bfloat16().requires_grad_()
    plain = look_at(experts, lambda: experts(x).sum().backward())
    again = look_at(experts, lambda: checkpoint(experts, x, use_reentrant=reentrant).sum().backward())
    assert {key: len(calls) for key, calls in again.tensors.items()} == {key: len(c) for key, c in plain.tensors.items()}
    for name, role in plain.tensors:
        assert torch.equal(again.together(name, role), plain.together(name, role))


def test_evaluation_and_frozen_experts() -> None:
    experts = Experts(in_batches)
    x = torch.randn(E * T, H).bfloat16()
    with torch.no_grad():
        assert not look_at(experts.eval(), lambda: experts(x)).tensors
    for parameter in experts.parameters():
        parameter.requires_grad_(False)
    seen = look_at(experts.train(), lambda: experts(x.requires_grad_()).sum().backward())
    assert set(seen.tensors) == set(itertools.product(("up", "down"), ("input", "weight", "grad_output")))


def test_a_forward_that_raises_leaves_no_mode() -> None:
    class Broken(Experts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise RuntimeError("out of luck")

    broken = Broken(in_batches)
    with pytest.raises(RuntimeError, match="out of luck"):
        look_at(broken, lambda: broken(torch.randn(E * T, H).bfloat16()))
    assert _get_current_dispatch_mode() is None


def test_parameters_that_nothing_multiplies_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Parameter(torch.randn(E, H, H)), nn.Linear(H, H)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) + self.table[0]
            return out

    model, samples = Table(), Samples()
    with pytest.warns(UserWarning, match=r"1 parameters \(first model.table\) are not observed: no torch operator"):
        monitor = Monitor(model, recorders=[samples], interval=1)
        with monitor.step(0):
            model(torch.randn(H, H)).sum().backward()
        monitor.close()
    assert set(samples.samples[0].operand_columns["layer"]) == {"linear"}


def gpt_oss() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": H, "intermediate_size": W, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": E, "num_experts_per_tok": 2}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads)).bfloat16().train()


def llama4() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": H, "intermediate_size": W, "intermediate_size_mlp": W, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": E, "head_dim": 8, "pad_token_id": 0}
    config = transformers.Llama4TextConfig(**sizes, **heads, attn_implementation="eager")
    return transformers.Llama4ForCausalLM(config).bfloat16().train()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=H, n_layer=2, n_head=4, vocab_size=64, n_positions=16)
    return transformers.GPT2LMHeadModel(config).bfloat16().train()


def trained(model: nn.Module, monitored: bool, checkpointing: bool, interval: int = 2) -> tuple[list[float], Samples]:
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    optimizer, samples = torch.optim.AdamW(model.parameters(), 1e-3), Samples()
    options = {"interval": interval, "on_error": "raise", "what_if": ["mxfp8", "blockwise"], "output_rows": 4}
    monitor = Monitor(model, recorders=[samples], **options) if monitored else None  # type: ignore[arg-type]
    losses, generator = [], torch.Generator().manual_seed(1)
    for step in range(3):
        tokens = torch.randint(64, (2, 16), generator=generator)
        if monitor:
            monitor.begin_step(step)
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if monitor:
            monitor.end_step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if monitor:
        monitor.close()
    return [*losses, *(p.double().sum().item() for p in model.parameters())], samples


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [gpt_oss, llama4, gpt2])
def test_real_models_are_not_disturbed(make: Callable[[], nn.Module], checkpointing: bool) -> None:
    plain, _ = trained(make(), False, checkpointing)
    watched, samples = trained(make(), True, checkpointing)
    assert watched == plain
    metrics = samples.samples[2].operand_columns
    rows = {(layer, role): i for i, (layer, role) in enumerate(zip(metrics["layer"], metrics["role"], strict=True))}
    inside = {
        gpt_oss: [f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")],
        llama4: ["model.layers.1.feed_forward.experts.gate_up_proj", "model.layers.1.feed_forward.experts.down_proj"],
        gpt2: [f"transformer.h.{i}.{name}" for i in (0, 1) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")],
    }[make]
    for key in itertools.product(inside, ("input", "weight", "grad_output")):
        assert metrics["scale_source"][rows[key]] == "current", key
        assert metrics["n"][rows[key]] > 0


def test_operands_of_a_subclass_of_tensors_stay_unknown() -> None:
    class Quantizing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_function__(func, types, args, kwargs or {})
            return out

    experts = Experts(in_batches)
    experts.up = nn.Parameter(experts.up.detach().as_subclass(Quantizing))
    x = torch.randn(E * T, H).bfloat16().requires_grad_()
    seen = look_at(experts, partial(lambda: experts(x).sum().backward()))
    assert "up" not in {name for name, _ in seen.tensors}
    assert "down" in {name for name, _ in seen.tensors}


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_weights_that_are_computed_of_others(norm: Any) -> None:
    linear, x = norm(nn.Linear(H, W)), torch.randn(T, H).requires_grad_()
    expected = linear.weight.detach().clone()
    seen = look_at(nn.Sequential(linear).eval(), lambda: linear(x).square().sum().backward())
    assert torch.allclose(seen.tensors["0", "weight"][0], expected, rtol=1e-6)
    assert torch.equal(seen.tensors["0", "input"][0], x.detach())
    assert seen.told["0", "input"] == seen.told["0", "weight"] == [True]
