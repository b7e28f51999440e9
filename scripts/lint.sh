#!/usr/bin/env bash
# Style, types, the documentation and workflow files, without a test.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh tests
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports --no-cache
.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet --site-dir "$site"
.venv/bin/zizmor --offline --quiet --pedantic .github/workflows
