"""How long a build will take and what it will need, from a sample of the corpus, before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice

from retrieval_index.analysis import Analyzer, BM25Parameters
from retrieval_index.corpus import CorpusPaths, as_paths, count_rows, read_corpus
from retrieval_index.passages import encode_passage
from retrieval_index.postings import Shard, count_terms
from retrieval_index.types import Passage

_COUNT_BELOW = 16 << 20  # files of this many bytes in all are counted row by row instead of guessed
_TIMED_ROWS = 2_000

# Heaps' law: the vocabulary grows as a power of the text; 0.65 lies at the upper end for English.
_HEAPS = 0.65
_BYTES_A_TERM = 190  # a Python string, its entry in a dict and a number
_BYTES_A_TOKEN = 40  # of one shard while it is counted: word, ids and sort keys
_BASE_MEMORY = 120 << 20  # interpreter, numpy and bm25s


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a build is expected to take. Guesses from a sample, good to perhaps 30 %."""

    passages: int
    exact: bool  # the passages were counted, not guessed
    seconds: float
    index_bytes: int
    scratch_bytes: int  # on top of the index, while it is built
    memory_bytes: int


def estimate_build(
    corpus: CorpusPaths, parameters: BM25Parameters | None = None, *, shard_rows: int = 50_000
) -> Estimate:
    """Read the head of a corpus, time the work on it, and scale up.

    Raises:
        FileNotFoundError, ValueError: as `read_corpus`, for the rows looked at; ValueError for a
            corpus without passages.
    """
    paths = as_paths(corpus)
    total = sum(path.stat().st_size for path in paths)
    exact = total < _COUNT_BELOW
    started = time.perf_counter()
    sample, consumed = _head(paths, _TIMED_ROWS if exact else None)
    read_seconds = time.perf_counter() - started
    if not sample:
        raise ValueError(f"the corpus has no passage: {', '.join(map(str, paths))}")
    rows = count_rows(paths) if exact else round(len(sample) * total / consumed)

    analyzer = Analyzer(parameters or BM25Parameters())
    timed = sample[:_TIMED_ROWS]
    started = time.perf_counter()
    stored = sum(len(encode_passage(passage)) for passage in timed)
    shard = count_terms((f"{p.title} {p.text}" for p in timed), analyzer.words, analyzer.terms)
    work_seconds = time.perf_counter() - started
    return _scale(rows, exact, shard, stored, read_seconds / len(sample) + work_seconds / len(timed), shard_rows)


def _scale(rows: int, exact: bool, shard: Shard, stored: int, row_seconds: float, shard_rows: int) -> Estimate:
    sampled = len(shard.lengths)
    scale = rows / sampled
    tokens = int(shard.lengths.sum()) / sampled
    postings = round(len(shard.counts) * scale)
    vocabulary = round(len(shard.terms) * max(scale, 1) ** _HEAPS)
    held = min(rows, shard_rows)
    memory = _BASE_MEMORY + vocabulary * _BYTES_A_TERM + round(held * (3 * stored / sampled + tokens * _BYTES_A_TOKEN))
    memory += min(rows, 1_000_000) * 150 + max(rows - 1_000_000, 0) * 16
    return Estimate(
        passages=rows,
        exact=exact,
        seconds=rows * row_seconds * 1.3 + 0.5,  # scoring, hashing and writing out
        index_bytes=round(stored * scale) + 8 * rows + 8 * postings + 25 * vocabulary,
        scratch_bytes=12 * postings + 12 * rows,
        memory_bytes=memory,
    )


def _head(paths: list, rows: int | None) -> tuple[list[Passage], int]:
    """The first rows, or with None as many as 16 MB of file hold; and the file bytes they took."""
    consumed = 0

    def on_bytes(count: int) -> None:
        nonlocal consumed
        consumed += count

    sample: list[Passage] = []
    for passage in islice(read_corpus(paths, on_bytes=on_bytes), rows):
        sample.append(passage)
        if rows is None and consumed >= _COUNT_BELOW:
            break
    return sample, consumed
