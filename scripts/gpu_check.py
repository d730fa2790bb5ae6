"""The whole path of a GPU machine in under eight minutes: torch, vLLM, training updates, FSDP2, FAISS.

python scripts/gpu_check.py [--only torch,rollout] [--limit-s 460] [--output check.json]

Every item runs in a process of its own with a time limit. A JSON summary follows on standard output: PASS, FAIL or
NOT RUN with figures and reasons. Exit status: 0 all passed; 1 an item failed, or could not run on the GPU; 2 no GPU.
--cpu runs on the processor what can run there; what cannot is said, and does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Seconds after which an item is ended; all together stay below --limit-s.
ITEMS = {"torch": 60, "rollout": 180, "train": 180, "fsdp": 90, "faiss": 60}


def run_item(name: str, cpu: bool) -> dict[str, Any]:
    """Runs an item in this process."""
    from gpu_checks import basics, models
    from gpu_checks.outcome import CannotRunError

    check = {
        "torch": basics.check_torch, "rollout": models.check_rollout, "train": models.check_train,
        "fsdp": models.check_fsdp, "faiss": basics.check_faiss,
    }[name]  # fmt: skip
    try:
        return check(cpu).as_dict()
    except CannotRunError as reason:
        return {"status": "NOT RUN", "reason": str(reason)}


def run_apart(name: str, cpu: bool, limit_s: float) -> dict[str, Any]:
    """Runs an item in a process of its own; one that dies or takes too long has failed, with its last words."""
    if limit_s < 5:
        return {"status": "NOT RUN", "reason": "no time was left; raise --limit-s, or name items with --only"}
    command = [sys.executable, __file__, "--item", name, *(["--cpu"] if cpu else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end_group(process.pid)
        _, errors = process.communicate()
        return {"status": "FAIL", "failures": [f"not done after {limit_s:.0f} s"], "last_words": errors[-1500:]}
    lines = [line for line in output.splitlines() if line.startswith('{"status"')]
    if process.returncode or not lines:
        return {"status": "FAIL", "failures": [f"ended with {process.returncode}"], "last_words": errors[-1500:]}
    return json.loads(lines[-1])


def end_group(number: int, grace_s: float = 15) -> None:
    """Ends a process and what it has started. torchrun gets time to end its ranks, which are groups of their own."""
    try:
        os.killpg(number, signal.SIGTERM)
        for _ in range(round(10 * grace_s)):
            time.sleep(0.1)
            os.waitpid(number, os.WNOHANG)  # reaped, it no longer counts as there
            os.killpg(number, 0)
        os.killpg(number, signal.SIGKILL)
    except (ProcessLookupError, ChildProcessError):
        return


def why_not(cpu: bool) -> str:
    """Why nothing can be checked here; empty if it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed; bash scripts/install.sh retrieval train vllm"
    if cpu or torch.cuda.is_available():
        return ""
    build = "a CPU build of torch" if torch.version.cuda is None else f"torch for CUDA {torch.version.cuda}"
    return f"no GPU is to be seen ({build}); --cpu checks what the processor can run"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run on the processor what can run there")
    parser.add_argument("--only", default=",".join(ITEMS), help="items, with commas in between")
    parser.add_argument("--limit-s", type=float, default=460, help="seconds for all of it")
    parser.add_argument("--output", type=Path, help="also write the summary to this file")
    parser.add_argument("--item", choices=list(ITEMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.item:
        print(json.dumps(run_item(options.item, options.cpu)))
        return 0
    names = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in names if name not in ITEMS]:
        print(f"gpu_check: unknown item {unknown[0]!r}; known: {', '.join(ITEMS)}", file=sys.stderr)
        return 2
    if reason := why_not(options.cpu):
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    began, results = time.monotonic(), {}
    for name in names:
        started = time.monotonic()
        result = run_apart(name, options.cpu, min(ITEMS[name], options.limit_s - (started - began)))
        results[name] = result | {"wall_s": round(time.monotonic() - started, 1)}
        what = "; ".join(result.get("failures", [])) or result.get("reason", "")
        print(f"{result['status']:8}{name:10}{results[name]['wall_s']:7.1f} s  {what}", file=sys.stderr)
    states = [result["status"] for result in results.values()]
    passed = all(state == "PASS" or (options.cpu and state == "NOT RUN") for state in states)
    summary = {
        "status": "PASS" if passed else "FAIL",
        "device": "cpu" if options.cpu else "gpu",
        "wall_s": round(time.monotonic() - began, 1),
        "items": results,
    }
    text = json.dumps(summary, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
