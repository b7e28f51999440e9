"""Train the bug reports, or judge what `diagnose` says of them.

PYTHONPATH=scripts/validation OMP_NUM_THREADS=1 .venv/bin/python -m bug_reports make FOLDER [--only NAME ...] [--new]
PYTHONPATH=scripts/validation OMP_NUM_THREADS=1 .venv/bin/python -m bug_reports judge FOLDER [--only NAME ...] [--output F]
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path

import torch

from bug_reports.judging import describe_scores, describe_sentences, judge_runs, list_judged
from bug_reports.report import Report, list_reports
from bug_reports.runs import make_runs


def choose_reports(options: argparse.Namespace) -> list[Report]:
    """Return the reports that the command line names."""
    reports = list_reports()
    if unknown := set(options.only or ()) - set(reports):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(reports))}")
    chosen = [report for name, report in reports.items() if not options.only or name in options.only]
    if options.new:
        chosen = [report for report in chosen if report.new]
    if options.handed:
        chosen = [report for report in chosen if not report.new]
    if options.drawn:
        return [report for report in chosen if report.drawn]
    hidden = options.command == "judge" and not options.all  # nobody looks at these while rules are changed
    return [report for report in chosen if not (hidden and report.drawn)]


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="bug_reports", description=__doc__)
    parser.add_argument("command", choices=["make", "judge"])
    parser.add_argument("folder", type=Path, help="where the runs lie")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these reports")
    parser.add_argument("--new", action="store_true", help="only reports that were found for this benchmark")
    parser.add_argument("--handed", action="store_true", help="only reports that were handed over")
    parser.add_argument("--drawn", action="store_true", help="only the drawn reports, which judge leaves out otherwise")
    parser.add_argument("--all", action="store_true", help="judge the drawn reports with all others")
    parser.add_argument("--keep", action="store_true", help="keep what make measures in measured.json")
    parser.add_argument("--output", type=Path, help="for what is said of each, such as said.json beside this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    chosen = choose_reports(options)
    if options.command == "make":
        make_runs(chosen, options.folder, options.keep)
        return
    judged = judge_runs(chosen, options.folder)
    print(f"{describe_scores(judged)}\n{describe_sentences(judged)}")
    if options.output:
        options.output.write_text(json.dumps(list_judged(judged), indent=1) + "\n")


if __name__ == "__main__":
    main()
