"""Under sequence parallelism ranks cast with one amax: what is reported is the scale of all, and not that of a shard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from processes import found_in, run_script

WORKER = Path(__file__).with_name("sequence_parallel.py")
VALIDATION = Path(__file__).parents[2] / "scripts/validation"


def test_scales_are_those_that_ranks_share(tmp_path: Path) -> None:
    paths = found_in(Path(sys.prefix) / "te", VALIDATION, Path(__file__).parents[1])
    run_script(WORKER, tmp_path, PYTHONPATH=paths, OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for case, result in found.items():
            assert result["wrong"] == [], (rank, case)
            expected = {"X engine", "W engine", "dY not quantized" if "override" in case else "dY engine"}
            assert result["sources"].keys() == expected, (rank, case)
        # Of one rank at least the shard's amax is not the largest.
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for case in ranks[0]:
        others = {role: sum(rank[case]["of_others"].get(role, 0) for rank in ranks) for role in ("X", "W", "dY")}
        shared = {"X"} if "column" in case or "MLP" in case else set()
        shared |= {"dY"} if ("row" in case or "MLP" in case) and "override" not in case else set()
        assert {role for role, count in others.items() if count} == shared, case
