"""From analysed text to the score matrix of BM25, shard by shard, with numpy alone.

The matrix has a row for each passage and a column for each term and is stored by columns (CSC):
``indptr`` int64 (V + 1,), ``indices`` int32 (nnz,) the passages, ``data`` float32 (nnz,) the scores.
Scores are computed when the index is built ("eager" BM25, Lù, 2024, arXiv:2407.03618), so a search
only adds up columns. Terms are numbered in the order in which the corpus first uses them, whatever
the shards: the same corpus gives the same bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = Callable[[str], list[str]]  # a text's words, before stop words and stemming
Terms = Callable[[list[str]], list[str | None]]  # the term of each distinct word; None for a stop word
Allocate = Callable[[str, type[Any], int], NDArray[Any]]  # an array of a name, type and length


@dataclass(frozen=True, slots=True)
class Shard:
    """Term counts of consecutive passages; postings sorted by term, then passage."""

    terms: list[str]  # in order of first use
    lengths: NDArray[np.int32]  # (rows,) terms in each passage, stop words not counted
    columns: NDArray[np.int32]  # (nnz,) number of the term in `terms`
    rows: NDArray[np.int32]  # (nnz,) number of the passage in this shard
    counts: NDArray[np.int32]  # (nnz,) how often the passage has the term

    def save(self, path: Path) -> None:
        """Write one file; no pickle in it."""
        blob = np.frombuffer("\n".join(self.terms).encode("utf-8"), np.uint8)
        with path.open("wb") as file:
            np.savez(
                file,
                terms=blob,
                lengths=self.lengths,
                columns=self.columns,
                rows=self.rows,
                counts=self.counts,
            )

    @classmethod
    def load(cls, path: Path) -> Shard:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            text = arrays["terms"].tobytes().decode("utf-8")
            terms = text.split("\n") if text else []  # a term holds no white space, so no newline
            return cls(terms, arrays["lengths"], arrays["columns"], arrays["rows"], arrays["counts"])


def count_terms(texts: Iterable[str], words: Words, terms: Terms) -> Shard:
    """Analyse and count the texts of one shard."""
    word_ids: dict[str, int] = {}
    flat: list[NDArray[np.int32]] = []
    for text in texts:
        found = words(text)
        flat.append(np.array([word_ids.setdefault(word, len(word_ids)) for word in found], np.int32))
    term_ids: dict[str, int] = {}
    term_of_word = np.full(len(word_ids), -1, np.int32)
    for number, term in enumerate(terms(list(word_ids))):
        if term is not None:
            term_of_word[number] = term_ids.setdefault(term, len(term_ids))

    row_of = np.repeat(np.arange(len(flat), dtype=np.int32), [len(ids) for ids in flat])
    occurrences = term_of_word[np.concatenate(flat)] if flat else np.empty(0, np.int32)
    kept = occurrences >= 0
    occurrences, row_of = occurrences[kept], row_of[kept]
    keys, counts = np.unique(occurrences.astype(np.int64) << 32 | row_of, return_counts=True)
    return Shard(
        terms=list(term_ids),
        lengths=np.bincount(row_of, minlength=len(flat)).astype(np.int32),
        columns=(keys >> 32).astype(np.int32),
        rows=(keys & 0xFFFFFFFF).astype(np.int32),
        counts=counts.astype(np.int32),
    )


@dataclass(frozen=True, slots=True)
class Matrix:
    """The finished score matrix with its vocabulary (term to column)."""

    vocabulary: dict[str, int]
    data: NDArray[np.float32]
    indices: NDArray[np.int32]
    indptr: NDArray[np.int64]
    passages: int


def merge_shards(
    load: Callable[[int], Shard],
    shard_count: int,
    *,
    k1: float,
    b: float,
    allocate: Allocate | None = None,
    on_shard: Callable[[], None] = lambda: None,
) -> Matrix:
    """Put shards together and score them.

        score = idf * tf / (tf + k1 * (1 - b + b * length / mean length))
        idf = ln(1 + (N - n + 0.5) / (n + 0.5))

    the form Lucene uses since version 8 (Kamphuis et al., ECIR 2020), worked out in float64 and kept
    as float32. N is the number of passages, n of those that have the term.

    Args:
        load: gives shard i; called twice for each, so that only one need be in memory.
        allocate: makes the array `name` of a type and length, on disk if need be; in memory by default.
        on_shard: called after each visit (2 * shard_count times).
    """
    make = allocate or (lambda _name, dtype, size: np.empty(size, dtype))
    vocabulary: dict[str, int] = {}
    column_maps: list[NDArray[np.int32]] = []
    frequencies = np.zeros(0, np.int64)
    passages, total_length = 0, 0
    for number in range(shard_count):
        shard = load(number)
        mapping = [vocabulary.setdefault(term, len(vocabulary)) for term in shard.terms]
        column_maps.append(np.array(mapping, np.int32))
        frequencies = np.pad(frequencies, (0, len(vocabulary) - len(frequencies)))
        frequencies[column_maps[-1]] += np.bincount(shard.columns, minlength=len(shard.terms))
        passages += len(shard.lengths)
        total_length += int(shard.lengths.sum(dtype=np.int64))
        on_shard()

    idf = np.array([math.log(1 + (passages - n + 0.5) / (n + 0.5)) for n in frequencies.tolist()], np.float32)
    mean_length = total_length / max(passages, 1)
    indptr = make("indptr", np.int64, len(vocabulary) + 1)
    indptr[0] = 0
    np.cumsum(frequencies, out=indptr[1:])
    data = make("data", np.float32, int(indptr[-1]))
    indices = make("indices", np.int32, int(indptr[-1]))
    filled = np.array(indptr[:-1])  # where the next posting of each term goes
    first_row = 0
    for number in range(shard_count):
        shard = load(number)
        own = np.bincount(shard.columns, minlength=len(shard.terms))  # postings of each of its terms
        columns = column_maps[number]
        starts = np.cumsum(own) - own
        places = np.repeat(filled[columns] - starts, own) + np.arange(len(shard.columns))
        tf = shard.counts.astype(np.float64)
        lengths = shard.lengths[shard.rows]
        norm = k1 * (1 - b + b * lengths / mean_length) if mean_length else 0.0
        data[places] = idf[columns][shard.columns] * (tf / (norm + tf))
        indices[places] = first_row + shard.rows
        filled[columns] += own
        first_row += len(shard.lengths)
        on_shard()
    return Matrix(vocabulary, data, indices, indptr, passages)


def allocate_in(directory: Path, names: dict[str, str]) -> Allocate:
    """An `allocate` for `merge_shards` that makes .npy files and maps them."""

    def allocate(name: str, dtype: type[Any], size: int) -> NDArray[Any]:
        path = os.fspath(directory / names[name])
        return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))

    return allocate
