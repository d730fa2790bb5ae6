from __future__ import annotations

import importlib.abc
import importlib.util
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_index import BM25Parameters, Passage, RetrievalError, Retriever, build_bm25
from retrieval_index.bm25 import BM25Index, best, choose_backend, load_matrix
from retrieval_index.passages import PassageList
from retrieval_index.postings import Matrix, count_terms, merge_shards

PLAIN = BM25Parameters(k1=0.9, b=0.4, tokens="whitespace", stop_words="none")
# Numba compiles for some seconds at its first search.
NUMBA = [pytest.mark.slow, pytest.mark.skipif(not find_spec("numba"), reason="numba is not installed")]
BACKENDS = ["numpy", pytest.param("numba", marks=NUMBA)]


def index(texts: list[str], parameters: BM25Parameters = PLAIN, backend: str = "numpy") -> BM25Index:
    return BM25Index.from_passages(
        [Passage(str(number), "", text) for number, text in enumerate(texts)], parameters, backend=backend
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tie_comes_in_corpus_order_and_zero_is_no_hit(backend: str) -> None:
    # N = 5, n = 2: idf = ln(1 + 3.5 / 2.5) = 0.875469. Mean length 7/5, length 2, tf 1:
    # 1 / (1 + 0.9 * (0.6 + 0.4 * 2 / 1.4)) = 0.486788. Product 0.426167.
    hits = index(["alpha", "beta", "gamma", "red kite", "red deer"], backend=backend).search(["red"], 5)[0]
    assert [hit.passage.id for hit in hits] == ["3", "4"]
    assert [hit.score for hit in hits] == pytest.approx([0.426167, 0.426167], abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_across_the_last_place_go_to_the_first_in_the_corpus(backend: str) -> None:
    texts = ["blue"] + ["red sky"] * 9 + ["red red"]
    hits = index(texts, backend=backend).search(["red"], 4)[0]
    assert [hit.passage.id for hit in hits] == ["10", "1", "2", "3"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_hits_asked_for_than_there_are_passages(backend: str) -> None:
    hits = index(["a cat purrs", "a dog barks", "a fish swims"], backend=backend).search(["cat dog fish"], 10)[0]
    assert [hit.passage.id for hit in hits] == ["0", "1", "2"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("texts", [["", "  ", "..."], [""]])
def test_a_corpus_without_terms_has_no_hits(texts: list[str], backend: str) -> None:
    assert index(texts, BM25Parameters(), backend).search(["anything"], 2) == [[]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_without_known_terms_have_no_hits(backend: str) -> None:
    queries = ["", "   ", "the of and", "xylophone", "???", "cat"]
    hits = index(["the cat", "of dogs", ""], BM25Parameters(), backend).search(queries, 3)
    assert [len(own) for own in hits] == [0, 0, 0, 0, 0, 1]
    assert index(["cat"], BM25Parameters(), backend).search([], 3) == []
    assert index(["cat"], BM25Parameters(), backend).search(["", "the"], 3) == [[], []]


def test_it_is_a_retriever() -> None:
    assert isinstance(index(["cat"]), Retriever)


def test_titles_are_searched() -> None:
    passages = [Passage("1", "Lima", "is a city"), Passage("2", "", "no title")]
    assert [hit.passage.id for hit in BM25Index.from_passages(passages).search(["lima"], 3)[0]] == ["1"]


@pytest.mark.parametrize(
    ("queries", "top_k", "error", "says"),
    [
        ("one string", 3, TypeError, "list of queries"),
        (["fine", None], 3, TypeError, "NoneType"),
        (["fine"], 0, ValueError, "top_k"),
    ],
)
def test_what_is_not_a_batch_is_refused(queries, top_k: int, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        index(["cat"]).search(queries, top_k)


WORDS = st.sampled_from(["red", "blue", "kite", "deer", "the", "sea"])
TEXTS = st.lists(st.lists(WORDS, max_size=6).map(" ".join), min_size=1, max_size=12)


def by_hand(texts: list[str], query: str, top_k: int, k1: float, b: float) -> list[tuple[str, float]]:
    """Lucene's BM25, straight from the formula, a passage at a time."""
    split = [text.split() for text in texts]
    mean = sum(map(len, split)) / len(split)
    scored = []
    for number, words in enumerate(split):
        score, counts = 0.0, Counter(words)
        for term in query.split():
            holders = sum(term in other for other in split)
            if counts[term]:
                idf = math.log(1 + (len(split) - holders + 0.5) / (holders + 0.5))
                score += idf * counts[term] / (counts[term] + k1 * (1 - b + b * len(words) / mean))
        if score > 0:
            # Rounded so that sums that differ in the last bit of float32 count as the ties they are.
            scored.append((-round(score, 5), number))
    return [(str(number), -score) for score, number in sorted(scored)[:top_k]]


@given(
    TEXTS,
    st.lists(WORDS, min_size=1, max_size=4).map(" ".join),
    st.integers(1, 14),
    st.floats(0, 2),
    st.floats(0, 1),
)
def test_scores_are_those_of_the_formula(texts: list[str], query: str, top_k: int, k1: float, b: float) -> None:
    parameters = BM25Parameters(k1=k1, b=b, tokens="whitespace", stop_words="none")
    hits = index(texts, parameters).search([query], top_k)[0]
    expected = by_hand(texts, query, top_k, k1, b)
    assert [hit.score for hit in hits] == pytest.approx([score for _, score in expected], abs=3e-5)
    by_score = dict(by_hand(texts, query, len(texts), k1, b))
    for hit in hits:
        assert hit.score == pytest.approx(by_score[hit.passage.id], abs=3e-5)


@given(TEXTS, st.lists(st.lists(WORDS, max_size=4).map(" ".join), max_size=5), st.integers(1, 14))
def test_a_batch_is_as_good_as_single_queries(texts: list[str], queries: list[str], top_k: int) -> None:
    own = index(texts)
    assert own.search(queries, top_k) == [own.search([query], top_k)[0] for query in queries]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("numba"), reason="numba is not installed")
@given(TEXTS, st.lists(st.lists(WORDS, max_size=4).map(" ".join), max_size=5), st.integers(1, 14))
def test_both_backends_agree_to_the_bit(texts: list[str], queries: list[str], top_k: int) -> None:
    assert index(texts).search(queries, top_k) == index(texts, backend="numba").search(queries, top_k)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("numba"), reason="numba is not installed")
@pytest.mark.parametrize("top_k", [1, 3, 40, 2000])
def test_both_backends_agree_on_rare_and_on_common_terms(top_k: int) -> None:
    # Term t is in one passage of (t + 1)**2: queries of late terms are followed by a list of passages, of early ones
    # by a scan; few different lengths make ties at every depth.
    picks = np.random.default_rng(0)
    texts = [" ".join(f"t{t}" for t in range(12) if picks.random() < (t + 1) ** -2) for _ in range(1500)]
    queries = [f"t{first} t{second}" for first in range(12) for second in range(12)]
    compiled = index(texts, backend="numba").search(queries, top_k)
    assert compiled == index(texts).search(queries, top_k)
    assert {len(hits) for hits in compiled} != {0}


@given(TEXTS, st.integers(1, 5))
def test_shards_do_not_change_the_matrix(texts: list[str], size: int) -> None:
    def words(text: str) -> list[str]:
        return text.split()

    def terms(found: list[str]) -> list[str | None]:
        return [None if word == "the" else word for word in found]

    shards = [count_terms(texts[start : start + size], words, terms) for start in range(0, len(texts), size)]
    whole = merge_shards(lambda _: count_terms(texts, words, terms), 1, k1=1.2, b=0.7)
    parts = merge_shards(shards.__getitem__, len(shards), k1=1.2, b=0.7)
    assert list(parts.vocabulary.items()) == list(whole.vocabulary.items())
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=20), st.integers(1, 22))
def test_best_is_a_stable_sort_of_what_is_above_zero(scores: list[float], depth: int) -> None:
    rows, values = best(np.array(scores, np.float32), depth)
    expected = sorted((n for n, score in enumerate(scores) if score > 0), key=lambda n: -scores[n])[:depth]
    assert rows.tolist() == expected
    assert values.tolist() == [scores[n] for n in expected]


def test_the_files_are_those_that_bm25s_would_make(tmp_path: Path, write_corpus) -> None:
    texts = ["the red kite over the sea", "a red deer", "", "deer and kite and deer", "sea"]
    path = build_bm25(write_corpus(texts), tmp_path / "index").path
    theirs = bm25s.BM25()
    tokens = bm25s.tokenize(texts, show_progress=False)
    theirs.index(tokens, show_progress=False)
    ours = load_matrix(path)
    loaded = bm25s.BM25.load(path, mmap=True)
    assert loaded.scores["num_docs"] == 5
    for term, column in tokens.vocab.items():
        if not term:  # bm25s adds an empty term
            continue
        for matrix, start in ((ours, ours.vocabulary[term]), (loaded.scores, loaded.vocab_dict[term])):
            arrays = vars_of(matrix)
            span = slice(arrays["indptr"][start], arrays["indptr"][start + 1])
            own = slice(theirs.scores["indptr"][column], theirs.scores["indptr"][column + 1])
            np.testing.assert_array_equal(arrays["data"][span], theirs.scores["data"][own])
            np.testing.assert_array_equal(arrays["indices"][span], theirs.scores["indices"][own])


def vars_of(matrix: Matrix | dict) -> dict:
    return matrix if isinstance(matrix, dict) else {n: getattr(matrix, n) for n in ("data", "indices", "indptr")}


def test_one_index_serves_many_threads() -> None:
    own = index(["red kite", "blue sea", "red sea", "deer"] * 20, BM25Parameters(stemmer="english"))
    queries = ["red", "kites", "blue deer", "seas"] * 50
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda query: own.search([query], 5)[0], queries))
    assert answers == own.search(queries, 5)


