#!/usr/bin/env bash
# Runs te_bridge.py with each minor release of Megatron-Bridge, beside what else it takes. Arguments go to it.
# Installs them into folders of their own beside the environment's packages, 30 to 150 MB each.
set -euo pipefail
cd "$(dirname "$0")/../../.."
scripts/setup.sh tests
export TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

log=$(mktemp)
trap 'rm -f "$log"' EXIT
transformers_5="transformers==5.12.1 huggingface_hub==1.20.1 httpx==0.28.1"
for packages in \
  "megatron-bridge==0.3.1 megatron-core==0.16.1" \
  "megatron-bridge==0.4.2 megatron-core==0.17.1" \
  "megatron-bridge==0.5.1 megatron-core==0.18.2 $transformers_5" \
  "megatron-bridge==0.6.2 megatron-core==0.19.2 $transformers_5"; do
  folder=".venv/bridges/$(sha256sum <<< "$packages" | cut -c1-12)"
  if [ ! -e "$folder/installed" ]; then
    # From Bridge 0.4 and megatron-core 0.17 on they ask for Python 3.12; bridge_on_cpu.py has what they use of it.
    # shellcheck disable=SC2086
    .venv/bin/pip install -q --no-deps --ignore-requires-python --upgrade --target "$folder" $packages \
      2> >(grep -v "^WARNING: Location" >&2)
    touch "$folder/installed"
  fi
  PYTHONPATH="$PWD:$folder:.venv/te" .venv/bin/python -W ignore scripts/validation/compat/te_bridge.py "$@" 2> "$log" \
    || { tail -n 30 "$log"; exit 1; }
done
