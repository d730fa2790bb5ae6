"""Measure how building grows with the corpus: time, disk and peak memory.

    python scripts/bench_scale.py corpus1.jsonl.gz corpus2.jsonl.gz --passages 55000 500000 2000000

Larger corpora repeat the passages given with a share of their words exchanged for other words of the corpus, by a
seeded generator, so that the vocabulary and the lengths stay those of real text. Each build runs in a process of
its own, whose peak memory the system tells. A straight line through the last two sizes is carried on to the sizes
of --extrapolate; the formula is printed.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from retrieval_index import Passage, read_corpus
from retrieval_index.wikipedia import write_corpus

_BUILD = """
import sys
from retrieval_index.build import build_bm25
from retrieval_index.lucene import build_lucene
build = {"bm25": build_bm25, "lucene": build_lucene}[sys.argv[1]]
build(sys.argv[2], sys.argv[3])
"""


@dataclass(frozen=True)
class Arguments:
    """Measure how building grows with the corpus."""

    corpus: tyro.conf.Positional[tuple[Path, ...]]
    passages: tuple[int, ...] = (55_000, 500_000, 2_000_000)
    extrapolate: tuple[int, ...] = (21_015_324, 23_898_701)
    kind: Literal["bm25", "lucene"] = "bm25"
    exchanged: float = 0.2
    """Share of the words of a repeated passage that is exchanged."""
    work: Path = Path("runs/bench_scale")
    keep: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Keep the corpora and indexes."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a build took."""

    passages: int
    seconds: float
    cpu_seconds: float
    index_bytes: int
    memory_bytes: int


def grow(passages: list[Passage], count: int, exchanged: float) -> Iterator[Passage]:
    """The passages over and over; every round but the first with words exchanged."""
    picks = random.Random(0)
    words = [word for passage in passages[:5_000] for word in passage.text.split()]
    for number in range(count):
        own = passages[number % len(passages)]
        text = own.text
        if number >= len(passages):
            text = " ".join(picks.choice(words) if picks.random() < exchanged else word for word in text.split())
        yield Passage(str(number), own.title, text)


def build(kind: str, corpus: Path, output: Path, passages: int) -> Size:
    """Build in a process of its own."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", _BUILD, kind, str(corpus), str(output)], check=True)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Of all children that have ended, the largest: sizes grow, so it is this one.
    memory = after.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return Size(passages, seconds, cpu_seconds, size, memory)


def line(first: Size, second: Size, field: str) -> tuple[float, float]:
    """Slope a passage and value at none, through two sizes."""
    low, high = getattr(first, field), getattr(second, field)
    slope = (high - low) / (second.passages - first.passages)
    return slope, low - slope * first.passages


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    passages = list(read_corpus(arguments.corpus))
    arguments.work.mkdir(parents=True, exist_ok=True)
    sizes = []
    print("| passages | seconds | of the processor | index GB | peak memory GB |\n|---|---|---|---|---|")
    for count in sorted(arguments.passages):
        corpus, output = arguments.work / f"{count}.jsonl", arguments.work / f"{arguments.kind}-{count}"
        write_corpus(grow(passages, count, arguments.exchanged), corpus)
        sizes.append(build(arguments.kind, corpus, output, count))
        own = sizes[-1]
        print(
            f"| {count:,} | {own.seconds:.1f} | {own.cpu_seconds:.1f} | {own.index_bytes / 1e9:.2f} "
            f"| {own.memory_bytes / 1e9:.2f} |",
            flush=True,
        )
        if not arguments.keep:
            corpus.unlink()
            shutil.rmtree(output)
    if len(sizes) > 1:
        for field in ("cpu_seconds", "index_bytes", "memory_bytes"):
            slope, base = line(sizes[-2], sizes[-1], field)
            found = ", ".join(f"{count:,}: {base + slope * count:,.0f}" for count in arguments.extrapolate)
            print(f"{field} = {base:,.4g} + {slope:,.4g} * passages; {found}")
    results = [{name: getattr(own, name) for name in Size.__slots__} for own in sizes]
    (arguments.work / f"{arguments.kind}.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
