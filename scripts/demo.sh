#!/usr/bin/env bash
# The main job: three real NeMo runs in FP8 (a baseline, a bad one, and the run in BF16), recorded and compared.
# Arguments go to demo.py. SIMULATE_CPU=avx2 runs it as on a CPU without AVX-512.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
source scripts/any_cpu/environment.sh
exec .venv/bin/python -W ignore scripts/demo.py "$@"
