"""scripts/gpu_check.sh: what it says without a GPU, and that an item that hangs or dies has failed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scripts_in_reach() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_on_the_processor_it_passes_and_says_so_in_json(tmp_path: Path) -> None:
    done = run("--cpu", "--only", "torch", "--output", str(tmp_path / "check.json"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "check.json").read_text())
    assert (summary["status"], summary["device"], list(summary["items"])) == ("PASS", "cpu", ["torch"])
    item = summary["items"]["torch"]
    assert item["status"] == "PASS" and item["figures"]["torch.bfloat16_error"] > item["figures"]["torch.float32_error"]
    assert done.stderr.startswith("PASS    torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why_nothing_runs() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("gpu_check: no GPU is to be seen (") and "--cpu" in line


def test_an_unknown_item_is_refused() -> None:
    done = run("--only", "torch,vlm")
    assert done.returncode == 2
    assert done.stderr.strip() == "gpu_check: unknown item 'vlm'; known: torch, rollout, train, fsdp, faiss"


def test_an_item_that_takes_too_long_or_dies_has_failed(scripts_in_reach: None) -> None:
    check = importlib.import_module("gpu_check")
    # two ranks need longer than this to import torch
    found = check.run_apart("fsdp", True, 5.0)
    assert found["status"] == "FAIL" and found["failures"] == ["not done after 5 s"]
    died = check.run_apart("no such item", True, 30.0)  # argparse ends the process with 2
    assert died["status"] == "FAIL" and died["failures"] == ["ended with 2"] and "invalid choice" in died["last_words"]
    assert check.run_apart("torch", True, 1.0)["status"] == "NOT RUN"


def test_a_condition_that_does_not_hold_is_a_failure(scripts_in_reach: None) -> None:
    outcome = importlib.import_module("gpu_checks.outcome").Outcome()
    outcome.note(gap=0.123456, name="x")
    outcome.require(True, "fine")
    assert outcome.as_dict() == {"status": "PASS", "figures": {"gap": 0.1235, "name": "x"}, "failures": []}
    outcome.require(False, "0.1235 apart")
    assert (outcome.as_dict()["status"], outcome.failures) == ("FAIL", ["0.1235 apart"])


def test_indexes_find_their_own_passages_on_the_processor(scripts_in_reach: None) -> None:
    pytest.importorskip("faiss")
    found: dict[str, Any] = importlib.import_module("gpu_checks.basics").check_faiss(True).as_dict()
    assert found["status"] == "PASS", found
    assert found["figures"]["flat_own_passage_first"] == 1.0
