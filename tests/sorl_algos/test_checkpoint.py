"""Checkpoints: exact, whole or not there, the newest by number, the best kept, no pickle."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sorl_algos.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from sorl_algos.models import Policy


def parts(make_model: Any, seed: int, steps: int = 0) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    """A policy and a small critic with their optimisers, a few steps old."""
    torch.manual_seed(seed)
    modules: dict[str, nn.Module] = {
        "policy": Policy(make_model(seed), shared_critic=True),
        "critic": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
    }
    optimizers: dict[str, torch.optim.Optimizer] = {
        name: torch.optim.AdamW(module.parameters(), lr=0.01) for name, module in modules.items()
    }
    for _ in range(steps):
        for name, module in modules.items():
            sum((p * torch.randn_like(p)).sum() for p in module.parameters()).backward()  # type: ignore[union-attr]
            optimizers[name].step()
            optimizers[name].zero_grad()
    return modules, optimizers


def save(directory: Path, made: Any, updates: int, *, keep: int = 9, **state: Any) -> Path:
    modules, optimizers = made
    return save_checkpoint(directory, updates, modules=modules, optimizers=optimizers, state=state, keep=keep)


def load(checkpoint: Path, made: Any) -> dict[str, Any]:
    modules, optimizers = made
    return load_checkpoint(checkpoint, modules=modules, optimizers=optimizers)


def test_everything_comes_back(make_model: Any, tmp_path: Path) -> None:
    saved = parts(make_model, seed=1, steps=3)
    saved[1]["critic"].param_groups[0]["lr"] = 0.123
    path = save(tmp_path, saved, 7, best_update=3, seconds=1.5, note="é")
    drawn = torch.rand(3)
    torch.manual_seed(99)
    fresh = parts(make_model, seed=2, steps=1)
    state = load(path, fresh)
    assert torch.equal(torch.rand(3), drawn)  # the random state went with it
    assert (state["updates_done"], state["best_update"], state["seconds"], state["note"]) == (7, 3, 1.5, "é")
    for name in saved[0]:
        theirs = fresh[0][name].state_dict()
        assert all(torch.equal(theirs[key], value) for key, value in saved[0][name].state_dict().items())
        old, new = saved[1][name].state_dict(), fresh[1][name].state_dict()
        assert new["param_groups"][0]["lr"] == old["param_groups"][0]["lr"]
        for number, entries in old["state"].items():
            for key, value in entries.items():
                assert torch.equal(torch.as_tensor(new["state"][number][key]), torch.as_tensor(value))


def test_steps_after_a_restoration_are_bit_for_bit_the_same(make_model: Any, tmp_path: Path) -> None:
    def go_on(made: Any) -> dict[str, torch.Tensor]:
        modules, optimizers = made
        for step in range(2):
            torch.manual_seed(step)
            sum((p * torch.randn_like(p)).sum() for p in modules["policy"].parameters()).backward()
            optimizers["policy"].step()
            optimizers["policy"].zero_grad()
        return modules["policy"].state_dict()

    first = parts(make_model, seed=1, steps=3)
    path = save(tmp_path, first, 3)
    second = parts(make_model, seed=2)
    load(path, second)
    expected, got = go_on(first), go_on(second)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_tied_weights_are_saved_once_and_stay_tied(make_model: Any, tmp_path: Path) -> None:
    from safetensors import safe_open

    made = parts(make_model, seed=1)
    path = save(tmp_path, made, 1)
    with safe_open(path / "policy.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert len({"lm.model.embed_tokens.weight", "lm.lm_head.weight"} & names) == 1
    other = parts(make_model, seed=2)
    load(path, other)
    lm = other[0]["policy"].lm
    assert lm.get_input_embeddings().weight.data_ptr() == lm.get_output_embeddings().weight.data_ptr()


def test_the_newest_is_chosen_by_number_and_what_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    for name in ("step_90", "step_100", "step_000095"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "step_210.partial-7").mkdir()
    (tmp_path / "step_300x").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_100"
    (tmp_path / "step_200").mkdir()
    with pytest.warns(UserWarning, match=r"step_200 is no whole checkpoint \(no state.json\) and is passed over"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step_100"


def test_the_oldest_go_and_the_best_stays(make_model: Any, tmp_path: Path) -> None:
    made = parts(make_model, seed=1)
    for updates in (2, 4, 9, 10, 11):
        save(tmp_path, made, updates, keep=2, best_update=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004", "step_000010", "step_000011"]
    save(tmp_path, made, 12, keep=1, best_update=12)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000012"]


def test_a_save_clears_what_a_killed_one_left_and_leaves_no_partial_of_its_own(make_model: Any, tmp_path: Path) -> None:
    (tmp_path / "step_000009.partial-123").mkdir()
    (tmp_path / "step_000009.partial-123" / "policy.safetensors").write_bytes(b"half")
    path = save(tmp_path, parts(make_model, seed=1, steps=1), 3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000003"]
    assert {entry.suffix for entry in path.iterdir()} == {".safetensors", ".json"}


def test_saving_the_same_update_again_replaces_it(make_model: Any, tmp_path: Path) -> None:
    save(tmp_path, parts(make_model, seed=1), 3, note="old")
    path = save(tmp_path, parts(make_model, seed=2), 3, note="new")
    assert load(path, parts(make_model, seed=3))["note"] == "new"


def test_foreign_checkpoints_are_refused(make_model: Any, tmp_path: Path) -> None:
    path = save(tmp_path, parts(make_model, seed=1), 3)
    modules, optimizers = parts(make_model, seed=1)
    other = {**modules, "critic": nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))}
    with pytest.raises(ValueError, match="does not fit the critic of this run; resume with the same model"):
        load_checkpoint(path, modules=other, optimizers=optimizers)
    with pytest.raises(ValueError, match="does not fit the another of this run"):
        load_checkpoint(path, modules={"another": modules["critic"]}, optimizers={})
    with pytest.raises(ValueError, match="does not fit the policy"):
        load_checkpoint(path, modules={"policy": Policy(make_model())}, optimizers={})
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version reads 1; start a new run_dir"):
        load(path, (modules, optimizers))


def test_random_states_of_every_library_come_back(make_model: Any, tmp_path: Path) -> None:
    made = parts(make_model, seed=1)
    random.gauss(0, 1)  # leaves a second draw in store, which must come back too
    np.random.standard_normal()
    path = save(tmp_path, made, 1)

    def draws() -> list[float]:
        own = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.random()]
        return [*own, float(torch.rand(()))]

    expected = draws()
    draws()
    load(path, made)
    assert draws() == expected


def test_a_removal_goes_by_a_rename(make_model: Any, tmp_path: Path) -> None:
    """What a killed removal leaves is no checkpoint, and the next save clears it away."""
    made = parts(make_model, seed=1)
    save(tmp_path, made, 1)
    going = tmp_path / "step_000001.partial-7-old"  # where a removal puts it before it deletes files
    (tmp_path / "step_000001").rename(going)
    (going / "policy.safetensors").unlink()
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, made, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_the_checkpoint_before_a_collapse_stays(make_model: Any, tmp_path: Path) -> None:
    made = parts(make_model, seed=1)
    for updates in (2, 4, 6, 8, 10):
        save(tmp_path, made, updates, keep=1, best_update=2, before_collapse_update=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000006", "step_000010"]
