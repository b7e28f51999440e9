"""Cases about what goes on around a model: compilers, threads, processes, and the options of a monitor."""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nemo_fp8_debug import Emulation
from safety_net.losses.case import OPTIONS, STEPS, Family, Watch
from safety_net.losses.learning import build_mlp, draw, learn, make_adam, predict, regress
from safety_net.models import build_gpt, compute_loss, draw_tokens

family = Family()


def _compile_layers(watch: Watch, backend: str, eager: bool = False) -> None:
    model = build_gpt()
    for layer in model.layers:
        layer.compile(backend=backend)
    torch._dynamo.reset()
    learn(watch, model, eager=eager)


def _compile_first(watch: Watch, backend: str) -> None:
    model = build_gpt(dropout=0.1)
    model.layers[0] = torch.compile(model.layers[0], backend=backend)
    torch._dynamo.reset()
    learn(watch, model, micro_batches=2)


family.add("compiled layers", partial(_compile_layers, backend="aot_eager"))
family.add("compiled layers, sampled eagerly", partial(_compile_layers, backend="eager", eager=True))
family.add("a compiled layer among others", partial(_compile_first, backend="eager"))
family.add("a compiled layer among others, by AOT", partial(_compile_first, backend="aot_eager"))
family.add("a compiled layer among others, by Inductor", partial(_compile_first, backend="inductor"))


@family.case("a compiled loss")
def _compiled_loss(watch: Watch) -> None:
    model, loss_of = build_gpt(), torch.compile(compute_loss, backend="aot_eager")

    def loss(step: int, number: int) -> torch.Tensor:
        tokens, labels = draw_tokens(step, number)
        value: torch.Tensor = loss_of(model(tokens), labels)
        return value

    learn(watch, model, loss_of=loss)


@family.case("a compiled optimizer")
def _compiled_optimizer(watch: Watch) -> None:
    model = build_mlp()
    optimizer = make_adam(model, foreach=True)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    model_without = torch.optim.SGD(model.parameters(), lr=0.0)
    learn(watch, model, model_without, before_update=step)
    watch.note("step", [state["step"].item() for state in optimizer.state.values()])


@family.case("a traced graph")
def _traced(watch: Watch) -> None:
    learn(watch, torch.fx.symbolic_trace(build_mlp()), loss_of=None)


@family.case("a scripted activation")
def _scripted(watch: Watch) -> None:
    model = build_mlp()
    model[1] = torch.jit.script(nn.GELU())
    learn(watch, model)


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(32)  # of the worker's random numbers


@family.case("data of forked workers")
def _workers(watch: Watch) -> None:
    model = build_mlp()
    data = iter(DataLoader(_Numbers(), batch_size=4, num_workers=2, generator=torch.Generator().manual_seed(3)))
    learn(watch, model, loss_of=lambda step, number: model(next(data)).square().mean())


