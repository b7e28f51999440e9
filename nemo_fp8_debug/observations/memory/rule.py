"""Does a process take more and more memory?"""

from __future__ import annotations

from collections.abc import Iterator

from ...analysis.diagnosis.rules.finding import Finding
from ...analysis.runs.run import Run
from .table import TABLES

#: growth from the first third of the samples to the last that counts: far above what allocators keep
_GROWS = 2.0
_FEWEST = 9


def find(run: Run, baseline: Run | None) -> Iterator[Finding]:
    """Yield that a rank's resident memory grows, if one's does."""
    for (rank,), rows in run.table(TABLES[0].name).group_by("rank", maintain_order=True):
        values = rows.sort("step")["host_bytes"].to_list()
        if len(values) < _FEWEST:
            continue
        first, last = (sorted(part)[len(part) // 2] for part in (values[: len(values) // 3], values[-len(values) // 3 :]))
        if last > _GROWS * first:
            facts = f"rank {rank} takes {first / 2**30:.1f} GiB in the first samples and {last / 2**30:.1f} GiB in the last"
            yield Finding("memory", "none", "medium", facts, "Look for what keeps tensors or Python objects.")
