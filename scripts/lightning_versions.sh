#!/usr/bin/env bash
# Runs the callback's tests under each minor release of Lightning that the package supports.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
for version in 2.1.4 2.2.5 2.3.3 2.4.0 2.5.5 2.6.1; do
    folder=$(mktemp -d)
    .venv/bin/pip install -q --no-deps --target "$folder" "lightning==$version" 2>/dev/null
    result=$(PYTHONPATH=$folder .venv/bin/python -W ignore -m pytest -q tests/callback/test_lightning.py 2>&1 | tail -1)
    echo "lightning $(PYTHONPATH=$folder .venv/bin/python -W ignore -c 'import lightning; print(lightning.__version__)'): $result"
    rm -rf "$folder"
done
