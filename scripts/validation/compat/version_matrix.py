"""Tries the package with each supported minor release of what it attaches to; prints a Markdown table.

    .venv/bin/python scripts/validation/compat/version_matrix.py                          # everything, about 8 minutes
    .venv/bin/python scripts/validation/compat/version_matrix.py --only lightning torch

Each release goes into a folder of its own in front of the environment's packages, without dependencies. A process of its own
then trains a small model twice from the same seeds, with and without the package attached. *ok* means that the losses of the
two are bit-identical, and that every metric equals that of the environment's own releases: counts and names exactly, others
to 1e-12. Of Transformer Engine, which needs a GPU to run, the sources are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from compat.probes import PROBES
from compat.releases import Case, cases
from compat.trials import Failed, NotTried, measure, try_release, try_transformer_engine


def row(case: Case, references: Mapping[str, Any]) -> str:
    """A line of the table; whatever goes wrong stands in it."""
    try:
        if case.package == "transformer-engine":
            result = try_transformer_engine(case)
        else:
            reference = references[case.package]
            if isinstance(reference, Failed):
                raise Failed(f"no reference: {reference}")
            result = try_release(case, reference)
    except NotTried as error:
        result = f"not tried: {error}"
    except Failed as error:
        result = f"failed: {error}"
    pinned = [requirement for requirement in case.beside if "==" in requirement]
    beside = f" (with {', '.join(pinned).replace('==', ' ')})" if pinned else ""
    print(f"{case.package} {case.version}: {result}", file=sys.stderr, flush=True)
    return f"| {case.package} | {case.version} | {result.replace('|', ', ')}{beside} |"


def reference_of(package: str) -> dict[str, Any] | Failed:
    """What the environment's own release measures, or why there is nothing."""
    try:
        return measure(package)
    except Failed as error:
        return error


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packages = list(dict.fromkeys(case.package for case in cases()))
    parser.add_argument("--only", nargs="+", choices=packages, default=packages)
    parser.add_argument("--jobs", type=int, default=2, help="releases that are tried at a time")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        probed = [package for package in arguments.only if package in PROBES]
        references = dict(zip(probed, pool.map(reference_of, probed), strict=True))
        wanted = [case for case in cases() if case.package in arguments.only]
        lines = list(pool.map(lambda case: row(case, references), wanted))
    print("| package | release | result |", "|---|---|---|", *lines, sep="\n")


if __name__ == "__main__":
    main()
