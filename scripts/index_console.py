"""What scripts/build_index.py shows on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from retrieval_index.builder import BuildResult
from retrieval_index.estimate import Estimate

STAGES = {
    "hash": "hashing the corpus",
    "read": "reading and counting terms",
    "encode": "reading and encoding",
    "score": "scoring",
    "train": "training lists and codes",
    "add": "filling the index",
    "check": "hashing the index",
}


class BuildBars:
    """One bar a stage of a build."""

    def __init__(self, console: Console, kind: str) -> None:
        columns = (TextColumn("{task.description:27}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}
        self._kind = kind

    def __enter__(self) -> BuildBars:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """The `Progress` of a build."""
        if stage not in self._tasks:
            named = "encode" if stage == "read" and self._kind == "dense" else stage
            self._tasks[stage] = self._bars.add_task(STAGES[named])
        self._bars.update(self._tasks[stage], completed=done, total=total)


def describe(guess: Estimate) -> str:
    """An estimate in a line."""
    building = guess.index_bytes + guess.scratch_bytes
    return (
        f"{'' if guess.exact else 'about '}{guess.passages:,} passages: about {duration(guess.seconds)},"
        f" {size(guess.index_bytes)} of disk ({size(building)} while building), {size(guess.memory_bytes)} of memory"
    )


def result_line(result: BuildResult, *, verified: bool) -> str:
    """A finished build in a line."""
    what = "was there already, for the same corpus and parameters" if result.reused else "is ready"
    taken = f", {result.resumed_shards} shards taken over from an interrupted build" if result.resumed_shards else ""
    checked = ", all hashes and rows verified" if verified else ""
    return f"{result.path} {what}: {result.manifest.passages:,} passages, {result.seconds:.1f} s{taken}{checked}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB" if count < 1000 else f"{count / 1000:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
