"""Compares two long records here and on clusters of Ray and of Dask with one and two workers of one thread each: what is
told must be the same, and two workers must be faster. How much faster they can be is what two processes that share nothing
come to, each of which does all of the work with one thread, beside one that is alone. Each time begins with the records out
of memory. Clusters are asked several times in turn, and the fastest counts: whatever else the machine does only takes time.
Results, by how long the records are: clusters.json.

    .venv/bin/python scripts/validation/clusters.py [--layers 58] [--experts 256] [--steps 300] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

from benchmarks.large_records import drop_from_memory, write_both

from nemo_fp8_debug.analysis.comparison.compare import compare
from nemo_fp8_debug.analysis.diagnosis.diagnose import diagnose_comparison
from nemo_fp8_debug.analysis.runs.cluster import DASK, on_cluster
from nemo_fp8_debug.analysis.story.story import story
from nemo_fp8_debug.analysis.story.summary import serialize_comparison
from nemo_fp8_debug.core.threads import limit_cores

RESULTS = Path(__file__).with_suffix(".json")


@contextlib.contextmanager
def ray_of(workers: int) -> Iterator[str]:
    """Ray with so many workers, on this machine."""
    import ray

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        yield "ray"
    finally:
        ray.shutdown()


@contextlib.contextmanager
def dask_of(workers: int) -> Iterator[str]:
    """Dask with so many workers of a thread each, on this machine, as the package starts one."""
    import dask
    from distributed import LocalCluster

    with dask.config.set(DASK), LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


def timed(folder: Path, address: str | None) -> tuple[float, str]:
    """Seconds that compare and diagnose take, and a digest of all that they tell."""
    drop_from_memory(folder)
    with on_cluster(address):
        began = time.perf_counter()
        found = diagnose_comparison(compare(folder / "bad", folder / "baseline"))
        assert found.comparison is not None
        told = [serialize_comparison(found.comparison), found.to_json(), story(found)]
        seconds = time.perf_counter() - began
    return round(seconds, 1), hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()


def of_processes(folder: Path, processes: int) -> float:
    """Seconds that some processes at once take to do all of the work, each alone with one thread."""
    drop_from_memory(folder)
    with get_context("spawn").Pool(processes) as pool:
        return max(pool.map(_with_one_thread, [folder] * processes, chunksize=1))


def _with_one_thread(folder: Path) -> float:
    with limit_cores(1):
        return timed(folder, None)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--times", type=int, default=2, help="that clusters are asked; the fastest counts")
    parser.add_argument("--folder", type=Path, help="where the records are, or are written; they are left there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        write_both(folder, options.layers, options.experts, options.steps)
        here = timed(folder, None)
        found: dict[str, Any] = {"rows": 9 * options.layers * (options.experts + 1) * options.steps, "here": here[0]}
        alone, two = of_processes(folder, 1), of_processes(folder, 2)
        found["processes"] = {"one": alone, "two_at_once": two, "times_faster": round(2 * alone / two, 2)}
        print("processes", found["processes"], flush=True)
        for name, start in (("ray", ray_of), ("dask", dask_of)):
            seconds: dict[int, list[float]] = {1: [], 2: []}
            for workers in (1, 2) * options.times:
                with start(workers) as address:
                    took, digest = timed(folder, address)
                assert digest == here[1], f"{name} with {workers} workers tells something else"
                seconds[workers].append(took)
                print(name, workers, took, flush=True)
            fastest = {n: min(each) for n, each in seconds.items()}
            found[name] = {
                **{f"workers_{n}": fastest[n] for n in fastest},
                "times_faster": round(fastest[1] / fastest[2], 2),
                "all": {f"workers_{n}": each for n, each in seconds.items()},
            }
            print(name, found[name], flush=True)
    others = [each for each in json.loads(RESULTS.read_text()) if each["rows"] != found["rows"]]
    RESULTS.write_text(json.dumps(sorted([*others, found], key=lambda each: each["rows"]), indent=1) + "\n")


if __name__ == "__main__":
    main()
