#!/usr/bin/env bash
# Ask PyPI about known vulnerabilities of every package that the locks name, and write them down as a bill of materials
# (CycloneDX), a file a lock. A package that cannot be asked about is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv .venv-audit
.venv-audit/bin/pip install -q --require-hashes --only-binary :all: -r scripts/packages/locked/audit.txt
mkdir -p bill-of-materials
vulnerable=0
for lock in scripts/packages/locked/*.txt; do
  name="$(basename "$lock" .txt)"
  [[ "$name" == torch-cpu ]] && continue # the same versions as in torch-cuda, under names that PyPI does not have
  echo "$name"
  .venv-audit/bin/pip-audit --strict --disable-pip --require-hashes --requirement "$lock" \
    --format cyclonedx-json --output "bill-of-materials/$name.json" || vulnerable=1
done
exit "$vulnerable"
