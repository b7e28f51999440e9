"""Shared by all tests: a single-process gloo group and Megatron's parallel state, for real megatron-core modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch: megatron-core compiles small fusions, which takes longer than these tests.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest
import torch

_here = Path(__file__).parent
_root = _here.parent
_helpers = _here, _here / "hosts", _here / "interventions", _root / "recipes", _root / "scripts/truth"
sys.path[:0] = [str(p) for p in _helpers]

#: files that take longest come first, so that no worker is left with one in the end
_longest = (
    *("test_demo", "distributed/test_megatron_layouts", "te/test_te", "distributed/test_fsdp", "distributed/test_deepspeed"),
    *("distributed/test_faults", "callback/test_nemo", "te/test_bridge", "te/test_recommended_recipes", "callback/test_ddp"),
    *("monitor/test_experts", "monitor/test_ranks", "adapters/test_transformers", "adapters/test_loops"),
    "te/test_bench_gpu_step",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {_here / f"{name}.py": place for place, name in enumerate(_longest)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron-core set up for one process on a CPU."""
    from megatron.core import parallel_state
    from megatron_on_cpu import megatron_on_cpu

    store = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
