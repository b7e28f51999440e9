"""Cases about DeepSpeed's ZeRO."""

from __future__ import annotations

from functools import partial
from typing import Any

from safety_net.losses.case import STEPS, Family, Watch
from safety_net.records.deepspeed_setups import build_engine, engine_stepper

family = Family()
_ON_CPU = {"device": "cpu", "pin_memory": False}


def _train(watch: Watch, rank: int, world: int, stage: int, **options: Any) -> None:
    engine = build_engine(stage, **options)
    watch.start(engine)
    train_step = engine_stepper(engine, rank, lambda loss: watch.note("loss", loss))
    for step in range(STEPS):
        with watch.step(step) as report:
            scalars = train_step(step)
            watch.note("norm", float(scalars["grad_norm"]))
            report(**scalars)
    for name, value in engine.module.named_parameters():
        watch.note(f"part of {name}", getattr(value, "ds_tensor", value))
    watch.finish(engine.module.norm if hasattr(engine.module, "norm") else engine.module.embedding)
    engine.destroy()


for _stage in (0, 1, 2):
    family.add(f"ZeRO-{_stage}", partial(_train, stage=_stage), 2)
family.add("ZeRO-3", partial(_train, stage=3), 2)
family.add("ZeRO-3 and checkpoints", partial(_train, stage=3, checkpointed=True), 2)
family.add("ZeRO-2 with offload", partial(_train, stage=2, offload_optimizer=_ON_CPU), 2)
family.add("ZeRO-3 with offload", partial(_train, stage=3, offload_param=_ON_CPU, offload_optimizer=_ON_CPU), 2)
