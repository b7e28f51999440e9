#!/usr/bin/env bash
# Runs bench_gpu_step.py on a CPU, over emulated kernels, where its times say nothing. Arguments go to it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 PYTHONPATH=".venv/te:tests/te"
.venv/bin/python -W ignore scripts/bench_gpu_step.py --emulate --recipes delayed tensorwise "$@"
