#!/usr/bin/env bash
# The main job: four real NeMo runs, recorded and compared, and the one that FP8 breaks resumed with the advised change.
# Arguments go to demo.py. SIMULATE_CPU=avx2 runs it as on a CPU without AVX-512.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
source scripts/any_cpu/environment.sh
exec .venv/bin/python -W ignore scripts/demo.py "$@"
