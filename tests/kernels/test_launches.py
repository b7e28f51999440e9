"""What a kernel is launched with, and which fields of an array that rests on."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numba import types
from numba.core.datamodel import default_manager

from nemo_fp8_debug.errors import FP8DebugWarning
from nemo_fp8_debug.kernels.cuda import launches
from nemo_fp8_debug.kernels.cuda.launches import _FIELDS, flatten_kernel_arguments
from nemo_fp8_debug.kernels.cuda.tile import CodeRounding
from nemo_fp8_debug.kernels.memory import DeviceMemory
from nemo_fp8_debug.numerics.formats import E4M3


def test_fields_of_an_array_are_those_of_numba() -> None:
    model = default_manager.lookup(types.Array(types.uint16, 1, "C"))
    assert [model.get_field_position(name) for name in _FIELDS] == list(range(model.field_count))


def test_an_array_is_seven_integers_and_a_tuple_its_elements() -> None:
    x, codes = torch.zeros(10, dtype=torch.int16), CodeRounding.from_format(E4M3)
    words = DeviceMemory(x, "u8", 2, 4)
    found = flatten_kernel_arguments([words, (3, 5), codes, 7])
    assert found == [0, 0, 2, 8, x.data_ptr() + 4, 2, 8, 3, 5, *codes, 7]
    assert [type(of) for of in found[9:14]] == [np.float32, np.float32, np.uint32, np.float32, np.float64]


def test_numba_is_told_the_same_memory() -> None:
    x = torch.zeros(10, dtype=torch.int16)
    words = DeviceMemory(x, "u8", 2, 4)
    told = words.__cuda_array_interface__
    assert (told["data"], told["shape"], np.dtype(told["typestr"]).itemsize) == (
        (words.address, False),
        (2,),
        words.itemsize,
    )


class Numba:
    """Stands for Numba's CUDA target and cuda.core, which need a device: tells fields and sizes, and notes who launches."""

    def __init__(self, fields: tuple[str, ...], sizes: list[int]) -> None:
        self.launched: list[Any] = []
        model = SimpleNamespace(field_count=len(fields), get_field_position=fields.index)
        kernel = SimpleNamespace(arguments_info=[SimpleNamespace(size=size) for size in sizes])
        library = SimpleNamespace(get_cufunc=lambda: SimpleNamespace(kernel=kernel))
        self.overloads = {"a signature": SimpleNamespace(_codelibrary=library)}
        self.targetctx = SimpleNamespace(data_model_manager=SimpleNamespace(lookup=lambda array: model))
        self.types, self.gpus, self.specialized = types, defaultdict(nullcontext), 0
        self.core = SimpleNamespace(
            Stream=SimpleNamespace(from_handle=lambda handle: ("stream", handle)),
            LaunchConfig=lambda **grid: grid,
            launch=lambda stream, grid, _, *numbers: self.launched.append(("cuda.core", stream, grid, numbers)),
        )

    def jit(self, function: object) -> Numba:
        return self

    def specialize(self, *arguments: object) -> Numba:
        self.specialized += 1
        return self

    def external_stream(self, handle: int) -> tuple[str, int]:
        return "stream", handle

    def __getitem__(self, grid: tuple[Any, ...]) -> Any:
        return lambda *arguments: self.launched.append(("Numba", grid, arguments))


def launched_twice(patch: pytest.MonkeyPatch, fields: tuple[str, ...], sizes: list[int]) -> tuple[Numba, DeviceMemory]:
    """A kernel of an array and a number, on stream 5 of the first device."""
    numba, x = Numba(fields, sizes), DeviceMemory(torch.zeros(4), "u4", 4)
    patch.setattr(launches, "cuda", numba)
    patch.setattr(launches, "_core", lambda: numba.core)
    patch.setattr(launches, "_device", lambda index: nullcontext())
    kernel = launches.CudaKernel(lambda: None)
    for _ in range(2):
        kernel.start((128, 32, launches.CudaStream(0, 5)), x, np.float32(3))
    launches._stream.cache_clear()
    launches._config.cache_clear()
    assert numba.specialized == 1
    return numba, x


def test_cuda_core_launches_what_is_laid_out_as_it_is_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    numba, x = launched_twice(monkeypatch, _FIELDS, [8] * 7 + [4])
    grid = {"grid": 128, "block": 32}
    assert numba.launched == 2 * [("cuda.core", ("stream", 5), grid, (0, 0, 4, 4, x.address, 4, 4, np.float32(3)))]


@pytest.mark.parametrize(
    ("fields", "sizes", "why"),
    [
        (_FIELDS[::-1], [8] * 7 + [4], "ValueError: unsupported layout of arrays in Numba"),
        ((*_FIELDS, "device"), [8] * 8 + [4], "ValueError: unsupported layout of arrays in Numba"),
        (_FIELDS, [8] * 8, "ValueError: unsupported sizes of its parameters"),
        (_FIELDS[1:], [8] * 6 + [4], "ValueError: unsupported layout of arrays in Numba"),
    ],
)
def test_numba_launches_what_is_laid_out_otherwise_and_that_is_said_once(
    fields: tuple[str, ...], sizes: list[int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(FP8DebugWarning) as said:
        numba, x = launched_twice(monkeypatch, fields, sizes)
    assert [str(of.message) for of in said] == [
        f"nemo_fp8_debug: Numba launches a kernel on cuda:0, which takes the host 0.1 ms each time ({why})"
    ]
    assert numba.launched == 2 * [("Numba", (128, 32, ("stream", 5)), (x, np.float32(3)))]
