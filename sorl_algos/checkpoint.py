"""Exact resume: weights, optimiser, random states and counters of a run, as safetensors and JSON (never pickle).

A checkpoint is a directory ``step_000010`` (10 updates done) that appears by one rename when it is whole and goes by
one when it is removed; what a killed save or removal leaves behind has another name and is cleared away by the next
save. Weights that are split over ranks are stored whole: a run may go on with another number of ranks.
"""

from __future__ import annotations

import glob
import json
import os
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sorl_algos.distributed import agreed_maximum, rank
from sorl_algos.sharding import optimizer_tensors, split_like, split_optimizer_state, whole

_NAME = re.compile(r"step_(\d+)")
FORMAT = 1
KEPT = ("best_update", "before_collapse_update")
"""Entries of the state that name a checkpoint which retention never removes."""


def save_checkpoint(
    directory: Path,
    updates_done: int,
    *,
    modules: dict[str, nn.Module],
    optimizers: dict[str, torch.optim.Optimizer],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Writes ``directory/step_NNNNNN`` and removes the oldest beyond ``keep``.

    ``state`` is JSON. The checkpoints of the updates that its ``best_update`` and ``before_collapse_update`` name
    stay. Every rank must call it (weights may be split); rank 0 writes.
    """
    tensors, texts = {}, {}
    for name, module in modules.items():
        tensors[name] = _on_cpu(_unique_tensors(module))
    for name, optimizer in optimizers.items():
        flat, groups = _flatten(optimizer_tensors(optimizer))
        tensors[f"{name}_optimizer"] = _on_cpu(flat)
        texts[f"{name}_optimizer"] = json.dumps(groups)
    final = directory / f"step_{updates_done:06d}"
    if rank() == 0:
        tensors["rng"], texts["rng"] = _random_states()
        own = {"format": FORMAT, "updates_done": updates_done}
        texts["state"] = json.dumps(state | own, indent=1)
        for leftover in directory.glob("*.partial-*"):
            shutil.rmtree(leftover)
        write_directory(final, tensors, texts)
        protected = [state.get(name) for name in KEPT]
        for old in _complete(directory)[:-keep]:
            if _updates(old) not in protected:
                _remove(old)
    agreed_maximum(0, torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # wait until it is there
    return final


def write_directory(final: Path, tensors: dict[str, dict[str, Tensor]], texts: dict[str, str]) -> None:
    """``NAME.safetensors`` and ``NAME.json`` files, all or none of them, in place of what the directory held."""
    directory = final.parent
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(f"{glob.escape(final.name)}.partial-*"):
        shutil.rmtree(leftover)
    partial = directory / f"{final.name}.partial-{os.getpid()}"
    partial.mkdir()
    for name, found in tensors.items():
        save_file(found, partial / f"{name}.safetensors")
        _sync(partial / f"{name}.safetensors")
    for name, text in texts.items():
        _write_text(text, partial / f"{name}.json")
    _sync(partial)
    if final.exists():
        _remove(final)
    os.replace(partial, final)
    _sync(directory)


def _remove(checkpoint: Path) -> None:
    """Takes it away at once, by a rename, and then file by file: a kill must not leave half a checkpoint."""
    going = checkpoint.with_name(f"{checkpoint.name}.partial-{os.getpid()}-old")
    os.replace(checkpoint, going)
    shutil.rmtree(going)


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint with the most updates, or None. Numbers are compared as numbers."""
    complete = _complete(directory)
    return complete[-1] if complete else None


def load_checkpoint(
    checkpoint: Path, *, modules: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]
) -> dict[str, Any]:
    """Restores modules, optimisers and the random states of all libraries in place; returns the saved ``state``.

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
                tensor.copy_(split_like(tensors[key], tensor))
    for name, optimizer in optimizers.items():
        groups = json.loads((checkpoint / f"{name}_optimizer.json").read_text(encoding="utf-8"))
        tensors = load_file(checkpoint / f"{name}_optimizer.safetensors")
        optimizer.load_state_dict(split_optimizer_state(_unflatten(tensors, groups), optimizer))
    _restore_random_states(checkpoint)
    return state


def _random_states() -> tuple[dict[str, Tensor], str]:
    """Of torch (CPU and every GPU) as tensors, of Python and numpy as JSON."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{number}": found for number, found in enumerate(torch.cuda.get_rng_state_all())}
    kind, words, *rest = np.random.get_state(legacy=True)
    return tensors, json.dumps({"python": random.getstate(), "numpy": [kind, np.asarray(words).tolist(), *rest]})


def _restore_random_states(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "rng.safetensors")
    torch.set_rng_state(tensors["cpu"])
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            if f"cuda.{number}" in tensors:  # a run may go on with more GPUs
                torch.cuda.set_rng_state(tensors[f"cuda.{number}"], number)
    if (checkpoint / "rng.json").exists():  # warm starts made before it was written can still go on
        states = json.loads((checkpoint / "rng.json").read_text(encoding="utf-8"))
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        kind, words, *rest = states["numpy"]
        np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))


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
    """Parameters and persistent buffers, tied ones once; a frozen base comes from its own files, not from here."""
    seen: dict[int, str] = {}
    tensors = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (tensor.requires_grad or not isinstance(tensor, nn.Parameter)):
            seen[id(tensor)] = name
            tensors[name] = tensor
    return tensors


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on rank 0; the others take part in the gathering and keep nothing."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if rank() == 0:
            found[name] = full.contiguous().cpu()
    return found


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
