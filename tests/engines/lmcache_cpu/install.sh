#!/usr/bin/env bash
# Creates a virtual environment with the real LMCache for a CPU, without an engine.
# usage: install.sh VENV [PYTHON]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$1
python=${2:-python3}
"$python" -m venv "$venv"
"$venv/bin/pip" install -q -r "$here/requirements.txt"
"$venv/bin/pip" install -q --no-deps lmcache==0.5.6
