#!/usr/bin/env bash
# Makes an environment with torchtitan 0.3 in the folder that is given, or in a temporary one, and writes results.json.
# torchtitan asks for datasets < 4.8 and Triton, which the tests' environment does not have.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
env=${1:-$(mktemp -d)/titan}
if [ ! -x "$env/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$env"
    "$env/bin/pip" install -q 'torch==2.13.*' --extra-index-url https://download.pytorch.org/whl/cpu
    "$env/bin/pip" install -q 'torchtitan==0.3.0' 'torchao==0.18.0' triton peft 'transformers<5'
    "$env/bin/pip" install -q "$root"
fi
cd "$root"
PYTHONPATH="$root:$root/recipes:$root/scripts/validation" exec "$env/bin/python" -m titan.run
