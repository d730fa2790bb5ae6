"""Exact resume: weights, optimiser and counters of a run, as safetensors and JSON (never pickle).

A checkpoint is a directory ``step_000010`` (10 updates done) that appears by one rename when it is whole; what a
killed save leaves behind has another name and is cleared away by the next save.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_NAME = re.compile(r"step_(\d+)")
FORMAT = 1


def save_checkpoint(
    directory: Path,
    updates_done: int,
    *,
    modules: dict[str, nn.Module],
    optimizers: dict[str, torch.optim.Optimizer],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Writes ``directory/step_NNNNNN`` and removes the oldest beyond ``keep`` (the best one stays).

    ``state`` is JSON; with ``state["best_update"]`` naming the update whose checkpoint must not be removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob("*.partial-*"):
        shutil.rmtree(leftover)
    partial = directory / f"step_{updates_done:06d}.partial-{os.getpid()}"
    partial.mkdir()
    for name, module in modules.items():
        _save_tensors(_unique_tensors(module), partial / f"{name}.safetensors")
    for name, optimizer in optimizers.items():
        tensors, groups = _flatten(optimizer.state_dict())
        _save_tensors(tensors, partial / f"{name}_optimizer.safetensors")
        _write_text(json.dumps(groups), partial / f"{name}_optimizer.json")
    _save_tensors({"cpu": torch.get_rng_state()}, partial / "rng.safetensors")
    own = {"format": FORMAT, "updates_done": updates_done}
    _write_text(json.dumps(state | own, indent=1), partial / "state.json")
    final = directory / f"step_{updates_done:06d}"
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    best = state.get("best_update")
    for old in _complete(directory)[:-keep]:
        if _updates(old) != best:
            shutil.rmtree(old)
    return final


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint with the most updates, or None. Numbers are compared as numbers."""
    complete = _complete(directory)
    return complete[-1] if complete else None


def load_checkpoint(
    checkpoint: Path, *, modules: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]
) -> dict[str, Any]:
    """Restores modules, optimisers and the random state in place; returns the saved ``state``.

    Raises:
        ValueError: the checkpoint is of another format, or of another model.
    """
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {checkpoint} has format {state['format']}, this version reads {FORMAT}; start a new run_dir"
        )
    for name, module in modules.items():
        file = checkpoint / f"{name}.safetensors"
        tensors = load_file(file) if file.exists() else {}
        own = _unique_tensors(module)
        if tensors.keys() != own.keys() or any(tensors[key].shape != own[key].shape for key in own):
            raise ValueError(
                f"checkpoint {checkpoint} does not fit the {name} of this run; resume with the same model and "
                "critic, or choose a new run_dir"
            )
        with torch.no_grad():
            for key, tensor in own.items():
                tensor.copy_(tensors[key])
    for name, optimizer in optimizers.items():
        groups = json.loads((checkpoint / f"{name}_optimizer.json").read_text(encoding="utf-8"))
        tensors = load_file(checkpoint / f"{name}_optimizer.safetensors")
        optimizer.load_state_dict(_unflatten(tensors, groups))
    torch.set_rng_state(load_file(checkpoint / "rng.safetensors")["cpu"])
    return state


def _updates(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    return int(match.group(1)) if match else -1


def _complete(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if _updates(path) >= 0]
    for path in named:
        if not (path / "state.json").exists():
            warnings.warn(f"{path} is no whole checkpoint (no state.json) and is passed over", stacklevel=3)
    return sorted((path for path in named if (path / "state.json").exists()), key=_updates)


def _unique_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, tied ones once."""
    seen: dict[int, str] = {}
    tensors = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            tensors[name] = tensor
    return tensors


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_text(text: str, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flatten(state: dict[str, Any]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    tensors = {
        f"{number}.{name}": value if isinstance(value, Tensor) else torch.tensor(value)
        for number, entries in state["state"].items()
        for name, value in entries.items()
    }
    return tensors, state["param_groups"]


def _unflatten(tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor
    return {"state": state, "param_groups": groups}
