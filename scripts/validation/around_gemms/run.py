"""Runs of several families, clean and with a fault beside operands, and what `diagnose` says of them.

`PYTHONPATH=scripts/validation OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 .venv/bin/python -m around_gemms.run
[--families llama moe gpt vit]`. Each run is judged alone, and with the clean run of another seed as its baseline. A clean
run must not be accused by a rule about what lies between GEMMs, and the rule of a fault must name it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from fault_injection.families import family
from fault_injection.run_part import surroundings

from around_gemms.faults import FAULTS, ONSET, RULE_OF
from nemo_fp8_debug import Emulation, Monitor, diagnose
from nemo_fp8_debug.analysis.diagnosis.diagnosis import Diagnosis
from nemo_fp8_debug.core.keys import STATES

STEPS, WARM_UP, INTERVAL, SEEDS = 120, 20, 4, (0, 1)


def train(folder: Path, name: str, seed: int, fault: str | None) -> bool:
    """A recorded run, emulated in FP8; returns whether it could have the fault."""
    of = family(name)
    model = of.build(seed, of.depth, "delayed")
    model = model if name == "gpt" else model.float()  # Megatron's attention computes in BF16
    act = FAULTS[fault](model) if fault else None
    if fault and act is None:
        return False
    emulation = Emulation(model, "delayed", list(of.layers))
    emulation.attach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=of.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    options = {"states": tuple(STATES), "activations": ("norm", "router", "attention")}
    monitor = Monitor(model, str(folder), interval=INTERVAL, table_rows=0, **options)
    for step in range(STEPS):
        if act is not None:
            act(step, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = of.learning_rate * min(1.0, (step + 1) / WARM_UP) * group.get("times", 1.0)
        with monitor.step(step) as report:
            loss = of.loss(model, of.draw(seed, step), True)
            loss.backward()
            emulation.end_step()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report(loss=float(loss.detach()), lr=optimizer.param_groups[0]["lr"], grad_norm=float(norm))
        optimizer.zero_grad()
        if not torch.isfinite(loss):
            break
    monitor.close()
    emulation.detach()
    return True


def told(found: Diagnosis, fault: str | None) -> str:
    """What rules about activations and steps of weights say, in a line."""
    rules = [f"{f.rule} from {f.since} ({f.layer})" for f in found.findings if f.rule in RULE_OF.values()]
    known = next((f for f in found.findings if fault and f.rule == RULE_OF[fault]), None)
    verdict = f"{found.harm}, {found.cause}"
    if fault is None:
        return f"{'accused' if rules else 'clean'}: {'; '.join(rules) or '-'} [{verdict}]"
    late = "" if known is None or known.since is None else f", {known.since - ONSET} steps after its onset"
    return f"{'named' if known else 'MISSED'}{late}: {'; '.join(rules) or '-'} [{verdict}]"


def judge(name: str, folder: Path) -> None:
    """Train the runs of a family, and print what is said of them."""
    clean = [Path(folder, f"clean-{seed}") for seed in SEEDS]
    for seed, path in zip(SEEDS, clean, strict=True):
        train(path, name, seed, None)
    for i, path in enumerate(clean):
        print(f"{name}, seed {SEEDS[i]}: alone {told(diagnose(path), None)}", flush=True)
        print(f"{name}, seed {SEEDS[i]}: paired {told(diagnose(path, clean[i - 1]), None)}", flush=True)
    for fault in FAULTS:
        path = Path(folder, fault)
        if train(path, name, SEEDS[0], fault):
            print(f"{name}, {fault}: alone {told(diagnose(path), fault)}", flush=True)
            print(f"{name}, {fault}: paired {told(diagnose(path, clean[1]), fault)}", flush=True)


def main(families: Sequence[str]) -> None:
    for name in families:
        with tempfile.TemporaryDirectory() as folder, surroundings(name):
            judge(name, Path(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["llama", "moe", "gpt", "vit"])
    main(parser.parse_args().families)
