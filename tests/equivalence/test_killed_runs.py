"""A run that is killed again and again ends, byte for byte, as the run that nobody touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sorl_algos.metrics import read_metrics
from tests.equivalence.killed import UPDATES

ROOT = Path(__file__).resolve().parents[2]
KILLS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("killed")
    answer = subprocess.run(
        [sys.executable, "-m", "tests.equivalence.killed", str(made), str(KILLS), "0"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    return made


def timeless(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith("time_")}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]


def files(checkpoint: Path) -> dict[str, Any]:
    """Every file of a checkpoint, bit for bit; of the state all but the time taken."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    state = json.loads(found.pop("state.json"))
    assert state.pop("seconds") > 0
    return found | {"state": state}


def killed_runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("killed_*"))


def test_at_least_ten_kills_half_of_them_in_a_save(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["random"] + summary["saving"] == KILLS >= 10
    assert summary["saving"] >= 4 and summary["random"] >= 4
    assert summary["saves_cut"] >= 2, "no kill left half a checkpoint behind"
    assert summary["rounds"] == len(killed_runs(folder)) >= 1


def test_weights_optimisers_random_states_and_counters_are_those_of_the_straight_run(folder: Path) -> None:
    straight = folder / "straight" / "checkpoints"
    kept = sorted(path.name for path in straight.iterdir())
    assert f"step_{UPDATES:06d}" in kept and len(kept) >= 2
    for run_dir in killed_runs(folder):
        assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == kept
        for name in kept:
            one, other = files(straight / name), files(run_dir / "checkpoints" / name)
            assert {f"{kind}.safetensors" for kind in ("policy", "critic", "policy_optimizer", "rng")} <= one.keys()
            assert [key for key in one if one[key] != other[key]] == [] and one.keys() == other.keys()


def test_the_metrics_are_those_of_the_straight_run(folder: Path) -> None:
    straight = timeless(folder / "straight")
    assert [line["update"] for line in straight] == list(range(UPDATES))
    assert len({line["reward_mean"] for line in straight}) == UPDATES  # drawn anew each time
    assert straight[-1]["kl_scale"] != 1.0 and straight[-1]["lr"] < straight[3]["lr"]
    for run_dir in killed_runs(folder):
        assert timeless(run_dir) == straight
