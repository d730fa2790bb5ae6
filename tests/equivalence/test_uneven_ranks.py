"""Ranks with unlike shares neither wait for one another nor change the result, and play different questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.equivalence.uneven import EPISODES, RUNS, SHARDINGS, TEN, run
from tests.sorl_algos.proofs import same

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("uneven")
    answer = subprocess.run(
        [sys.executable, "-m", "tests.equivalence.uneven", str(made)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,  # ranks that wait for one another end here
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    return made


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_with_unlike_shares_equal_one(name: str, folder: Path, tmp_path: Path, in_float64: None) -> None:
    first, second = load_file(folder / "weights.0"), load_file(folder / "weights.1")
    alone = run(name, tmp_path / "alone", 0, 1, "ddp")
    for sharding in SHARDINGS:
        for key, value in alone.items():
            own = first[f"{sharding}|{name}|{key}"]
            assert torch.equal(own, second[f"{sharding}|{name}|{key}"])
            same(f"unlike shares on two ranks, {sharding}", own, value, tolerance=1e-8)
        alone_logged = json.loads((tmp_path / "alone.0.json").read_text())
        logged, of_second = (json.loads((folder / f"{sharding}-{name}.{rank}.json").read_text()) for rank in (0, 1))
        for line, other_rank, one in zip(logged, of_second, alone_logged, strict=True):
            assert line.keys() == one.keys() and line["grad_norm"] > 0
            for metric in line.keys() - {"time_rollout_s", "time_update_s"}:
                assert line[metric] == other_rank[metric], f"{metric}: the alarm of each rank judges the same"
                off = torch.tensor((line[metric] - one[metric]) / max(abs(one[metric]), 1e-2))
                same(f"metrics of unlike shares, {sharding} (relative)", off, 0.0, tolerance=1e-5)
        assert logged[1]["dropped_episodes"] == EPISODES // 2


def test_ranks_play_different_questions_and_together_what_one_rank_plays(folder: Path) -> None:
    shares = [json.loads((folder / f"played.{rank}").read_text()) for rank in range(2)]
    for version, (first, second) in enumerate(zip(*shares, strict=True)):
        assert len(first) == len(second) == EPISODES // 2
        assert not {group for _, group in first} & {group for _, group in second}
        expected = [question.id for question in TEN.batch(3, 4 * version, 4) for _ in range(2)]
        assert [name for name, _ in first + second] == expected
