"""Everything that only a GPU can prove: `run.sh` runs the parts, each a process of its own, and writes one JSON."""
