#!/usr/bin/env bash
# Style, types and all tests, on a CPU. Arguments go to pytest. SIMULATE_CPU=avx2 runs them as on a CPU without AVX-512.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh tests
# mypy takes one core for half a minute; what it and the others say is shown at the end.
report=$(mktemp)
trap 'kill $(jobs -p) 2> /dev/null || true; rm -f "$report"' EXIT
scripts/lint.sh > "$report" 2>&1 &
linting=$!
source scripts/any_cpu/environment.sh
# Whoever imports a module first compiles it: in a new environment one process does, and not each of three.
[ -e .venv/compiled ] || { .venv/bin/python -m pytest --collect-only -q > /dev/null || true; touch .venv/compiled; }
status=0
# Three at a time on two cores: much of it waits for processes of its own. What shares a fixture stays together, in the order of conftest.py.
.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || status=$?
wait "$linting" || status=1
cat "$report"
exit "$status"
