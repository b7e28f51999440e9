"""Cases about optimizers, precision and the steps of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from safety_net.losses.case import STEPS, Family, Impossible, Watch
from safety_net.losses.learning import build_mlp, draw, learn, make_adam, predict
from safety_net.models import build_gpt

family = Family()
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _train(make: Make, watch: Watch, **options: Any) -> None:
    model = build_gpt()
    learn(watch, model, make(list(model.parameters())), **options)


_KINDS: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "AdamW, one by one": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "AdamW, together": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW, tensor as rate": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), foreach=False),
    "Adam with AMSGrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "Adam that maximizes": partial(torch.optim.Adam, lr=1e-3, maximize=True),
    "Adam, differentiable": partial(torch.optim.Adam, lr=1e-3, foreach=False),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}
for _name, _make in _KINDS.items():
    family.add(_name, partial(_train, _make))


@family.case("AdamW, capturable")
def _capturable(watch: Watch) -> None:
    try:
        _train(partial(torch.optim.AdamW, lr=1e-2, capturable=True), watch)
    except (AssertionError, RuntimeError) as error:
        if "capturable" not in str(error):
            raise
        raise Impossible(f"torch refuses it on a CPU: {error}") from None


@family.case("Muon")
def _muon(watch: Watch) -> None:
    model = build_mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=1e-2)
    others = torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2)

    def clear() -> None:
        others.step()
        others.zero_grad()

    learn(watch, model, muon, after_step=clear)


@family.case("LBFGS with a closure")
def _lbfgs(watch: Watch) -> None:
    model = build_mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    watch.start(model)
    for step in range(STEPS):
        with watch.step(step) as report:

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(draw(step, 0)).square().mean()
                loss.backward()
                watch.note("loss", loss)
                return loss

            report(loss=optimizer.step(closure))
    watch.finish(model, optimizer)


@family.case("Adam with a closure")
def _closure(watch: Watch) -> None:
    model = build_mlp()
    optimizer = make_adam(model)
    watch.start(model)
    for step in range(STEPS):
        with watch.step(step) as report:

            def closure(step: int = step) -> float:
                optimizer.zero_grad()
                loss = model(draw(step, 0)).square().mean()
                loss.backward()
                watch.note("loss", loss)
                return loss.item()

            report(loss=optimizer.step(closure))
    watch.finish(model, optimizer)


@family.case("groups of parameters")
def _groups(watch: Watch) -> None:
    model = build_gpt()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-3}]
    learn(watch, model, torch.optim.AdamW(groups, lr=1e-2))


@family.case("two optimizers")
def _two(watch: Watch) -> None:
    model = build_mlp()
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)

    def step_second() -> None:
        second.step()
        second.zero_grad()

    learn(watch, model, torch.optim.Adam(model[0].parameters(), lr=1e-2), before_update=step_second)


@family.case("optimizer in the backward")
def _in_backward(watch: Watch) -> None:
    model = build_gpt()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        watch.note("gradient", parameter.grad)
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    watch.start(model)
    for number in range(STEPS):
        with watch.step(number) as report:
            loss = predict(model)(number, 0)
            loss.backward()
            watch.note("loss", loss)
            report(loss=loss)
    watch.finish(model, *optimizers.values())


@family.case("EMA of the weights")
def _ema(watch: Watch) -> None:
    model = build_gpt()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    learn(watch, model, after_step=lambda: average.update_parameters(model))
    for name, value in average.named_parameters():
        watch.note(f"average of {name}", value)


@family.case("SWA with batch norm")
def _swa(watch: Watch) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 32))
    average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05)

    def update() -> None:
        average.update_parameters(model)
        schedule.step()

    learn(watch, model, optimizer, after_step=update)
    update_bn([draw(i, 0) for i in range(3)], average)
    for name, value in average.state_dict().items():
        watch.note(f"average of {name}", value)


@family.case("learning rate schedule")
def _schedule(watch: Watch) -> None:
    model = build_gpt()
    optimizer = make_adam(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS + 1)
    learn(watch, model, optimizer, after_step=schedule.step)


@family.case("gradients clipped by norm")
def _clip_norm(watch: Watch) -> None:
    model = build_gpt()
    learn(watch, model, before_update=lambda: watch.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1)))


@family.case("gradients clipped by value")
def _clip_value(watch: Watch) -> None:
    model = build_gpt()
    learn(watch, model, before_update=lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-3))


@family.case("gradients with noise")
def _noise(watch: Watch) -> None:
    model = build_gpt()

    def add() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad += 1e-3 * torch.randn_like(p.grad)

    learn(watch, model, before_update=add)


@family.case("gradients accumulated")
def _accumulated(watch: Watch) -> None:
    learn(watch, build_gpt(dropout=0.1), micro_batches=3)


@family.case("gradients kept as zeros")
def _zeros(watch: Watch) -> None:
    model = build_gpt()
    optimizer = make_adam(model)
    learn(watch, model, optimizer, after_step=partial(optimizer.zero_grad, set_to_none=False))


@family.case("master weights by hand")
def _masters(watch: Watch) -> None:
    model = build_gpt().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]

    def give() -> None:
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
            p.grad = None

    def take() -> None:
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)

    learn(watch, model, torch.optim.AdamW(masters, lr=1e-2), before_update=give, after_step=take)


def _train_scaled(watch: Watch, dtype: torch.dtype, clips: bool, scale: float) -> None:
    model = build_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    watch.start(model)
    for step in range(6):
        with watch.step(step) as report:
            for number in range(2):
                with torch.autocast("cpu", dtype=dtype):
                    loss = predict(model)(step, number)
                watch.show(loss)
                scaler.scale(loss / 2).backward()
                watch.note("loss", loss)
            if clips:
                scaler.unscale_(optimizer)
                watch.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            watch.note_gradients(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.note("scale", scaler.get_scale())
            report(loss=loss)
    watch.finish(model, optimizer)


family.add("gradient scaler in FP16", partial(_train_scaled, dtype=torch.float16, clips=False, scale=2.0**10))
family.add("gradient scaler that skips steps", partial(_train_scaled, dtype=torch.float16, clips=True, scale=2.0**26))
family.add("gradient scaler in BF16", partial(_train_scaled, dtype=torch.bfloat16, clips=True, scale=2.0**10))
family.add("autocast in BF16", lambda watch: learn(watch, build_gpt(), dtype=torch.bfloat16, micro_batches=2))
family.add("autocast in FP16", lambda watch: learn(watch, build_gpt(), dtype=torch.float16))


@family.case("autocast without its cache")
def _no_cache(watch: Watch) -> None:
    model = build_gpt()

    def loss(step: int, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return predict(model)(step, number)

    learn(watch, model, loss_of=loss)


@family.case("autocast that is left within the model")
def _nested(watch: Watch) -> None:
    model = build_gpt()
    inner = model.layers[0].forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return inner(x.float())

    model.layers[0].forward = forward  # type: ignore[method-assign]
    learn(watch, model, dtype=torch.bfloat16)
