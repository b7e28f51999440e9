"""Imports the Python of Transformer Engine on a machine without a GPU.

Transformer Engine calls its kernels through one compiled module, `transformer_engine_torch`. A Python module takes its
place: the enums are the real ones (enums.json: the names of transformer_engine/common/util/pybind_helper.h, the values of
the headers in transformer_engine/common/include), the functions are registered by `kernel`.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch._dynamo  # requests for triton, and must not find the stand-in

CPU = torch.device("cpu")
F = TypeVar("F", bound=Callable[..., Any])


class Extension(ModuleType):
    """`transformer_engine_torch`: what is not emulated can be named, but not called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def later(*args: Any, **kwargs: Any) -> Any:
            if (function := vars(self)[name]) is later:
                raise NotImplementedError(f"transformer_engine_torch.{name} is not emulated")
            return function(*args, **kwargs)

        value = type(name, (), {}) if name[0].isupper() else later
        setattr(self, name, value)
        return value


extension = Extension("transformer_engine_torch")


def kernel(function: F) -> F:
    """Makes a function one of the extension's."""
    add_kernel(function.__name__, function)
    return function


def add_kernel(name: str, function: Callable[..., Any]) -> None:
    setattr(extension, name, function)
    # Transformer Engine has copied the extension's names to here.
    setattr(sys.modules["transformer_engine.pytorch.cpp_extensions"], name, function)


class _Anything:
    """Stands for whatever a package holds that is imported and never used."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self  # a decorator, or one's factory

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> _Anything:
        return self

    def __or__(self, other: Any) -> _Anything:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


#: imported by Transformer Engine for kernels and exports that a CPU has no use for
UNUSED = ("triton", "onnxscript", "onnx_ir")


class _Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that are imported and not used."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def holds(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self.packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self.holds(fullname):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__version__ = "3.5.0"  # type: ignore[attr-defined]
        module.__getattr__ = functools.partial(getattr, _Anything())  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def unused_packages(*names: str) -> Iterator[None]:
    """Only for the time of the import: whoever requests for triton later is told that there is none."""
    finder = _Unused(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.holds(name)]:
            del sys.modules[name]


FACTORIES = "tensor empty zeros ones full eye arange rand randn randint as_tensor empty_like zeros_like ones_like full_like"


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, on the CPU where it was asked for a GPU, by name or by number."""

    def is_gpu(device: Any) -> bool:
        return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **({**kwargs, "device": CPU} if is_gpu(kwargs.get("device")) else kwargs))

    return run


def _asked_by_te() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("transformer_engine.")


def _tell_te(owner: Any, name: str, answer: Any) -> None:
    """Answers Transformer Engine so; everyone else in the process gets torch's own answer."""
    real = getattr(owner, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        return answer if _asked_by_te() else real(*args, **kwargs)

    setattr(owner, name, functools.wraps(real)(function))


class Hopper:
    """The device properties that Transformer Engine reads: FP8 GEMMs in TN layout only, so transposes are made."""

    major, minor, multi_processor_count, name = 9, 0, 132, "emulated"


def pretend_a_gpu() -> None:
    """What Transformer Engine requests torch about the GPU."""
    _tell_te(torch.cuda, "is_available", True)
    _tell_te(torch.cuda, "current_device", 0)
    _tell_te(torch.cuda, "get_device_capability", (Hopper.major, Hopper.minor))
    _tell_te(torch.cuda, "get_device_properties", Hopper)
    _tell_te(torch.cuda, "is_current_stream_capturing", False)
    _tell_te(torch.cuda, "synchronize", None)
    _tell_te(torch.cuda.nvtx, "range_push", 0)
    _tell_te(torch.cuda.nvtx, "range_pop", 0)
    is_cuda: Any = torch.Tensor.is_cuda
    torch.Tensor.is_cuda = property(lambda self: _asked_by_te() or is_cuda.__get__(self))  # type: ignore[assignment]
    cuda = torch.Tensor.cuda
    torch.Tensor.cuda = lambda self, *a, **k: self if _asked_by_te() else cuda(self, *a, **k)  # type: ignore[method-assign]
    for name in FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]


def import_te() -> ModuleType:
    """`transformer_engine.pytorch`, with its package as it is."""
    for name, members in json.loads((Path(__file__).parent / "enums.json").read_text()).items():
        setattr(extension, name, enum.IntEnum(name, members))
    sys.modules[extension.__name__] = extension
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.loader is None:
        raise ImportError("transformer_engine is not on the path; scripts/setup.sh tests puts it into .venv/te")
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    building = os.environ.get("NVTE_PROJECT_BUILDING")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # else it looks for its libraries
    try:
        with unused_packages(*UNUSED):
            common: Any = importlib.import_module("transformer_engine.common")
            common.load_framework_extension = lambda framework: None
            spec.loader.exec_module(package)
            te = importlib.import_module("transformer_engine.pytorch")  # where the package swallows errors
    finally:
        os.environ.pop("NVTE_PROJECT_BUILDING")
        if building is not None:
            os.environ["NVTE_PROJECT_BUILDING"] = building
    distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._lazy_init = lambda: None
    distributed._lazy_call = lambda callback: callback()
    # Kernels of all recipes are emulated, though on a Hopper not all of them run.
    quantization: Any = importlib.import_module("transformer_engine.pytorch.quantization")
    for kind in ("FP8", "MXFP8", "NVFP4", "FP8_BLOCK_SCALING"):
        setattr(quantization, f"_{kind}_SUPPORT", (True, ""))
    torch.cuda.default_generators = (torch.default_generator,)
    return te
