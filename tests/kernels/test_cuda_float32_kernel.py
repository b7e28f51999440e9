"""The kernels of float32 tensors on CUDA devices, without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_script


# Long tests rest on nemo_fp8_debug/kernels/**/*.py.
# Long tests rest on nemo_fp8_debug/numerics/*.py.
@pytest.mark.long
def test_they_measure_float32_as_plain_torch_does() -> None:
    script = Path(__file__).with_name("cuda_float32_kernel.py")
    assert run_script(script, NUMBA_ENABLE_CUDASIM="1", TORCHDYNAMO_DISABLE="1") == "measured\n"
