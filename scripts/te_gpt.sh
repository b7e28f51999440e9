#!/usr/bin/env bash
# Runs te_gpt.py on a CPU, over emulated kernels. Arguments go to it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 PYTHONPATH=".venv/te:tests/te"
for recipe in delayed tensorwise; do
  .venv/bin/python -W ignore scripts/te_gpt.py --emulate --recipe "$recipe" "$@"
done
