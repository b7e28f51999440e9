"""Runs as Python starts, with this folder on PYTHONPATH: once torch is imported, `bf16_matmul.install()` follows."""

import importlib.abc
import importlib.util
import sys


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as everybody else does, and adds to its execution."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                import bf16_matmul

                bf16_matmul.install()

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _TorchFinder())
