"""Shared by all tests: a single-process gloo group and Megatron's parallel state, for real megatron-core modules."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before torch: megatron-core compiles small fusions, which takes longer than these tests.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Tests share two cores, where threads of torch's that wait by spinning keep others from working.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell has what it starts in the background ignore Ctrl+C, and so would every process that tests start and end with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# pytest-xdist sets it to 80, which commands obey.
os.environ.pop("COLUMNS", None)

import hypothesis
import pytest
import torch
from long import leave_out
from processes import GUARD

# No test is about the speed of the machine that it runs on.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

_here = Path(__file__).parent
#: files that take longest come first, so that no worker is left with one in the end
_longest = (
    *("distributed/test_network_faults", "scripts/test_demo", "distributed/test_megatron_layouts", "te/test_gpu_parts"),
    *("te/test_te", "docs/test_page_blocks", "tensorboard_plugin/test_headline", "tensorboard_plugin/test_page_files"),
    *("tensorboard_plugin/test_runs_table", "record/test_torture", "tensorboard_plugin/test_map"),
    *("distributed/test_fsdp", "distributed/test_faults", "distributed/test_deepspeed", "tensorboard_plugin/test_verdict"),
    *("tensorboard_plugin/test_timeline", "tensorboard_plugin/test_distribution", "cli/test_terminal"),
    *("distributed/test_states_of_ranks", "tensorboard_plugin/test_what_if"),
    *("analysis/test_diagnose", "tensorboard_plugin/test_jobs", "record/test_loggers", "analysis/test_around_gemms"),
    *("test_gpu_command", "adapters/test_loops", "adapters/test_transformers", "record/test_recording"),
    *("adapters/lightning/test_nemo", "tensorboard_plugin/test_colors", "adapters/lightning/test_ddp"),
    *(
        "setup/test_setup",
        "adapters/lightning/test_rescue",
        "analysis/test_replay_dumps",
        "tensorboard_plugin/test_accessibility",
    ),
    *("monitor/test_monitor", "numerics/test_block_sums", "numerics/test_blocks", "analysis/test_truth"),
    *("te/test_bridge", "monitor/test_experts", "analysis/test_bands", "fuzz/test_targets"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run what takes long, whose results are committed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {_here / f"{name}.py": place for place, name in enumerate(_longest)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    leave_out(config, items)


def pytest_collection_finish() -> None:
    gc.freeze()  # or each collection, which trainers ask for at every end, would go through the objects of all modules


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_fp8_debug.monitor import recorder_queue

    monkeypatch.setattr(recorder_queue, "PATIENCE", GUARD)


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
