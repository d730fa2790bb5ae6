"""Metrics of a run: one JSON object a line in metrics.jsonl, and the same numbers in TensorBoard."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends lines to ``metrics.jsonl`` and mirrors them to TensorBoard event files.

    A resumed run first drops the lines after the checkpoint it resumes from, so that no update is there twice.
    """

    def __init__(self, run_dir: Path, *, keep_updates: int = 0, tensorboard: bool = True) -> None:
        self.path = run_dir / "metrics.jsonl"
        run_dir.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["update"] < keep_updates]
            write_text_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=keep_updates)

    def write(self, update: int, metrics: dict[str, float]) -> None:
        """Writes one line; a value that is not finite is written as null."""
        line: dict[str, Any] = {"update": update}
        for name, value in metrics.items():
            number = float(value)
            line[name] = number if math.isfinite(number) else None
            if self._tensorboard is not None:
                self._tensorboard.add_scalar(name, number, update)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a line cut by a crash is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").split("\n"):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("update"), int):
            lines.append(line)
    return lines


def write_text_atomically(path: Path, text: str) -> None:
    """Writes beside the file, syncs, renames: readers see the old text or the new, never half of one."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
