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
    With ``write`` False (all ranks but the first) nothing happens.
    """

    def __init__(
        self, run_dir: Path, *, keep_updates: int = 0, tensorboard: bool = True, write: bool = True
    ) -> None:
        self.path = run_dir / "metrics.jsonl"
        self._file: Any = None
        if not write:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        drop_updates(self.path, keep_updates=keep_updates)
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=keep_updates)

    def write(self, update: int, metrics: dict[str, float]) -> None:
        """Writes one line, safe from a crash when it returns; a value that is not finite is written as null."""
        if self._file is None:
            return
        line: dict[str, Any] = {"update": update}
        for name, value in metrics.items():
            number = float(value)
            line[name] = number if math.isfinite(number) else None
            if self._tensorboard is not None:
                self._tensorboard.add_scalar(name, number, update)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # the checkpoint that follows must not know of an update that this file lost

    def close(self) -> None:
        """Ends the files; nothing may be written afterwards."""
        if self._file is None:
            return
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


def drop_updates(path: Path, *, keep_updates: int) -> None:
    """Takes the lines of updates that will be made again out of a JSONL file; a missing file stays missing."""
    if path.exists():
        kept = [line for line in read_metrics(path) if line["update"] < keep_updates]
        write_text_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))


def write_text_atomically(path: Path, text: str) -> None:
    """Writes beside the file, syncs, renames: readers see the old text or the new, never half of one."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
