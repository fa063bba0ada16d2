#!/usr/bin/env bash
# Makes all fixtures again and compares them with those in the tree, in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

. tools/python_env.sh
"$python" tools/check_fixtures.py --experts "$experts"
