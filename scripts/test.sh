#!/usr/bin/env bash
# Makes .venv if needed, installs, and runs the whole CPU test suite.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash scripts/test.sh [PYTEST ARGUMENT ...]

Makes .venv if needed, installs the project with its test tools, and runs every test that needs no GPU.
Arguments go to pytest, for example:

  bash scripts/test.sh tests/sorl_env               one folder
  bash scripts/test.sh -k grammar -x                by name, stop at the first failure
  bash scripts/test.sh -n 0                         in one process (for a debugger)
  bash scripts/test.sh -m gpu                       the tests that need a GPU

The real data of tests/real is looked for in $SORL_DATA (default: ../shared/data).
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
bash "$here/install.sh" retrieval train dev smollm2 world data
cd "$here/.."

# One thread for each of the two processes: OpenMP threads that wait for one another on busy cores are slow.
export OMP_NUM_THREADS=1 KMP_BLOCKTIME=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec .venv/bin/python -m pytest -n 2 --dist loadfile -m "not gpu" "$@"
