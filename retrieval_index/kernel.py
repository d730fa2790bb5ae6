"""The compiled inner loop of BM25: add up the columns of each query's terms and keep the best passages.

A query with few postings notes the passages it touches, so that it costs its postings and not the corpus; one with
many adds without asking and goes through all scores once. Compiled once for a machine and kept beside this file (or in
numba's cache directory; where neither can be written, each process compiles anew); it runs without Python's lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

BLOCK = 128
SPARSE = 8  # a query whose postings are fewer than passages / SPARSE is followed by a list, others by a scan


def _compiled(function: Any) -> Any:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no directory to keep it in
        return njit(nogil=True)(function)


@_compiled
def _worse(score, row, other_score, other_row):  # type: ignore[no-untyped-def]
    """Whether a hit ranks behind another: a lower score, or the same score and a later place."""
    return score < other_score or (score == other_score and row > other_row)


@_compiled
def _sink(scores, rows, place, size):  # type: ignore[no-untyped-def]
    """Restores a heap with the worst hit on top after its entry at ``place`` was replaced."""
    score, row = scores[place], rows[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _worse(scores[child + 1], rows[child + 1], scores[child], rows[child]):
            child += 1
        if not _worse(scores[child], rows[child], score, row):
            break
        scores[place], rows[place] = scores[child], rows[child]
        place = child
    scores[place], rows[place] = score, row


@_compiled
def _offer(scores, rows, size, depth, score, row):  # type: ignore[no-untyped-def]
    """Takes a hit into the best ``depth``, a heap once it is full; returns how many there are."""
    if size < depth:
        if score > 0:
            scores[size], rows[size] = score, row
            size += 1
            if size == depth:
                for parent in range(depth // 2 - 1, -1, -1):
                    _sink(scores, rows, parent, depth)
    elif _worse(scores[0], rows[0], score, row):
        scores[0], rows[0] = score, row
        _sink(scores, rows, 0, depth)
    return size


@_compiled
def _scan(scores, rows, depth, totals):  # type: ignore[no-untyped-def]
    """Offers every passage, in order; most are turned away by one comparison."""
    size, row, passages = 0, 0, len(totals)
    while row < passages and size < depth:
        size = _offer(scores, rows, size, depth, totals[row], row)
        row += 1
    if size == depth:
        # Blocks are turned away whole: whole numbers of the same bits order as positive floats do, and
        # this loop over them has no exit, so it compiles to vector instructions.
        bits, worst = totals.view(np.uint32), scores[:1].view(np.uint32)
        while row < passages:
            end = min(row + BLOCK, passages)
            better = False
            for place in range(row, end):
                better |= bits[place] > worst[0]
            if better:
                for place in range(row, end):
                    if totals[place] > scores[0]:  # an equal score further on ranks behind
                        scores[0], rows[0] = totals[place], place
                        _sink(scores, rows, 0, depth)
            row = end
    return size


@_compiled
def rank_queries(columns, starts, depth, data, indices, indptr, passages):  # type: ignore[no-untyped-def]
    """The ``depth`` best passages of each of Q queries, equal scores in order of place.

    Args:
        columns: int64 ``(n,)``, the columns of all queries' terms, one query after the other.
        starts: int64 ``(Q + 1,)``, where each query's columns begin.
        data, indices, indptr: the score matrix by columns (`postings`); every score is positive or zero.
        passages: its rows.

    Returns:
        rows int64 ``(Q, depth)``, scores float32 ``(Q, depth)`` and the number of hits ``(Q,)``. Scores are added in
        the order of the columns in float32, as numpy does, so both give the same bits.
    """
    queries = len(starts) - 1
    out_rows = np.zeros((queries, depth), np.int64)
    out_scores = np.zeros((queries, depth), np.float32)
    found = np.zeros(queries, np.int64)
    totals = np.zeros(passages, np.float32)
    touched = np.empty(passages // SPARSE + 1, np.uint32)
    for query in range(queries):
        postings = 0
        for place in range(starts[query], starts[query + 1]):
            postings += indptr[columns[place] + 1] - indptr[columns[place]]
        sparse = postings * SPARSE <= passages
        seen = 0
        for place in range(starts[query], starts[query + 1]):
            first, last = np.uint64(indptr[columns[place]]), np.uint64(indptr[columns[place] + 1])
            if sparse:
                for posting in range(first, last):
                    row = np.uint32(indices[posting])  # unsigned: no test for negative places in the loop
                    if totals[row] == 0:
                        touched[seen] = row  # twice where the score is 0 itself: no harm, it is no hit
                        seen += 1
                    totals[row] += data[posting]
            else:
                for posting in range(first, last):
                    totals[np.uint32(indices[posting])] += data[posting]
        scores, rows = out_scores[query], out_rows[query]
        if sparse:
            size = 0
            for number in range(seen):
                row = touched[number]
                size = _offer(scores, rows, size, depth, totals[row], np.int64(row))
                totals[row] = 0
        else:
            size = _scan(scores, rows, depth, totals)
            totals[:] = 0
        if size < depth:
            for parent in range(size // 2 - 1, -1, -1):
                _sink(scores, rows, parent, size)
        found[query] = size
        for end in range(size - 1, 0, -1):  # the worst goes to the end: best first
            scores[0], scores[end] = scores[end], scores[0]
            rows[0], rows[end] = rows[end], rows[0]
            _sink(scores, rows, 0, end)
    return out_rows, out_scores, found
