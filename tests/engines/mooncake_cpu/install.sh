#!/usr/bin/env bash
# Creates a virtual environment with Mooncake's store (the build without CUDA), which `make bench-peers` measures.
# usage: install.sh VENV [PYTHON]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$1
python=${2:-python3}
"$python" -m venv "$venv"
"$venv/bin/pip" install -q -r "$here/requirements.txt"
