"""Where Lucene overtakes the memory-mapped matrix: queries a second under a limit of memory.

    python scripts/bench_crossover.py runs/bench_scale/bm25-2000000 runs/bench_scale/lucene-2000000 \
        --questions nq.jsonl --memory-mb 4000 2000 1000 500

Each measurement is a process of its own in a memory control group, where the pages of mapped files count too, as on a
machine with that much memory. The files are dropped from the page cache first, so each begins cold. Needs Linux and the
right to make control groups (usually root).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from retrieval_index import open_index

GROUP = "sorl-bench"
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Arguments:
    """Measure queries a second under limits of memory."""

    indexes: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of indexes over one corpus."""
    questions: tuple[Path, ...]
    """Files with a `question` a line."""
    memory_mb: tuple[int, ...] = (4000, 2000, 1000, 500)
    top_k: int = 3
    batch: int = 64
    seconds: float = 30.0
    """Of each measurement, after the index has been opened."""
    inside: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Measure one index in this very process: how the script calls itself."""


@contextmanager
def group(limit_mb: int) -> Iterator[Path]:
    """A memory control group; gives the file that takes the number of a process.

    Raises:
        OSError: there are no control groups here, or they may not be made.
    """
    old = (V1 / "memory.limit_in_bytes").exists()
    folder = (V1 if old else V2) / GROUP
    folder.mkdir(exist_ok=True)
    try:
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit_mb << 20))
        if not old:
            (folder / "memory.swap.max").write_text("0")
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def forget(index: Path) -> None:
    """Drop the files of an index from the page cache."""
    for path in index.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def ask(arguments: Arguments, index: Path) -> dict[str, float]:
    """Open and search; inside the control group."""
    queries = list(
        dict.fromkeys(json.loads(line)["question"] for path in arguments.questions for line in path.open("rb"))
    )
    begun = time.perf_counter()
    retriever = open_index(index, threads=os.cpu_count() or 1)
    retriever.search(["warm up"], 1)
    opened = time.perf_counter()
    done = 0
    while time.perf_counter() - opened < arguments.seconds:
        start = done % len(queries)
        retriever.search(queries[start : start + arguments.batch], arguments.top_k)
        done += len(queries[start : start + arguments.batch])
    passed = time.perf_counter() - opened
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"open_s": opened - begun, "queries_a_second": done / passed, "major_faults": faults}


def measure(arguments: Arguments, index: Path, limit_mb: int) -> dict[str, float] | None:
    """The same from outside; None if the process did not live."""
    forget(index)
    command = [sys.executable, __file__, str(index), "--questions", *map(str, arguments.questions), "--inside"]
    command += ["--top-k", str(arguments.top_k), "--batch", str(arguments.batch), "--seconds", str(arguments.seconds)]
    with group(limit_mb) as processes:
        joined = ["sh", "-c", f'echo $$ > "{processes}" && exec "$@"', "sh", *command]
        done = subprocess.run(joined, capture_output=True, text=True)
    if done.returncode in (0, -9, 137):  # killed: the memory was not enough
        return json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    raise OSError(f"measuring {index} failed: {done.stderr.strip()[-300:]}")


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    if arguments.inside:
        print(json.dumps(ask(arguments, arguments.indexes[0])))
        return 0
    print("| index | GB | memory MB | opened after s | queries/s | page faults |\n|---|---|---|---|---|---|")
    try:
        for index in arguments.indexes:
            size = sum(path.stat().st_size for path in index.rglob("*") if path.is_file()) / 1e9
            for limit in arguments.memory_mb:
                found = measure(arguments, index, limit)
                shown = (
                    "did not fit | | "
                    if found is None
                    else (f"{found['open_s']:.1f} | {found['queries_a_second']:,.0f} | {found['major_faults']:,.0f}")
                )
                print(f"| {index.name} | {size:.2f} | {limit} | {shown} |", flush=True)
    except OSError as error:
        print(f"bench_crossover: {error}; control groups of Linux are needed, usually as root", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
