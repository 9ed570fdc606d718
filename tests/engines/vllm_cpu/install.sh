#!/usr/bin/env bash
# Creates a virtual environment with real vLLM on a CPU.
# usage: install.sh VENV [PYTHON]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$1
python=${2:-python3}
"$python" -m venv "$venv"
"$venv/bin/pip" install -q -r "$here/requirements.txt"
# CUDA builds of these come along, and transformers fails to import beside them.
"$venv/bin/pip" uninstall -qy torchvision torchaudio torchcodec
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp "$here/shim/pyproject.toml" "$copy"
"$venv/bin/pip" install -q --no-deps --no-build-isolation "$copy"