@family.case("workers that start within a step")
def _workers_within(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        data = DataLoader(_Numbers(), batch_size=8, num_workers=1, shuffle=True)
        return sum(model(batch).square().mean() for batch in data)  # type: ignore[return-value]

    learn(watch, model, loss_of=loss)


@family.case("a fork within a step")
def _forked(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        value = model(draw(step, number)).square().mean()
        if not (process := os.fork()):
            os._exit(0)
        watch.note("status of a fork", os.waitpid(process, 0)[1])
        return value

    learn(watch, model, loss_of=loss)


@family.case("a fork that computes")
def _forked_forward(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        reading, writing = os.pipe()
        if not (process := os.fork()):
            with torch.no_grad():
                os.write(writing, repr(model(draw(50 + step, 0)).square().mean().item()).encode())
            os._exit(0)
        os.waitpid(process, 0)
        os.close(writing)
        watch.note("loss of a fork", os.read(reading, 100))
        os.close(reading)
        return model(draw(step, number)).square().mean()

    learn(watch, model, loss_of=loss)


@family.case("another thread that trains another model")
def _threads(watch: Watch) -> None:
    model, other = build_mlp(), build_mlp()
    found: list[torch.Tensor] = []

    def train_other() -> None:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(20):
            loss = other(draw(1000 + step, 0)).square().mean()
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()

    thread = threading.Thread(target=train_other)
    thread.start()
    learn(watch, model)
    thread.join()
    watch.note("losses of the other", torch.stack(found))


@family.case("forward in a thread")
def _forward_thread(watch: Watch) -> None:
    model = build_mlp()
    with ThreadPoolExecutor(1) as pool:
        learn(watch, model, loss_of=lambda step, number: pool.submit(regress(model), step, number).result())


@family.case("backward in a thread")
def _backward_thread(watch: Watch) -> None:
    model = build_mlp()
    optimizer = make_adam(model)
    watch.start(model)
    with ThreadPoolExecutor(1) as pool:
        for step in range(STEPS):
            with watch.step(step) as report:
                loss = regress(model)(step, 0)
                pool.submit(loss.backward).result()
                watch.note("loss", loss)
                watch.note_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
                report(loss=loss)
    watch.finish(model, optimizer)


@family.case("a step that fails and is tried again")
def _failed(watch: Watch) -> None:
    model = build_mlp()
    optimizer = make_adam(model)
    watch.start(model)
    for number in range(6):
        failed = False
        try:
            with watch.step(number) as report:
                loss = regress(model)(number, 0)
                if number == 2:
                    raise RuntimeError("out of memory")
                loss.backward()
                watch.note("loss", loss)
                optimizer.step()
                optimizer.zero_grad()
                report(loss=loss)
        except RuntimeError:
            failed = True
        watch.note("failed", failed)
    watch.finish(model, optimizer)


@family.case("a checkpoint within the run")
def _saved(watch: Watch) -> None:
    model = build_gpt()
    optimizer = make_adam(model)

    def save_and_load() -> None:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        watch.note("size of a checkpoint", len(file.getvalue()))
        file.seek(0)
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    learn(watch, model, optimizer, after_step=save_and_load)


@family.case("a copy of the model within a step")
def _copied(watch: Watch) -> None:
    model = build_mlp()

    def loss(step: int, number: int) -> torch.Tensor:
        teacher = copy.deepcopy(model).requires_grad_(False)
        x = draw(step, number)
        return (model(x) - 0.5 * teacher(x + 1)).square().mean()

    learn(watch, model, loss_of=loss)


@family.case("monitor that comes late and goes early")
def _late(watch: Watch) -> None:
    model = build_gpt()
    optimizer = make_adam(model)
    for step in range(8):
        if step == 2:
            watch.start(model)
        monitor, folder = watch.monitor, watch.folder
        if step == 6 and monitor is not None:
            monitor.close()
            watch.monitor = None
        with watch.step(step) as report:
            loss = predict(model)(step, 0)
            loss.backward()
            watch.note("loss", loss)
            watch.note_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            report(loss=loss)
        watch.folder = folder
    watch.finish(model, optimizer)


@family.case("layers that are replaced within the run")
def _replaced(watch: Watch) -> None:
    model = build_mlp()
    fresh = nn.Linear(32, 48)
    steps = iter(range(10))

    def replace() -> None:
        if next(steps) == 1:
            model[0] = fresh

    learn(watch, model, after_step=replace)


@family.case("another dtype within the run")
def _cast(watch: Watch) -> None:
    model = build_mlp()
    steps = iter(range(10))
    kind = {"dtype": torch.float32}

    def cast() -> None:
        if next(steps) == 1:
            kind["dtype"] = torch.bfloat16
            model.bfloat16()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learn(
        watch,
        model,
        optimizer,
        lambda step, n: model(draw(step, n).to(kind["dtype"])).float().square().mean(),
        after_step=cast,
    )


@family.case("emulation and monitor")
def _emulated(watch: Watch) -> None:
    model = build_gpt().bfloat16()
    emulation = Emulation(model, "delayed", ["layers.*"])
    emulation.attach()
    learn(watch, model)
    emulation.detach()


def _only(**options: Any) -> Callable[[Watch], None]:
    """Return a training with no option but these."""
    none = dict.fromkeys(("what_if", "states", "activations", "dump", "triggers"), ())
    none |= dict.fromkeys(("verify_rows", "output_rows"), 0)  # type: ignore[arg-type]
    none |= dict.fromkeys(("replicas", "copies", "block_scales"), False)  # type: ignore[arg-type]

    def train(watch: Watch) -> None:
        learn(watch, build_gpt(num_experts=2, dropout=0.1).bfloat16(), micro_batches=2, **{"interval": 1, **none, **options})

    return train


family.add("no option", _only())
for _option in ("what_if", "states", "activations", "dump", "verify_rows", "output_rows", "copies", "block_scales"):
    family.add(f"only {_option}", _only(**{_option: OPTIONS[_option]}))
family.add("some layers", _only(layers=["layers.1.*"], roles=["grad_output"]))
family.add("histograms at some steps", _only(histogram_interval=3))
for _recipe in ("current", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4", "bf16"):
    family.add(f"measured under {_recipe}", _only(recipe=_recipe, copies=True, block_scales=True))
family.add("everything at every step", lambda watch: learn(watch, build_gpt(num_experts=4).bfloat16(), interval=1))
family.add("everything in float32", lambda watch: learn(watch, build_gpt(dropout=0.1), interval=1, dump=["*"]))


@family.case("triggers that fire")
def _triggered(watch: Watch) -> None:
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(step: int, number: int) -> torch.Tensor:
        return model(draw(step, number) * (100 if step == 19 else 1)).square().mean()

    options = {"interval": 10, "triggers": ["loss_spike", "outlier_log2/input > 9"], "trigger_dump": ["*"]}
    learn(watch, model, optimizer, loss, steps=24, **options)


@family.case("a control file")
def _controlled(watch: Watch) -> None:
    model = build_mlp()

    def control() -> None:
        if watch.folder is not None:
            (watch.folder / "control.yaml").write_text("dump: ['*']\nsteps: 2\n")

    learn(watch, model, steps=8, interval=3, dump=(), after_step=control)
