#!/usr/bin/env bash
# Everything that only a GPU can prove, in parts of less than 9 minutes each, into one JSON; --help lists the options.
# PYTHON names the interpreter (python3). It installs nothing and uses no network; --emulate runs it on a CPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
export PYTHONPATH="$root:$root/scripts/validation:$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 # nothing of the folder that it is called in
exec "${PYTHON:-python3}" -m gpu "$@"
