"""torchtitan's trainer on a CPU, each case with and without a monitor; writes results.json beside this file."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from . import shim

shim.install()

from nvfp4_on_cpu import on_cpu  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402
from torchtitan_trainer import MonitoredTrainer  # noqa: E402

from nemo_fp8_debug.coverage.scan import ledger_of  # noqa: E402
from nemo_fp8_debug.record.reader import find_record, read_table_rows  # noqa: E402

from .adapters import of_peft  # noqa: E402
from .casts import Casts  # noqa: E402
from .model import CONVERTERS, FORWARD, config_of  # noqa: E402

RESULTS = Path(__file__).with_name("results.json")
PACKAGES = ("torchtitan", "torch", "torchao", "peft", "transformers")
SAMPLED = 2


def trained(case: str, folder: str, monitored: bool) -> dict[str, Any]:
    """Losses, weights, and what a sampled step cast."""
    config, losses = config_of(case, folder), []
    options: dict[str, Any] = {"interval": SAMPLED, "table_rows": 0, "on_error": "raise"} if monitored else {}
    trainer = (MonitoredTrainer if monitored else Trainer)(config, **options)
    model = torch.nn.ModuleList(trainer.model_parts)
    prepare(case, model)
    body = trainer.fwd_bwd_fn

    def noted(*args: Any) -> torch.Tensor:
        losses.append(body(*args))
        return losses[-1]

    trainer.fwd_bwd_fn = noted
    found = {"ledger": ledger_of([model]).forward()}
    if monitored:
        found |= {"casts": step_with_casts(trainer, model)}
    trainer.train()
    weights = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    trainer.close()
    return found | {"losses": [loss.item() for loss in losses], "weights": weights}


def prepare(case: str, model: torch.nn.Module) -> None:
    """torchtitan builds MXFP8 layers for kernels of Blackwell only."""
    if case == "mxfp8, emulated":
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        for module in model.modules():
            if "MXFP8Linear" in type(module).__name__:
                module.kernel_preference = KernelPreference.EMULATED


def step_with_casts(trainer: Any, model: torch.nn.Module) -> Casts:
    """Casts of the sampled step, once it has run."""
    step, casts = trainer.train_step, Casts(model)

    def watched(data: Any) -> None:
        with casts if trainer.step == SAMPLED else nullcontext():
            step(data)
        if trainer.step == SAMPLED:
            casts.remove()

    trainer.train_step = watched
    return casts


def reported(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    rows = read_table_rows(find_record(Path(folder) / "fp8_debug"), "metrics").iter_rows(named=True)
    return {(row["layer"], row["role"]): row for row in rows}


def compared(rows: dict[tuple[str, str], dict[str, Any]], casts: Casts) -> dict[str, Any]:
    """Rows beside what was multiplied: the largest difference of a relative error."""
    apart, kinds = 0.0, set()
    for key, sums in casts.errors.items():
        error, row = float((sums[0] / sums[1]).sqrt()), rows[key]
        apart = max(apart, abs(row["relative_error"] - error) / error)
        kinds |= casts.scales[key]
    return {"operands": len(casts.errors), "cast": sorted(kinds), "largest difference of relative errors": apart}


def of_case(case: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, on_cpu() if "nvfp4" in case else nullcontext():
        alone = trained(case, folder + "/alone", False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            watched = trained(case, folder + "/watched", True)
        rows = reported(folder + "/watched")
    told = sorted({f"{row['role']}: {row['scale_source']}, {row['recipe']}, {row['format']}" for row in rows.values()})
    same = watched["losses"] == alone["losses"] and all(map(torch.equal, alone["weights"], watched["weights"]))
    ours = [str(w.message) for w in said if "nemo_fp8_debug" in str(w.category)]
    return {
        "losses and weights bit-identical": same,
        "losses": len(alone["losses"]),
        "layers": len({layer for layer, _ in rows}),
        "reported": told,
        "warnings": ours,
        "multiplied": compared(rows, watched["casts"]),
        "ledger over formula": watched["ledger"] / FORWARD,
    }


def main() -> int:
    """With names of cases: only these, printed and not written."""
    only = sys.argv[1:]
    cases: dict[str, Any] = {}
    for case in only or CONVERTERS:
        cases[case] = of_case(case)
        print(json.dumps({case: cases[case]}), flush=True)
    if not only:
        results = {
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
            "cases": cases,
            "adapters": of_peft(),
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
