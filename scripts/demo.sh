#!/usr/bin/env bash
# The main job: three real NeMo runs in FP8 (good, bad, and the bad one's BF16 twin), recorded and told apart.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/python -W ignore scripts/demo.py "$@"
