"""Cases about Megatron-core with local layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_on_cpu import megatron_on_cpu

from safety_net.losses.case import STEPS, Family, Watch
from safety_net.records.megatron_setups import EXPERTS, build_megatron, megatron_stepper, wrap_megatron

family = Family()


@contextmanager
def start_megatron(**groups: int) -> Iterator[None]:
    """Set Megatron up.

    Args:
        groups: sizes of its groups.
    """
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(**groups)
        model_parallel_cuda_manual_seed(0)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def _train(watch: Watch, rank: int, world: int, groups: str = "", ddp: Any = None, **options: Any) -> None:
    sizes = {f"{group}_model_parallel_size": 2 for group in groups.split()}
    with start_megatron(**sizes):
        model = wrap_megatron(build_megatron(**sizes, **options), **(ddp or {}))
        train_step = megatron_stepper(model, **(ddp or {}))
        watch.start(model)
        for step in range(STEPS):
            with watch.step(step) as report:
                scalars = train_step(step)
                watch.note("loss", scalars["loss"])
                watch.note("norm", scalars["grad_norm"])
                for name, parameter in model.named_parameters():
                    watch.note(f"gradient of {name}", parameter.main_grad)
                report(**scalars)
        watch.finish(model)


def _add(name: str, *worlds: int, **options: Any) -> None:
    family.add(f"Megatron, {name}", partial(_train, **options), *(worlds or (1,)))


def _recompute(granularity: str, method: str | None = None, number: int | None = None, **options: Any) -> dict[str, Any]:
    return {
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_num_layers": number,
        **options,
    }


_SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
_add("plain")
_add("experts", **EXPERTS)
_add("recompute, uniform", **_recompute("full", "uniform", 1))
_add("recompute, block", **_recompute("full", "block", 1))
_add("recompute, selective", **_recompute("selective"))
_add("recompute, experts", **_recompute("selective", recompute_modules=["moe"]), **EXPERTS)
_add("recompute of all, experts", **_recompute("full", "uniform", 1), **EXPERTS)
_add("tensor parallelism", 2, groups="tensor")
_add("sequence parallelism", 2, groups="tensor", sequence_parallel=True)
_add("sequence parallelism and recompute", 2, groups="tensor", sequence_parallel=True, **_recompute("full", "uniform", 1))
_add("pipeline parallelism", 2, groups="pipeline")
_add("data parallelism", 2)
_add("data parallelism, sharded", 2, ddp=_SHARDED)
_add("expert parallelism", 2, groups="expert", **EXPERTS)
_add("tensor, pipeline and data parallelism", 8, groups="tensor pipeline", ddp=_SHARDED, sequence_parallel=True)
