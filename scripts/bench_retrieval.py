"""Measure how fast indexes search, in this process and through the server, in one run.

    python scripts/bench_retrieval.py corpus1.jsonl.gz corpus2.jsonl.gz --questions nq.jsonl hotpotqa.jsonl

Prints a table in Markdown and writes everything to results.json in the work directory. Ratios are between
figures of the same run; the machine should have nothing else to do.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from bench import engines, load
from bench.report import report

from retrieval_index import build_bm25, open_index
from retrieval_index.analysis import PRESETS
from retrieval_index.types import RetrievalError


@dataclass(frozen=True)
class Arguments:
    """Measure search in this process and through the server."""

    corpus: tyro.conf.Positional[tuple[Path, ...]]
    questions: tuple[Path, ...]
    """Files with a `question` a line."""
    work: Path = Path("runs/bench_retrieval")
    """Where the indexes and results.json go."""
    preset: str = "stemmed"
    """BM25 parameters."""
    top_k: int = 3
    batch: int = 64
    seconds: float = 10.0
    """Of each measurement."""
    clients: tuple[int, ...] = (1, 16, 64, 256)
    backends: tuple[str, ...] = ("numpy", "numba")
    lucene: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Measure Lucene too (needs pyserini and Java)."""
    dense: Path | None = None
    """A dense index to measure as well."""


def read_questions(paths: tuple[Path, ...]) -> list[str]:
    questions = [json.loads(line)["question"] for path in paths for line in path.open(encoding="utf-8")]
    return list(dict.fromkeys(questions))  # each once: what comes again would be answered from a cache


def in_process(arguments: Arguments, queries: list[str], index: Path) -> dict[str, float]:
    """Queries a second of every engine."""
    numbers = {"batch": arguments.batch, "top_k": arguments.top_k, "seconds": arguments.seconds}
    found = {}
    for backend in arguments.backends:
        ours = open_index(index, backend=backend)
        found[f"bm25 ({backend})"] = engines.rate(ours.search, queries, **numbers)
        direct = engines.bm25s_direct(index, PRESETS[arguments.preset].as_dict(), backend)
        found[f"bm25s directly ({backend})"] = engines.rate(direct, queries, **numbers)
    if arguments.lucene:
        from retrieval_index.lucene import build_lucene

        folder = build_lucene(arguments.corpus, arguments.work / "lucene").path
        threads = os.cpu_count() or 1
        direct = engines.lucene_direct(folder, threads)
        engines.rate(direct, queries, **numbers)  # Java compiles for some seconds
        found["lucene"] = engines.rate(open_index(folder, threads=threads).search, queries, **numbers)
        found["pyserini's batch_search"] = engines.rate(direct, queries, **numbers)
    if arguments.dense:
        found["dense"] = engines.rate(open_index(arguments.dense).search, queries, **numbers)
    return found


def through_server(arguments: Arguments, queries: list[str], index: Path) -> dict[str, list[load.Load]]:
    """What clients see: single queries, whole batches, and answers that need no search."""
    found: dict[str, list[load.Load]] = {}
    singles = load.requests(queries, arguments.top_k, 1)
    # Without the cache: each query is to be searched.
    with load.server(load.SERVE, index, "--backend", arguments.backends[-1], "--cache-entries", "0") as port:
        for name, pool, size in (
            ("one query a request", singles, 1),
            (
                f"{arguments.batch} queries a request",
                load.requests(queries, arguments.top_k, arguments.batch),
                arguments.batch,
            ),
            ("GET /health", load.CONSTANT, 1),
        ):
            found[name] = loads(arguments, port, pool, size)
    with load.server(load.SERVE_CONSTANT) as port:
        found["one query a request, constant hits"] = loads(arguments, port, singles, 1)
    return found


def loads(arguments: Arguments, port: int, pool: list[bytes], size: int) -> list[load.Load]:
    """One row for each number of clients."""
    return [
        load.measure(port, pool, clients=clients, a_request=size, seconds=arguments.seconds)
        for clients in arguments.clients
    ]


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    try:
        queries = read_questions(arguments.questions)
        index = build_bm25(arguments.corpus, arguments.work / "bm25", parameters=PRESETS[arguments.preset]).path
        rates = in_process(arguments, queries, index)
        loads = through_server(arguments, queries, index)
    except (KeyError, ValueError, OSError, RetrievalError) as error:
        print(f"bench_retrieval: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(rates, loads, arguments.batch)))
    results = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "queries": len(queries),
        "in_process": rates,
        "server": {name: [asdict(row) for row in rows] for name, rows in loads.items()},
    }
    (arguments.work / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
