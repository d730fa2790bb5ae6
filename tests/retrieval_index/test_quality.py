from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from retrieval_index import Hit, Passage, RetrievalError
from retrieval_index.quality import (
    answer_recall,
    first_with_answer,
    load_judgements,
    load_queries,
    measure,
    overlap,
)


class Table:
    """Finds what the table says; hits of one query all have the same score."""

    def __init__(self, table: dict[str, list[str]], texts: dict[str, str] | None = None) -> None:
        self.table, self.texts = table, texts or {}

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        return [
            [Hit(Passage(name, "", self.texts.get(name, "")), 1.0) for name in self.table.get(query, [])[:top_k]]
            for query in queries
        ]


def test_measures_are_those_of_trec_eval() -> None:
    pytest.importorskip("ir_measures", reason="ir-measures is not installed")
    retriever = Table({"first": ["a", "x", "b"], "second": ["x"]})
    judgements = {"1": {"a": 1, "b": 2, "c": 0}, "2": {"z": 1}}
    found = measure(retriever, {"1": "first", "2": "second", "3": "unjudged"}, judgements)
    # Query 1: gains 1, 0, 2 against the ideal 2, 1: (1 + 2 / log2 4) / (2 + 1 / log2 3) = 2 / 2.63093.
    # AP (1/1 + 2/3) / 2. Query 2 finds nothing; means over both.
    assert found["nDCG@10"] == pytest.approx(2 / (2 + 1 / math.log2(3)) / 2)
    assert found["AP"] == pytest.approx((1 + 2 / 3) / 2 / 2)
    assert found["R@100"] == pytest.approx(0.5)
    assert found["RR@10"] == pytest.approx(0.5)


def test_hits_count_in_their_order_though_scores_are_equal() -> None:
    pytest.importorskip("ir_measures", reason="ir-measures is not installed")
    for order, value in ((["a", "z"], 1.0), (["z", "a"], 0.5)):
        assert measure(Table({"q": order}), {"1": "q"}, {"1": {"a": 1}}, ["RR@10"]) == {"RR@10": value}


def test_what_cannot_be_measured_is_refused() -> None:
    pytest.importorskip("ir_measures", reason="ir-measures is not installed")
    with pytest.raises(ValueError, match="no judged query"):
        measure(Table({}), {}, {})
    with pytest.raises(ValueError, match="first is 9"):
        measure(Table({}), {"1": "q"}, {"1": {"a": 1}, "9": {"a": 1}})
    with pytest.raises(ValueError, match="unknown measure"):
        measure(Table({}), {"1": "q"}, {"1": {"a": 1}}, ["Excellence@10"])


@pytest.mark.parametrize(
    ("text", "answer", "holds"),
    [
        ("He was born in Lima, Peru.", "lima", True),
        ("He was born in Lima, Peru.", "Lim", False),
        ("The Beatles played", "Beatles", True),
        ("Beatles played", "the Beatles", True),
        ("Saint-Exupéry wrote", "saint exupe\u0301ry", True),
        ("It cost $1,000.", "1 000", True),
        ("no answer here", "", False),
        ("no answer here", "...", False),
        ("no answer here", "The", False),
    ],
)
def test_answers_are_found_as_whole_words(text: str, answer: str, holds: bool) -> None:
    assert (first_with_answer([Hit(Passage("1", "", text), 1.0)], [answer]) == 0) == holds


def test_recall_counts_the_first_hit_with_an_answer() -> None:
    texts = {"a": "Lima is here", "b": "nothing", "c": "Quito"}
    retriever = Table({"one": ["a", "b"], "two": ["b", "c"], "three": ["b"]}, texts)
    questions = [("one", ["Lima"]), ("two", ["Bogota", "Quito"]), ("three", ["Lima"]), ("four", ["Lima"])]
    assert answer_recall(retriever, questions, (1, 2)) == {1: 0.25, 2: 0.5}
    with pytest.raises(ValueError, match="no question"):
        answer_recall(retriever, [])


def test_overlap_is_the_share_of_the_exact_hits() -> None:
    exact = Table({"q": ["a", "b", "c", "d"], "r": ["a"], "s": []})
    assert overlap(Table({"q": ["d", "x", "a"], "r": ["a"], "s": ["x"]}), exact, ["q", "r", "s"], 4) == 0.75
    with pytest.raises(RetrievalError, match="nothing to compare"):
        overlap(exact, Table({}), ["q"], 4)


def test_queries_and_judgements_are_read(tmp_path: Path) -> None:
    queries, judgements = tmp_path / "q.jsonl", tmp_path / "qrels.tsv"
    queries.write_text('{"id": 1, "text": "one"}\n\n{"id": "2", "text": "two"}\n', encoding="utf-8")
    judgements.write_text("query-id\tcorpus-id\tscore\n1\ta\t1\n1\tb\t0\n2\ta\t2\n", encoding="utf-8")
    assert load_queries(queries) == {"1": "one", "2": "two"}
    assert load_judgements(judgements) == {"1": {"a": 1, "b": 0}, "2": {"a": 2}}
    queries.write_text('{"id": 1, "text": "one"}\n{"id": "1", "text": "two"}\n')
    with pytest.raises(ValueError, match="line 2: query id 1"):
        load_queries(queries)
    queries.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        load_queries(queries)
    judgements.write_text("query-id\tcorpus-id\tscore\n1\ta\n")
    with pytest.raises(ValueError, match="line 2"):
        load_judgements(judgements)
