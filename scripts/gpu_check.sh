#!/usr/bin/env bash
# The whole GPU path in under eight minutes on one GPU: bash scripts/gpu_check.sh [--cpu] [--only ITEMS] (--help for all).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
command -v "$python" >/dev/null || {
    echo "gpu_check: $python is not there; run bash scripts/install.sh retrieval train dense smollm2 vllm first" >&2
    exit 2
}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" KMP_BLOCKTIME=0 HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
exec "$python" scripts/gpu_check.py "$@"
