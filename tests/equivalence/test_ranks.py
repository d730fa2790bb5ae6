"""Two ranks (gloo) take the step that one rank takes, data-parallel and with split weights; so do whole runs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.equivalence.ranks import RUNS, SETTINGS, SHARDINGS, run, step, weights_of
from tests.sorl_algos.proofs import same

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(900)  # two processes that wait for each other: slow on a busy machine


class Found(NamedTuple):
    """What two ranks had after their steps and runs (the same on both), and the folder of the runs."""

    tensors: dict[str, Tensor]
    folder: Path

    def of(self, kind: str, name: str) -> dict[str, Tensor]:
        split = {tuple(key.split("|")): value for key, value in self.tensors.items()}
        return {key[2]: value for key, value in split.items() if key[:2] == (kind, name)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    output = folder / "steps"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.equivalence.ranks", str(output), str(folder)],
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=800)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)[-4000:]
    first, second = load_file(f"{output}.0"), load_file(f"{output}.1")
    assert first.keys() == second.keys()
    assert [key for key, value in first.items() if not torch.equal(value, second[key])] == []
    return Found(first, folder)


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_equal_one(name: str, two_ranks: Found, tmp_path: Path, in_float64: None) -> None:
    one = step(name, tmp_path, rank=0, ranks=1)
    for sharding in SHARDINGS:
        two = two_ranks.of(sharding, name)
        assert one.keys() == two.keys()
        for key, value in one.items():
            tolerance = 1e-6 if key.startswith("step/") else 1e-9
            scale = max(1.0, float(value.abs().max()))
            same(f"1 rank = 2 ranks, {sharding}", two[key] / scale, value / scale, tolerance=tolerance)
    assert float(one["step/grad_norm"]) > 0
    assert all(torch.isfinite(value).all() for value in one.values())
    nothing_clipped = name.startswith("reinforce, gradient")  # it has no clip
    if "step/factor" in one:
        assert (float(one["step/factor"]) == 1) is nothing_clipped, "the normalisation should be at work here"


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_two_ranks_resumes_exactly_and_goes_on_with_one(
    name: str, sharding: str, two_ranks: Found, in_float64: None
) -> None:
    straight = two_ranks.of("run", f"{sharding}-{name}-straight")
    resumed = two_ranks.of("run", f"{sharding}-{name}-resumed")
    assert straight and straight.keys() == resumed.keys()
    assert [key for key, value in straight.items() if not torch.equal(value, resumed[key])] == []
    # One process takes the checkpoint of the first update on: up to the order of sums it ends where two did.
    folder = two_ranks.folder / f"{sharding}-{name}-straight"
    alone = folder.with_name(f"{folder.name}-alone")
    shutil.copytree(two_ranks.folder / f"{sharding}-{name}-resumed", alone)
    shutil.rmtree(alone / "checkpoints" / "step_000002")
    learner = run(name, alone, rank=0, ranks=1, sharding=sharding, updates=2)
    for key, value in weights_of(learner).items():
        same(f"a run of two ranks goes on with one, {sharding}", value, straight[key], tolerance=1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_holds_whole_weights_of_what_learns_and_nothing_else(name: str, two_ranks: Found) -> None:
    ways = [
        load_file(two_ranks.folder / f"{sharding}-{name}-straight" / "checkpoints" / "step_000002" / file)
        for sharding in SHARDINGS
        for file in ("policy.safetensors",)
    ]
    assert ways[0].keys() == ways[1].keys()
    for key, value in ways[0].items():
        same("checkpoints of ddp and fsdp2 hold the same", ways[1][key], value, tolerance=1e-9)
    learns = {"lora_", "value_head"} if "lora_rank" in RUNS[name] else {""}
    assert all(any(part in key for part in learns) for key in ways[0])
