#!/usr/bin/env bash
# Creates a virtual environment with the real LMCache beside the real vLLM, for a CPU.
# usage: install.sh VENV [PYTHON]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$1
python=${2:-python3}
bash "$here/../vllm_cpu/install.sh" "$venv" "$python"
"$venv/bin/pip" install -q -r "$here/requirements.txt" -r "$here/../vllm_cpu/requirements.txt"
"$venv/bin/pip" uninstall -qy torchvision torchaudio torchcodec
"$venv/bin/pip" install -q --no-deps lmcache==0.5.6
