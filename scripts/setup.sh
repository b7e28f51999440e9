#!/usr/bin/env bash
# Makes .venv with what the demo needs, or with what the tests need too; does nothing, and needs no network, once it is there.
#
#     scripts/setup.sh [demo|tests]
#
# PYTHON names the interpreter (3.10 to 3.13). Where packages come from is read from pip's configuration.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(uname -s)" != Linux ]; then
  echo "setup: $(uname -s) is not supported: the packages it installs are for Linux. Use the Dockerfile, a Linux machine, or WSL 2." >&2
  exit 1
fi
if [ -n "${PYTHON:-}" ]; then
  candidates=("$PYTHON")
else
  candidates=(.venv/bin/python python3 python3.13 python3.12 python3.11 python3.10)
fi
for python in "${candidates[@]}"; do
  if "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null; then
    exec "$python" -B scripts/setup "$@"
  fi
done
found=$("${PYTHON:-python3}" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2> /dev/null || echo "not a Python")
echo "setup: Python 3.10 to 3.13 is needed, and ${PYTHON:-python3} is $found. Name one: PYTHON=/path/to/python3.12 scripts/setup.sh" >&2
exit 1
