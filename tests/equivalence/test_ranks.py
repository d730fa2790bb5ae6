"""Two ranks (gloo, data parallelism through accelerate) take the step that one rank takes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.equivalence.ranks import SETTINGS, step
from tests.sorl_algos.proofs import same

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What two processes have after their steps: the same."""
    output = tmp_path_factory.mktemp("ranks") / "steps"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.equivalence.ranks", str(output)],
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)[-4000:]
    first, second = load_file(f"{output}.0"), load_file(f"{output}.1")
    assert first.keys() == second.keys()
    assert [key for key, value in first.items() if not torch.equal(value, second[key])] == []
    return first


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_equal_one(name: str, of_two_ranks: dict[str, Tensor], tmp_path: Path) -> None:
    one = step(name, tmp_path, rank=0, ranks=1)
    two = {key.split("|")[1]: value for key, value in of_two_ranks.items() if key.split("|")[0] == name}
    assert one.keys() == two.keys()
    for key, value in one.items():
        tolerance = 1e-6 if key.startswith("step/") else 1e-9
        same(f"1 rank = 2 ranks: {name}", two[key], value, tolerance=tolerance)
    assert float(one["step/grad_norm"]) > 0
    if "step/factor" in one:
        assert float(one["step/factor"]) < 1, "the normalisation should be at work here"
    start = {key: value for key, value in one.items() if key.startswith("policy.lm")}
    assert all(torch.isfinite(value).all() for value in start.values())
