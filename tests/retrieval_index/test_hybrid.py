from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_index import Hit, Passage, RetrievalError, Retriever
from retrieval_index.bm25 import BM25Index
from retrieval_index.hybrid import HybridRetriever


class Fixed:
    """Finds these passages for every query, in this order."""

    def __init__(self, *names: str, text: str = "x") -> None:
        self.hits = [Hit(Passage(name, "", text), 9.0 - rank) for rank, name in enumerate(names)]
        self.depth = 0

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.depth = top_k
        return [self.hits[:top_k] for _ in queries]


def names(hits: list[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


def test_ranks_are_fused() -> None:
    # k = 60. b: 1/62 + 1/61 = 0.032522; a: 1/61 + 1/63 = 0.032266; c: 1/63 = 0.015873; d: 1/62 = 0.016129.
    hybrid = HybridRetriever([Fixed("a", "b", "c"), Fixed("b", "d", "a")])
    hits = hybrid.search(["query"], 10)[0]
    assert names(hits) == ["b", "a", "d", "c"]
    assert [hit.score for hit in hits] == pytest.approx([0.032522, 0.032266, 0.016129, 0.015873], abs=1e-6)
    assert isinstance(hybrid, Retriever)


def test_weights_shift_the_balance() -> None:
    pair = [Fixed("a", "b"), Fixed("b", "a")]
    assert names(HybridRetriever(pair, weights=[2, 1]).search(["q"], 2)[0]) == ["a", "b"]
    assert names(HybridRetriever(pair, weights=[1, 2]).search(["q"], 2)[0]) == ["b", "a"]
    assert names(HybridRetriever(pair).search(["q"], 2)[0]) == ["a", "b"]  # a tie: the first ranking's order


def test_rankings_are_read_to_the_depth() -> None:
    first, second = Fixed(*"abcdefgh"), Fixed("h")
    assert names(HybridRetriever([first, second], depth=8).search(["q"], 1)[0]) == ["h"]
    assert names(HybridRetriever([first, second], depth=2).search(["q"], 1)[0]) == ["a"]
    assert len(HybridRetriever([first, second], depth=2).search(["q"], 7)[0]) == 7
    assert first.depth == 7


def test_missing_hits_are_not_filled_up() -> None:
    assert HybridRetriever([Fixed(), Fixed()]).search(["q", "r"], 3) == [[], []]
    assert names(HybridRetriever([Fixed("a"), Fixed()]).search(["q"], 3)[0]) == ["a"]
    assert HybridRetriever([Fixed("a")]).search([], 3) == []


RANKING = st.lists(st.sampled_from("abcdefg"), unique=True)


@given(RANKING, RANKING)
def test_fusion_keeps_every_passage_once_in_falling_order(first: list[str], second: list[str]) -> None:
    hits = HybridRetriever([Fixed(*first), Fixed(*second)]).search(["q"], 20)[0]
    assert sorted(names(hits)) == sorted({*first, *second})
    assert all(one.score >= other.score for one, other in pairwise(hits))


@given(RANKING)
def test_one_retriever_keeps_its_order(ranking: list[str]) -> None:
    assert names(HybridRetriever([Fixed(*ranking)]).search(["q"], 20)[0]) == ranking


def test_indexes_of_different_corpora_are_refused() -> None:
    with pytest.raises(RetrievalError, match="passage a has two texts"):
        HybridRetriever([Fixed("a", text="x"), Fixed("a", text="y")]).search(["q"], 3)


def test_a_failing_retriever_fails_the_search() -> None:
    class Broken:
        def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
            raise RetrievalError("down")

    class Short:
        def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
            return []

    with pytest.raises(RetrievalError, match="down"):
        HybridRetriever([Fixed("a"), Broken()]).search(["q"], 3)
    with pytest.raises(RetrievalError, match="0 of 1 queries"):
        HybridRetriever([Fixed("a"), Short()]).search(["q"], 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": [1]}, "1 weights for 2"),
        ({"weights": [1, 0]}, "above 0"),
        ({"weights": [1, float("nan")]}, "above 0"),
        ({"k": -1}, "k must be"),
        ({"depth": 0}, "depth"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        HybridRetriever([Fixed("a"), Fixed("b")], **options)
    with pytest.raises(ValueError, match="at least one"):
        HybridRetriever([])


def test_two_bm25_indexes_fuse() -> None:
    passages = [Passage(str(n), "", text) for n, text in enumerate(["red kite", "red red sea", "deer"])]
    index = BM25Index.from_passages(passages)
    assert names(HybridRetriever([index, index]).search(["red"], 5)[0]) == names(index.search(["red"], 5)[0])
