"""Accuses each clean run with each other clean run of its part as baseline that differs in seed or depth:
`fault_injection/clean_pairs.py --set tune`. More pairs than `judge` takes, of the same runs."""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from fault_injection.judge import Judged, Truth, share
from fault_injection.records import read_run, truths
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose


def pairs(told: Sequence[Truth]) -> list[Judged]:
    """What is said of each clean run of a part with each of the others, but for the one that is 2^-9 apart."""
    runs = {one["name"]: read_run(one) for one in told}
    found = []
    for one in told:
        for other in told:
            seeds = one["seed"], other["seed"]
            if seeds[0] == seeds[1]:
                continue
            said = diagnose(runs[one["name"]], runs[other["name"]])
            culprit = (said.culprit.layer or "", said.culprit.role or "") if said.culprit else None
            kind = "other" if one["depth"] == other["depth"] else "depth"
            found.append(Judged(one, kind, 5, said.harm, said.cause, culprit, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("tune", "held-out"), default="tune")
    by_part: dict[str, list[Truth]] = defaultdict(list)
    for told in truths(parser.parse_args().set):
        if told["kind"] == "none":
            by_part[told["part"]].append(told)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [one for of_part in pool.map(pairs, by_part.values()) for one in of_part]
    for kind in ("other", "depth"):
        here = [one for one in found if one.baseline == kind]
        print(f"{kind}: accused in {share([one.accused for one in here])} of pairs")


if __name__ == "__main__":
    main()
