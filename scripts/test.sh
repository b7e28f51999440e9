#!/usr/bin/env bash
# Style, types and all tests, on a CPU. Arguments go to pytest. SIMULATE_CPU=avx2 runs them as on a CPU without AVX-512.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/lint.sh
source scripts/any_cpu/environment.sh
# Three at a time on two cores: much of it waits for processes of its own. What shares a fixture stays together, in the order of conftest.py.
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
