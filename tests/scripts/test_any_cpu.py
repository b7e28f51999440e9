"""On a CPU without BF16 instructions the demo and the tests multiply BF16 through float32; nothing else ever does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import finished

ROOT = Path(__file__).parents[2]
ANY_CPU = ROOT / "scripts" / "any_cpu"
#: what a process needs to import what is tested, less what test.sh adds
PLAIN = os.pathsep.join(
    path for path in (str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)) if path != str(ANY_CPU)
)
SIMULATED = {"ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "SIMULATE_CPU": "avx2"}

PRODUCTS = """
import torch
assert not torch.backends.mkldnn.enabled and torch.backends.cpu.get_cpu_capability() == "AVX2"
a, b, c = (torch.randn(3, 16, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
x, y, z = (t.detach().float().requires_grad_() for t in (a, b, c))
products = {
    "mm": lambda a, b, c: a[0] @ b[0],
    "bmm": lambda a, b, c: a @ b,
    "addmm": lambda a, b, c: torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
    "linear": lambda a, b, c: torch.nn.functional.linear(a, b[0], c[0, 0]),
}
for name, product in products.items():
    low, high = product(a, b, c), product(x, y, z)
    assert low.dtype == torch.bfloat16 and torch.equal(low, high.bfloat16()), name
    gradient = torch.randn_like(low)
    wanted = torch.autograd.grad(high, (x, y), gradient.float())
    for found, want in zip(torch.autograd.grad(low, (a, b), gradient), wanted):
        assert torch.equal(found, want.bfloat16()), name
assert torch.equal(torch.mm(x[0], y[0]), torch.addmm(torch.zeros(1), x[0], y[0], beta=0))
"""

LOSSES = """
import sys, torch
if "import the package" in sys.argv:
    import nemo_fp8_debug.adapters.lightning.callback, nemo_fp8_debug.cli.explain, nemo_fp8_debug.monitor.monitor
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.GELU(), torch.nn.Linear(96, 48)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for _ in range(20):
    x = torch.randn(64, 48).bfloat16()
    loss = (model(x) - x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
print([torch._C._dispatch_dump(f"aten::{name}") for name in ("mm", "bmm", "addmm", "baddbmm")])
"""


def simulated(**environment: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ANY_CPU), PLAIN])} | environment


def test_products_are_those_of_float32_rounded_once() -> None:
    done = finished(sys.executable, "-W", "ignore", "-c", PRODUCTS, env=simulated(**SIMULATED))
    assert done.returncode == 0, done.stderr


# Long tests rest on scripts/any_cpu/*.py.
@pytest.mark.long
def test_a_users_losses_and_products_are_the_same_with_the_package_imported() -> None:
    plain, imported = (
        finished(sys.executable, "-W", "ignore", "-c", LOSSES, *arguments, env=os.environ | {"PYTHONPATH": PLAIN})
        for arguments in ((), ("import the package",))
    )
    assert plain.returncode == imported.returncode == 0, imported.stderr
    assert len(plain.stdout.splitlines()) == 21 and plain.stdout == imported.stdout
    assert "bf16_matmul" not in plain.stdout


def test_only_the_two_scripts_switch_it_on() -> None:
    words = ["any_cpu", "bf16_matmul", "SIMULATE_CPU", "allow_override"]
    named = [flag for word in words for flag in ("-e", word)]
    found = finished(
        "git", "grep", "-lF", *named, "--", "nemo_fp8_debug", "recipes", "scripts", ":!*.json", cwd=ROOT
    ).stdout.splitlines()
    assert {"scripts/demo.sh", "scripts/test.sh"} == {path for path in found if not path.startswith("scripts/any_cpu/")}


def test_one_variable_of_the_scripts_simulates_such_a_cpu() -> None:
    script = f"cd {ROOT}; source scripts/any_cpu/environment.sh; env"
    shown = finished("bash", "-euc", script, env=os.environ | {"SIMULATE_CPU": "avx2"}).stdout.splitlines()
    assert {f"{name}={value}" for name, value in SIMULATED.items()} <= set(shown)
    refused = finished("bash", "-euc", script, env=os.environ | {"SIMULATE_CPU": "sse2"})
    assert refused.returncode == 2
    assert refused.stderr == "SIMULATE_CPU is 'sse2'; the only CPU that can be simulated is avx2\n"
