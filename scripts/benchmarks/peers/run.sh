#!/usr/bin/env bash
# Runs peers.py in .venv-peers, which it makes: this package and the tools that it is compared with, pinned, and no
# CUDA. About 2 minutes and 1.6 GB, once. Arguments go to peers.py; PYTHON names the interpreter (3.11).
set -euo pipefail
cd "$(dirname "$0")/../../.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 PYTHONPATH=$PWD:$PWD/recipes:$PWD/scripts

wanted=$(cat scripts/benchmarks/peers/requirements.txt | sha256sum)
if [ "$(cat .venv-peers/installed 2>/dev/null)" != "$wanted" ]; then
  echo "Installing into .venv-peers (about 2 minutes) ..." >&2
  "${PYTHON:-python3}" -m venv .venv-peers
  .venv-peers/bin/pip install -q torch==2.13.0 2> >(grep -v "^WARNING: Location" >&2)
  # The list is complete, and some of its packages ask for CUDA or for what a benchmark does not need: no resolving.
  .venv-peers/bin/pip install -q --no-deps -r scripts/benchmarks/peers/requirements.txt 2> >(grep -v "^WARNING: Location" >&2)
  echo "$wanted" > .venv-peers/installed
fi
exec .venv-peers/bin/python -W ignore scripts/benchmarks/peers/peers.py "$@"
