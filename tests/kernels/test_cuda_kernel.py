"""The kernel of CUDA devices, without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_script
from tensors import counted

from nemo_fp8_debug import FP8DebugWarning, kernels
from nemo_fp8_debug.kernels import torch_fallback
from nemo_fp8_debug.numerics.histogram import BINS


# Long tests rest on nemo_fp8_debug/kernels/**/*.py.
# Long tests rest on nemo_fp8_debug/numerics/*.py.
@pytest.mark.long
def test_it_counts_as_numpy_and_the_cpu_kernel_do() -> None:
    script = Path(__file__).with_name("cuda_kernel.py")
    assert run_script(script, NUMBA_ENABLE_CUDASIM="1", TORCHDYNAMO_DISABLE="1") == "counted\n"


@pytest.mark.parametrize(
    ("kernel", "done"),
    [("histogram", "counted"), ("blocks", "measured in blocks"), ("float32", "measured in float32")],
)
def test_where_numba_cannot_use_the_device_one_warning_says_so(
    kernel: str, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch is told that it is built for CUDA 12; there is no device all the same."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    kernels._kernel_on.cache_clear()
    try:
        with pytest.warns(FP8DebugWarning, match=rf"{done} by plain torch operations.*nemo_fp8_debug\[cuda12\]") as told:
            found = [kernels._kernel_on(torch.device("cuda", 0), kernel) for _ in range(3)]
        assert found == [None] * 3
        assert len(told) == 1
    finally:
        kernels._kernel_on.cache_clear()


def test_on_a_device_that_has_no_kernels_plain_torch_counts() -> None:
    x, counts = torch.randn(1000).bfloat16(), torch.zeros(BINS, dtype=torch.int64)
    torch_fallback.count_bit_patterns(x.view(torch.int16), counts)
    assert counts.tolist() == counted(x).tolist()
