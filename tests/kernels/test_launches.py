"""What a kernel is launched with, and which fields of an array that rests on."""

from __future__ import annotations

import numpy as np
import torch
from numba import types
from numba.core.datamodel import default_manager

from nemo_fp8_debug.kernels.cuda.format_constants import Codes
from nemo_fp8_debug.kernels.cuda.launches import _FIELDS, parameters
from nemo_fp8_debug.kernels.memory import DeviceMemory
from nemo_fp8_debug.numerics.formats import E4M3


def test_fields_of_an_array_are_those_of_numba() -> None:
    model = default_manager.lookup(types.Array(types.uint16, 1, "C"))
    assert [model.get_field_position(name) for name in _FIELDS] == list(range(model.field_count))


def test_an_array_is_seven_integers_and_a_tuple_its_elements() -> None:
    x, codes = torch.zeros(10, dtype=torch.int16), Codes.of(E4M3)
    words = DeviceMemory(x, "u8", 2, 4)
    found = parameters([words, (3, 5), codes, 7])
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
