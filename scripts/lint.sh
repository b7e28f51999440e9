#!/usr/bin/env bash
# Style, types and workflow files, without a test.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh tests
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports --no-cache
.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
.venv/bin/zizmor --offline --quiet --pedantic .github/workflows
