#!/usr/bin/env bash
# Makes all fixtures again, in a Python environment of its own, and compares them with those in the repository.
set -euo pipefail
cd "$(dirname "$0")/.."

. tools/python_env.sh
"$python" tools/check_fixtures.py --experts "$experts"
