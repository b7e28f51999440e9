"""Runs as Python starts, with this folder on PYTHONPATH: once torch is imported, `bf16_matmul.install()` follows."""

import gc
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
# To import NeMo makes millions of objects that stay; a fifth of the time would go into looking for garbage among them.
gc.set_threshold(50_000, 20, 100)
