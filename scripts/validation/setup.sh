#!/usr/bin/env bash
# Installs both sets with each Python that is named, in a fresh clone with empty caches, and runs a short demo there.
# Says how long each took and how big it is. About 5 minutes and 10 GB of downloads each where torch has no CPU build.
#
#     scripts/validation/setup.sh python3.10 python3.11 ...
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_CACHE_DIR=$folder/uv PIP_CACHE_DIR=$folder/pip npm_config_cache=$folder/npm TIMEFORMAT=%0R
seconds() { { time "$@" > "$folder/log" 2>&1 || { tail -n 20 "$folder/log" >&2; exit 1; }; } 2>&1; }
size() { du -sm .venv | cut -f1; }

for python in "$@"; do
  rm -rf "$folder/clone" "$UV_CACHE_DIR" "$PIP_CACHE_DIR" "$npm_config_cache"
  git clone -q . "$folder/clone"
  export PYTHON=$python
  pushd "$folder/clone" > /dev/null
  "$python" --version
  echo "  demo, caches empty:  $(seconds scripts/setup.sh) s, $(size) MB"
  echo "  20 steps of it:      $(seconds scripts/demo.sh --steps 20) s"
  echo "  tests beyond it:     $(seconds scripts/setup.sh tests) s, $(size) MB together"
  echo "  again:               $(seconds scripts/setup.sh tests) s"
  rm -rf .venv
  echo "  both, caches warm:   $(seconds scripts/setup.sh tests) s"
  popd > /dev/null
done
