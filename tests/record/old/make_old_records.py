"""The records of tests/record/old: python make_old_records.py FOLDER, with the release that is to write them.

Three runs of a small GPT: a good one in emulated FP8, one whose learning rate jumps at step 60, and that one in float32.
"""

from __future__ import annotations

import sys
from contextlib import closing

import torch
from plain_loop import GPT
from text_windows import TextWindows
from torch import nn
from torch.utils.data import DataLoader

from nemo_fp8_debug import Monitor
from nemo_fp8_debug.interventions.emulate import Emulation

try:
    from nemo_fp8_debug.capture.gemms import find_gemms, require_matching_gemms
    from nemo_fp8_debug.numerics.recipe import parse_recipe

    NEW = {"output_rows": 16}
except ImportError:
    from nemo_fp8_debug.capture.layers import find_gemms
    from nemo_fp8_debug.numerics.scaling import parse_recipe

    NEW = {}

STEPS, INTERVAL, FAULT = 120, 10, 60


def train(output: str, faulty: bool, fp8: bool) -> None:
    torch.manual_seed(0)
    model = GPT(layers=2 if NEW else 1, width=32).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = DataLoader(TextWindows(4 * STEPS, 32), batch_size=4)
    emulation = Emulation(
        require_matching_gemms(find_gemms([model]), ["layers.*"]), parse_recipe("delayed(amax_history_len=16)")
    )
    if fp8:
        emulation.attach()
    options = {"table_rows": 0, "weigh": ["current-e5m2"], "triggers": ["loss_spike"], "trigger_steps": 1} | NEW
    with closing(Monitor(model, output, interval=INTERVAL, **options)) as monitor:
        for step, batch in enumerate(data):
            if faulty and step == FAULT:
                for group in optimizer.param_groups:
                    group["lr"] = 0.1
            with monitor.step(step) as report:
                loss = nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if fp8:
                    emulation.end_step()
                report(loss=loss, grad_norm=norm, lr=optimizer.param_groups[0]["lr"])


folder = sys.argv[1]
train(f"{folder}/good", False, True)
train(f"{folder}/bad", True, True)
train(f"{folder}/twin", True, False)
