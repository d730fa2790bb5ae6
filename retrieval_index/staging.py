"""The directory in which an index is built: locked, planned, flushed, and published all at once.

An index ``<output>`` is made in ``<output>.partial``. ``building.json`` in it says what is being built;
``shards/NNNNN.*`` are finished pieces, each with a note ``NNNNN.json`` that was written last.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrieval_index.manifest import MANIFEST_FILE, FileRecord, file_record, is_index
from retrieval_index.types import RetrievalError

Progress = Callable[[str, int, int], None]  # stage ("hash", "read", "score", "check"), done, total

PLAN_FILE = "building.json"
SHARDS = "shards"


def publish(partial: Path, output: Path) -> None:
    """Put the finished directory in its place; an index that is there moves aside first."""
    if (partial / SHARDS).exists():
        shutil.rmtree(partial / SHARDS)
    (partial / PLAN_FILE).unlink(missing_ok=True)
    old = output.with_name(output.name + ".old")
    if old.exists() and is_index(old):
        shutil.rmtree(old)
    if is_index(output):
        output.rename(old)
    partial.rename(output)
    sync(output.parent)
    if old.exists() and is_index(old):
        shutil.rmtree(old)


def partial_of(output: Path) -> Path:
    """Where an index is made."""
    return output.with_name(output.name + ".partial")


def check_output(output: Path) -> None:
    """Refuse to build where something else lies.

    Raises:
        RetrievalError: the directory, or the one with ``.partial``, holds something else than an index.
    """
    for directory, marker in ((output, MANIFEST_FILE), (partial_of(output), PLAN_FILE)):
        if not directory.exists():
            continue
        if not directory.is_dir():
            raise RetrievalError(f"{directory} is a file; name another directory for the index")
        ours = is_index(directory) or (marker == PLAN_FILE and (directory / PLAN_FILE).is_file())
        if not ours and any(path.name != PLAN_FILE + ".tmp" for path in directory.iterdir()):
            raise RetrievalError(
                f"{directory} holds something that is not an index and is left alone; name another directory"
            )


@contextmanager
def locked(partial: Path) -> Iterator[None]:
    """Hold the partial directory for this process alone; the lock goes with the process."""
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RetrievalError(f"another build is writing {partial}; wait for it or stop it") from error
        yield
    finally:
        os.close(handle)


def prepare(partial: Path, plan: dict[str, Any]) -> None:
    """Keep what an earlier build with the same plan left; clear away anything else of ours."""
    try:
        found = json.loads((partial / PLAN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found != plan:
        # An empty plan fits nothing: if the clearing is cut short, the next build clears again.
        write_atomically(partial / PLAN_FILE, "{}")
        clear(partial, keep=PLAN_FILE)
        write_atomically(partial / PLAN_FILE, json.dumps(plan))
    (partial / MANIFEST_FILE).unlink(missing_ok=True)  # of an index that turned out to be damaged
    (partial / SHARDS).mkdir(exist_ok=True)


def clear(directory: Path, keep: str = "") -> None:
    """Empty a directory but for one name."""
    for path in directory.iterdir():
        if path.name == keep:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def shard_path(partial: Path, number: int, ending: str) -> Path:
    """Where a file of a shard lies."""
    return partial / SHARDS / f"{number:05d}.{ending}"


def shard_note(partial: Path, number: int) -> dict[str, Any] | None:
    """What a finished shard says of itself; None if it is not finished."""
    path = shard_path(partial, number, "json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def hash_all(paths: list[Path], stage: str, tell: Progress) -> tuple[FileRecord, ...]:
    """Records of files, with progress."""
    total, done = sum(path.stat().st_size for path in paths), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        tell(stage, done, total)

    return tuple(file_record(path, on_bytes) for path in paths)


def size(file: Any) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's contents, or a directory's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