def test_numba_is_chosen_for_large_corpora_only() -> None:
    assert choose_backend("auto", 10_000) == "numpy"
    assert choose_backend("auto", 5_000_000) == ("numba" if find_spec("numba") else "numpy")
    assert choose_backend("numpy", 5_000_000) == "numpy"
    with pytest.raises(ValueError, match="cuda"):
        choose_backend("cuda", 1)


def test_matrix_and_passages_of_different_length_are_refused() -> None:
    matrix = merge_shards(lambda _: count_terms(["a", "b"], str.split, list), 1, k1=1.0, b=0.5)
    with pytest.raises(RetrievalError, match="2 rows but 1 passages"):
        BM25Index(matrix, PassageList([Passage("1", "", "a")]), PLAIN)


class Nowhere(importlib.abc.SourceLoader):
    """Loads a module's source under the name of a file that is not there, beside which nothing can be kept."""

    def get_filename(self, fullname: str) -> str:
        return "<nowhere>"

    def get_data(self, path: str) -> bytes:
        assert kernel_source.origin
        return Path(kernel_source.origin).read_bytes()


kernel_source = importlib.util.find_spec("retrieval_index.kernel")


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("numba"), reason="numba is not installed")
def test_the_loop_runs_where_nothing_compiled_can_be_kept() -> None:
    spec = importlib.util.spec_from_loader("kernel_from_nowhere", Nowhere())
    assert spec and spec.loader
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    # Terms 0, 1: passage 0 has 1.0, passage 2 has 2.0 and 0.5; the query asks for term 0 twice.
    data, indices = np.array([1.0, 2.0, 0.5], np.float32), np.array([0, 2, 2], np.int32)
    rows, scores, found = kernel.rank_queries(
        np.array([0, 0, 1]), np.array([0, 3]), 3, data, indices, np.array([0, 2, 3]), 3
    )
    assert (found.tolist(), rows[0, :2].tolist(), scores[0, :2].tolist()) == ([2], [2, 0], [4.5, 2.0])
