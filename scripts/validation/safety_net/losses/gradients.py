"""Cases about how gradients are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from safety_net.losses.case import STEPS, Family, Watch
from safety_net.losses.learning import build_mlp, draw, learn, make_adam, predict, regress
from safety_net.models import build_gpt, draw_tokens

family = Family()


@family.case("double backward")
def _penalty(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        x = draw(step, number).requires_grad_()
        y = model(x).square().mean()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return y + gradient.square().sum()

    learn(watch, model, loss_of=loss)


@family.case("Hessian-vector product")
def _hessian(watch: Watch) -> None:
    model = build_mlp()
    watch.start(model)
    optimizer = make_adam(model)
    for step in range(STEPS):
        with watch.step(step) as report:
            loss = model(draw(step, 0)).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            sum((g * g.detach()).sum() for g in gradients).backward()  # type: ignore[union-attr]
            watch.note("loss", loss)
            watch.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            report(loss=loss)
    watch.finish(model, optimizer)


@family.case("autograd.grad alone")
def _grad(watch: Watch) -> None:
    model = build_mlp()
    watch.start(model)
    for step in range(STEPS):
        with watch.step(step) as report:
            loss = model(draw(step, 0)).square().mean()
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                watch.note("gradient", g)
                p.data.sub_(0.1 * g)
            report(loss=loss)
    watch.finish(model)


@family.case("backward twice over one graph")
def _retained(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        y = model(draw(step, number))
        y.mean().backward(retain_graph=True)
        return y.square().mean()

    learn(watch, model, loss_of=loss)


@family.case("several losses")
def _several(watch: Watch) -> None:
    model = nn.ModuleDict({"trunk": build_mlp(), "one": nn.Linear(32, 4), "other": nn.Linear(32, 4)})

    def loss(step: int, number: int) -> torch.Tensor:
        y = model["trunk"](draw(step, number))
        model["one"](y.detach()).square().mean().backward()
        return model["other"](y).square().mean()

    learn(watch, model, loss_of=loss)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


@family.case("an autograd function of one's own")
def _function(watch: Watch) -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = _Scaled.apply(x, self.weight)
            return y

    learn(watch, nn.Sequential(Layer(32, 48, bias=False), nn.Linear(48, 16)))


@family.case("functional_call")
def _functional(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        weights = {name: p * 1.5 for name, p in model.named_parameters()}
        y: torch.Tensor = torch.func.functional_call(model, weights, (draw(step, number),))
        return y.square().mean()

    learn(watch, model, loss_of=loss)


def _with_func(gradient_of: Callable[[nn.Module, dict[str, Any], torch.Tensor], Any]) -> Callable[[Watch], None]:
    """Return a training in which torch.func computes something next to an ordinary step."""

    def train(watch: Watch) -> None:
        model = build_mlp()

        def loss(step: int, number: int) -> torch.Tensor:
            x = draw(step, number)
            weights = {name: p.detach() for name, p in model.named_parameters()}
            for name, value in gradient_of(model, weights, x).items():
                watch.note(f"torch.func of {name}", value)
            return model(x).square().mean()

        learn(watch, model, loss_of=loss)

    return train


def _loss_of(model: nn.Module) -> Callable[[dict[str, Any], torch.Tensor], torch.Tensor]:
    return lambda weights, x: torch.func.functional_call(model, weights, (x,)).square().mean()


family.add("torch.func.grad", _with_func(lambda model, weights, x: torch.func.grad(_loss_of(model))(weights, x)))
family.add(
    "gradients of each sample by vmap",
    _with_func(
        lambda model, weights, x: torch.func.vmap(torch.func.grad(_loss_of(model)), (None, 0))(weights, x.unsqueeze(1))
    ),
)
family.add("torch.func.jacrev", _with_func(lambda model, weights, x: torch.func.jacrev(_loss_of(model))(weights, x)))
family.add("torch.func.jacfwd", _with_func(lambda model, weights, x: {"x": torch.func.jacfwd(model)(x[:1])}))
family.add(
    "torch.func.jvp",
    _with_func(lambda model, weights, x: dict(enumerate(torch.func.jvp(model, (x,), (torch.ones_like(x),))))),
)


@family.case("training through vmap")
def _vmap(watch: Watch) -> None:
    model = build_mlp()
    learn(watch, model, loss_of=regress(torch.func.vmap(model)))


@family.case("an ensemble by vmap")
def _ensemble(watch: Watch) -> None:
    models = [build_mlp() for _ in range(3)]
    head = nn.Linear(32, 8)
    state, buffers = torch.func.stack_module_state(models)

    def loss(step: int, number: int) -> torch.Tensor:
        def call(weights: Any, held: Any, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.func.functional_call(models[0], (weights, held), (x,))
            return y

        y = torch.func.vmap(call, (0, 0, None))(state, buffers, draw(step, number))
        return head(y.mean(0)).square().mean()

    model = nn.ModuleList([*models, head])
    learn(watch, model, torch.optim.SGD([*state.values(), *head.parameters()], lr=0.1), loss)


@family.case("saved tensors packed by hooks")
def _packed(watch: Watch) -> None:
    model = build_gpt()

    def loss(step: int, number: int) -> torch.Tensor:
        with saved_tensors_hooks(lambda x: (x.clone(), x.dtype), lambda packed: packed[0].to(packed[1])):
            return predict(model)(step, number)

    learn(watch, model, loss_of=loss, micro_batches=2)


@family.case("saved tensors rounded by hooks")
def _rounded(watch: Watch) -> None:
    model = build_gpt()

    def loss(step: int, number: int) -> torch.Tensor:
        with saved_tensors_hooks(
            lambda x: x.bfloat16() if x.is_floating_point() else x, lambda x: x.float() if x.is_floating_point() else x
        ):
            return predict(model)(step, number)

    learn(watch, model, loss_of=loss)


@family.case("saved tensors offloaded")
def _offloaded(watch: Watch) -> None:
    model = build_gpt()

    def loss(step: int, number: int) -> torch.Tensor:
        with save_on_cpu():
            return predict(model)(step, number)

    learn(watch, model, loss_of=loss)


@family.case("hooks that change gradients")
def _hooked(watch: Watch) -> None:
    model = build_mlp()
    model[0].register_full_backward_hook(lambda module, inputs, outputs: tuple(g if g is None else 2 * g for g in inputs))
    model[3].register_full_backward_pre_hook(lambda module, outputs: tuple(0.5 * g for g in outputs))
    model[3].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    learn(watch, model)


@family.case("hooks that change inputs and outputs")
def _changed(watch: Watch) -> None:
    model = build_mlp()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, out: out + 1)
    model[3].register_forward_hook(lambda module, args, out: out.half().float())
    learn(watch, model)


@family.case("global hooks of modules")
def _global(watch: Watch) -> None:
    from torch.nn.modules.module import register_module_forward_hook

    model = build_mlp()
    handle = register_module_forward_hook(lambda module, args, out: out * 1.25 if isinstance(module, nn.Linear) else out)
    learn(watch, model)
    handle.remove()


@family.case("anomaly detection")
def _anomaly(watch: Watch) -> None:
    with torch.autograd.detect_anomaly():
        learn(watch, build_mlp())


@family.case("an evaluation within a step")
def _evaluated(watch: Watch) -> None:
    model = build_gpt(dropout=0.1)

    def loss(step: int, number: int) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            watch.note("validation", predict(model)(100 + step, 0))
        with torch.inference_mode():
            watch.note("validation", predict(model)(200 + step, 0).clone())
        model.train()
        return predict(model)(step, number)

    learn(watch, model, loss_of=loss)


@family.case("an input with a gradient of its own")
def _with_input(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        x = draw(step, number).requires_grad_()
        x.register_hook(lambda g: watch.note("gradient of the input", g))
        return model(x).square().mean()

    learn(watch, model, loss_of=loss)


@family.case("an adversarial step")
def _adversarial(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        x = draw(step, number).requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        return model((x + 0.1 * x.grad.sign()).detach()).square().mean()

    learn(watch, model, loss_of=loss)


@family.case("sharpness-aware minimization")
def _sharpness(watch: Watch) -> None:
    model, optimizer = build_gpt(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch.start(model)
    for step in range(STEPS):
        with watch.step(step) as report:
            tokens, labels = draw_tokens(step)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-9) for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            watch.note("loss", loss)
            watch.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            report(loss=loss)
    watch.finish(model, optimizer)


@family.case("a backward that is left out")
def _left_out(watch: Watch) -> None:
    """The forward of some steps has no backward."""
    model = build_mlp()
    optimizer = make_adam(model)
    watch.start(model)
    for step in range(6):
        with watch.step(step) as report:
            loss = model(draw(step, 0)).square().mean()
            if step % 3:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            watch.note("loss", loss)
            report(loss=loss)
    watch.finish(model, optimizer)
