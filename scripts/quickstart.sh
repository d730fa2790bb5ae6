#!/usr/bin/env bash
# Trains a search agent with SO-PPO on this computer, start to finish, and shows what it learnt.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash scripts/quickstart.sh [OPTION ...]

Makes .venv and installs (first time only), builds a BM25 index of the bundled world, takes the bundled 2.6 M
parameter model, which knows the form of the game but plays it badly, trains it with SO-PPO to search and answer, and
scores it on held-out questions before and after. Under 10 minutes on two CPU cores after installation, no GPU needed.
Run again, it reuses what is done; Ctrl-C saves, and the same command goes on from there.

  --algorithm NAME   another row of the table: ppo, turn_ppo, s_ppo, so_ppo (default), grpo, so_grpo, gspo ...
  --seed N           default 0
  --from-scratch     make the base model anew first (pre-training: about an hour more, an estimate)
  --smoke            three tiny updates, to see that everything runs (under 90 seconds)
  --fresh            forget this run's earlier results and start anew
  -h, --help         this text

Results: runs/quickstart_<algorithm>_seed<N>/report.html (open it in a browser), metrics.jsonl, policy/ (the model).
TEXT
}

fail() { printf 'quickstart.sh: %s\n' "$*" >&2; exit 2; }
step() { printf '\n== %s\n' "$*"; }

algorithm=so_ppo seed=0 preset=quickstart from_scratch="" fresh=""
while [ $# -gt 0 ]; do
    case "$1" in
        --algorithm) [ $# -ge 2 ] || fail "--algorithm needs a name"; algorithm="$2"; shift ;;
        --seed) [ $# -ge 2 ] || fail "--seed needs a number"; seed="$2"; shift ;;
        --from-scratch) from_scratch=yes ;;
        --smoke) preset=smoke ;;
        --fresh) fresh=yes ;;
        -h | --help) usage; exit 0 ;;
        *) fail "unknown option '$1'; see --help" ;;
    esac
    shift
done
case "$seed" in "" | *[!0-9]*) fail "--seed must be a whole number, got '$seed'" ;; esac
case "$algorithm" in "" | *[!a-z_]*) fail "--algorithm must be a name such as so_ppo, got '$algorithm'" ;; esac

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
# Checked before anything is downloaded: the rows of the table, read off its file.
rows="$(sed -n 's/^    "\([a-z_]*\)": Algorithm(.*/\1/p; s/^ALIASES = {"\([a-z_]*\)".*/\1/p' "$here/../sorl_algos/algorithms.py")"
printf '%s\n' $rows | grep -qx "$algorithm" || fail "unknown algorithm '$algorithm'; known: $(echo $rows)"
bash "$here/install.sh" retrieval train
cd "$here/.."
export KMP_BLOCKTIME=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python=.venv/bin/python

run="runs/${preset}_${algorithm}_seed${seed}"
extra=()
if [ -n "$from_scratch" ]; then
    run="${run}_from_scratch"
    extra=(--model runs/base_from_scratch)
fi
if [ -n "$fresh" ] || [ "$preset" = smoke ]; then rm -rf "$run"; fi

step "index"
$python scripts/build_index.py world --output indexes/world

if [ -n "$from_scratch" ] && [ ! -f runs/base_from_scratch/model.safetensors ]; then
    step "base model from scratch"
    scratch=()
    [ "$preset" != smoke ] || scratch=(--pretrain-steps 3 --warm-steps 3)
    $python scripts/make_base.py --output runs/base_from_scratch --checkpoints runs/make_base ${scratch[@]+"${scratch[@]}"}
fi

case "$algorithm" in
    *grpo* | gspo | rloo | cispo) preset="${preset}_group" ;;      # several episodes of each question
esac
step "training with $algorithm"
$python scripts/train.py "$preset" --algorithm "$algorithm" --seed "$seed" --run-dir "$run" ${extra[@]+"${extra[@]}"}
