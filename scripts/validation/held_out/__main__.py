"""Draws, trains and judges the held-out set: `python -m held_out draw --seed 1`.

`draw` prints the plan as JSON lines and trains nothing. `make FOLDER` trains what is not there yet. `judge FOLDER` asks
`diagnose` about each run and prints how often it was right. `count FOLDER ...` writes the numbers for the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m held_out", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw", help="print the plan as JSON lines")
    make = commands.add_parser("make", help="train the runs that are missing")
    judge = commands.add_parser("judge", help="ask diagnose about each run, and print how often it was right")
    count = commands.add_parser("count", help="write how often the verdicts of sets were right")
    count.add_argument("folders", type=Path, nargs="+")
    count.add_argument("--output", type=Path, default=Path(__file__).with_name("counts.json"))
    for one in (draw, make):
        one.add_argument("--seed", type=int, required=True, help="what the set is drawn from")
        one.add_argument("--clean", action="store_true", help="the clean runs of the set alone, to count false alarms")
        one.add_argument("--clean-alone", action="store_true", help="clean runs that need care, instead of the set")
    for one in (make, judge):
        one.add_argument("folder", type=Path)
        one.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    make.add_argument("--only", type=int, help="runs that are trained now, at most")
    judge.add_argument("--again", action="store_true", help="print the tables of the verdicts that are there")
    options = parser.parse_args()
    if options.command == "judge":
        from held_out.judge import judge_folder

        judge_folder(options.folder, options.jobs, options.again)
    elif options.command == "count":
        from held_out.judge import read_verdicts
        from held_out.scores import count_scores

        counts = count_scores(line for folder in options.folders for line in read_verdicts(folder))
        options.output.write_text(json.dumps(counts, indent=1) + "\n")
    elif options.command == "make":
        if options.clean_alone:
            from held_out.clean_alone import draw_care, make_care

            make_care(options.folder, draw_care(options.seed), options.only, options.jobs)
        else:
            from held_out.make import make_runs
            from held_out.plan import draw_plan

            runs = [run for run in draw_plan(options.seed) if not (options.clean and run.is_faulted)]
            make_runs(options.folder, runs, options.only, options.jobs)
    else:
        if options.clean_alone:
            from held_out.clean_alone import draw_care as draw_runs
        else:
            from held_out.plan import draw_plan as draw_runs
        for run in draw_runs(options.seed):
            print(json.dumps(run.describe()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
