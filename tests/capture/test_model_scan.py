"""The one scan of a model against torch's own walks, over models whose modules are shared at random."""

from __future__ import annotations

import random

import pytest
from torch import nn

from nemo_fp8_debug.capture.scan import list_inner_module_ids, scan_modules


def random_model(seed: int) -> nn.Module:
    """Return modules that hold earlier ones and None, some of which torch.compile runs."""
    rng = random.Random(seed)
    made: list[nn.Module] = [nn.Linear(2, 2)]
    for _ in range(30):
        module = nn.Module()
        for key in rng.sample("abcdef", rng.randint(0, 4)):
            module.add_module(key, rng.choice([*made, None]))
        if rng.random() < 0.1:
            module._compiled_call_impl = lambda *args: None  # as nn.Module.compile leaves it
        made.append(module)
    return nn.ModuleList(made[-4:])


@pytest.mark.parametrize("seed", range(20))
def test_finds_what_torch_walks_through(seed: int) -> None:
    roots = [random_model(seed), random_model(seed + 100)]
    scanned = scan_modules([*roots, roots[0][0]])
    expected = [(root, path, module) for root in [*roots, roots[0][0]] for path, module in root.named_modules()]
    assert [(one.root, one.path_in_root, one.module) for one in scanned] == expected
    running = {inner for root in roots for m in root.modules() if m._compiled_call_impl for inner in m.modules()}
    assert {one.module for one in scanned if one.compiled} == running
    for one in scanned:
        paths = [one.path_in_root.rsplit(".", cut)[0] for cut in range(1, one.path_in_root.count(".") + 1)]
        around = [*(one.root.get_submodule(path) for path in paths), *([one.root] if one.path_in_root else [])]
        assert one.enclosing_modules == around
        assert list_inner_module_ids(one.module) == {id(m) for m in one.module.modules() if m is not one.module}
