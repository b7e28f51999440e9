"""All runs of two ranks over the emulated kernels, from one process, since its imports take longer than they do.

PYTHONPATH=.venv/te:scripts/validation:tests:recipes .venv/bin/python tests/te/of_ranks.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import attention_of_ranks  # Transformer Engine first, as on a GPU
import copies_of_ranks
import sequence_parallel
import stored_shards
from processes import in_ranks

if __name__ == "__main__":
    for run in (attention_of_ranks, copies_of_ranks, sequence_parallel, stored_shards):
        folder = Path(sys.argv[1]) / run.__name__
        folder.mkdir()
        in_ranks(2, run.train, folder)
