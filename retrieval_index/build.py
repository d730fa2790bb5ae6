"""Build a BM25 index; how builds stream, resume and publish is in `builder`.

Memory: one shard of passages and its postings, the vocabulary, and 16 bytes a passage for the ids.
"""

from __future__ import annotations

import os
from pathlib import Path

from retrieval_index.analysis import Analyzer, BM25Parameters
from retrieval_index.bm25 import (
    MATRIX_FILES,
    PARAMETERS_FILE,
    VOCABULARY_FILE,
    indexed_text,
    save_matrix_extras,
)
from retrieval_index.builder import BuildResult, run_build
from retrieval_index.corpus import CorpusPaths
from retrieval_index.postings import Shard, allocate_in, count_terms, merge_shards
from retrieval_index.staging import Progress, shard_path
from retrieval_index.types import Passage

__all__ = ["BuildResult", "build_bm25"]


def build_bm25(
    corpus_paths: CorpusPaths,
    output: str | os.PathLike[str],
    *,
    parameters: BM25Parameters | None = None,
    progress: Progress | None = None,
    shard_rows: int = 50_000,
) -> BuildResult:
    """Build, finish or reuse the BM25 index of a corpus.

    Args:
        corpus_paths: one file or several, read in order; see `read_corpus`.
        output: directory of the index. An index of another corpus or other parameters is replaced once
            the new one is complete; a directory that is not an index is refused.
        parameters: BM25's; the defaults of `BM25Parameters` if None.
        progress: called often with stage, done, total; what it raises stops the build, resumably.
        shard_rows: passages held in memory at once; does not change the result.

    Raises:
        FileNotFoundError, ValueError: a corpus that cannot be read or has a broken line or no passage.
        RetrievalError: the output is something else, or another build is writing it.
    """
    builder = _BM25Builder(parameters or BM25Parameters())
    return run_build(builder, corpus_paths, output, progress=progress, shard_rows=shard_rows)


class _BM25Builder:
    """Postings by shard, merged to a score matrix."""

    kind = "bm25"
    endings = ("npz",)

    def __init__(self, parameters: BM25Parameters) -> None:
        self._parameters = parameters
        self.parameters = self.shard_parameters = parameters.as_dict()
        self._analyzer: Analyzer | None = None

    def write_shard(self, partial: Path, number: int, rows: list[Passage]) -> None:
        analyzer = self._analyzer = self._analyzer or Analyzer(self._parameters)
        shard = count_terms(map(indexed_text, rows), analyzer.words, analyzer.terms)
        shard.save(shard_path(partial, number, "npz"))

    def finish(self, partial: Path, shards: int, tell: Progress) -> list[str]:
        visits = 0

        def on_shard() -> None:
            nonlocal visits
            visits += 1
            tell("score", visits, 2 * shards)

        matrix = merge_shards(
            lambda number: Shard.load(shard_path(partial, number, "npz")),
            shards,
            k1=self._parameters.k1,
            b=self._parameters.b,
            allocate=allocate_in(partial, MATRIX_FILES),
            on_shard=on_shard,
        )
        save_matrix_extras(matrix, self._parameters, partial)
        # The maps of the matrix are written back when they go out of use here.
        return [VOCABULARY_FILE, PARAMETERS_FILE, *MATRIX_FILES.values()]
