#!/usr/bin/env bash
# Runs all rows of the table, about 3 minutes, and writes results.json. A recipe and numbers of rows run these alone.
# REGENERATE=1 makes the rows anew first, for another release or other factors.
set -euo pipefail
cd "$(dirname "$0")/../../.."
scripts/setup.sh tests
export TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 PYTHONPATH="$PWD/scripts/validation:$PWD/recipes:$PWD/.venv/te"
if [ -n "${REGENERATE:-}" ]; then
  .venv/bin/python -m te_table.factors
fi
exec .venv/bin/python -W ignore -m te_table.run "$@"
