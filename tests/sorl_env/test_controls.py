"""The controls of an evaluation: what a search finds when it finds nothing, anything, or just what it should."""

from __future__ import annotations

import copy

import pytest

from retrieval_index.types import Passage, RetrievalError, Retriever
from sorl_env.actions import Query
from sorl_env.controls import (
    EmptyIndex,
    OraclePassages,
    RandomPassages,
    RetrievalFailed,
    Unfailing,
    find_named,
    named_passages,
)
from sorl_env.episode import Episode, EpisodeRules
from sorl_env.questions import Question
from sorl_env.rewards import exact_match
from tests.fakes import FakeRetriever

CORPUS = [Passage(f"p{number}", f"Title {number}", f"text {number}") for number in range(50)]
TWO_HOPS = Question("two", "Who?", ("x",), "open", {"positive_ids": ["p3", "p7"]})
ONE = Question("one", "What?", ("x",), "choice", {"options": {"A": "x"}, "pmids": ["p5", "p5", "gone"]})
NOTHING = Question("none", "Why?", ("x",))


def ids(found: list[list]) -> list[list[str]]:
    return [[hit.passage.id for hit in hits] for hits in found]


def test_every_control_is_a_retriever() -> None:
    for control in (EmptyIndex(), RandomPassages(CORPUS), OraclePassages({}), Unfailing(EmptyIndex())):
        assert isinstance(control, Retriever)


def test_an_episodes_query_knows_its_question_and_the_searches_before_it() -> None:
    episode = Episode(TWO_HOPS, EpisodeRules(max_searches=2), exact_match)
    episode.begin()
    first = episode.query("<search>a  query</search>")
    episode.advance("<search>a  query</search>", [])
    second = episode.query("<search>another</search>")
    assert first == "a query" and isinstance(first, Query) and isinstance(second, Query)
    assert [(one.question_id, one.number) for one in (first, second)] == [("two", 0), ("two", 1)]
    again = copy.deepcopy(second)  # as it is done between processes, by __reduce__
    assert (again, again.question_id, again.number) == ("another", "two", 1)
    assert {first: 1}["a query"] == 1  # hashes as the text does, so caches are shared with plain texts


def test_the_empty_index_finds_nothing() -> None:
    assert EmptyIndex().search(["a", "b"], 3) == [[], []]


def test_named_passages_by_whatever_field_each_once() -> None:
    assert named_passages(TWO_HOPS) == ("p3", "p7")
    assert named_passages(ONE) == ("p5", "pmid-p5", "gone", "pmid-gone")
    assert named_passages(NOTHING) == ()
    by_number = Question("q", "?", ("x",), "open", {"positive_ids": None, "pmid": 123})
    assert named_passages(by_number) == ("123", "pmid-123")


def test_find_named_takes_what_the_corpus_holds_and_leaves_out_the_rest() -> None:
    found = find_named([ONE, TWO_HOPS, NOTHING, Question("q", "?", ("x",), "open", {"pmid": "gone"})], CORPUS)
    assert {name: [passage.id for passage in own] for name, own in found.items()} == {
        "one": ["p5"],
        "two": ["p3", "p7"],
    }


def test_a_pubmed_number_is_found_under_either_id() -> None:
    asked = [Question(name, "?", ("x",), "open", {"pmid": name}) for name in ("7", "8")]
    corpus = [Passage("pmid-7", "", "seven"), Passage("8", "", "eight")]
    assert find_named(asked, corpus) == {"7": [corpus[0]], "8": [corpus[1]]}


def test_the_oracle_gives_the_named_passages_whatever_was_asked() -> None:
    oracle = OraclePassages(find_named([TWO_HOPS, ONE], CORPUS))
    queries = [Query("nonsense", "two", 0), Query("", "one", 0)]
    assert ids(oracle.search(queries, 3)) == [["p3", "p7"], ["p5"]]
    # one passage a search: the first hop, the second, and round again
    assert [ids(oracle.search([Query("x", "two", number)], 1))[0] for number in range(3)] == [["p3"], ["p7"], ["p3"]]


def test_the_oracle_refuses_a_question_it_does_not_know() -> None:
    oracle = OraclePassages(find_named([ONE], CORPUS))
    with pytest.raises(RetrievalError, match="no passage for question 'none'"):
        oracle.search([Query("x", "none", 0)], 1)
    with pytest.raises(TypeError, match="whose question"):
        oracle.search(["x"], 1)


def test_random_passages_depend_on_question_and_search_alone() -> None:
    control = RandomPassages(CORPUS, seed=1)
    alone = ids(control.search([Query("x", "two", 0)], 3))[0]
    batched = ids(control.search([Query("y", "one", 0), Query("z", "two", 0), Query("z", "two", 1)], 3))
    assert batched[1] == alone and len(set(alone)) == 3
    assert batched[2] != alone and batched[0] != alone
    assert ids(RandomPassages(CORPUS, seed=2).search([Query("x", "two", 0)], 3))[0] != alone


def test_random_passages_are_never_the_named_ones_and_cover_the_rest_evenly() -> None:
    control = RandomPassages(CORPUS[:5], {"two": ["p3"]}, seed=0)
    counts: dict[str, int] = {}
    for number in range(2000):
        [hits] = ids(control.search([Query("x", "two", number)], 1))
        counts[hits[0]] = counts.get(hits[0], 0) + 1
    # 2,000 draws of 4 passages: 500 each, standard deviation sqrt(2000 * 1/4 * 3/4) = 19.4; five of them
    assert set(counts) == {"p0", "p1", "p2", "p4"}
    assert all(abs(count - 500) < 97 for count in counts.values()), counts
    assert ids(control.search([Query("x", "two", 0)], 9))[0].count("p3") == 0  # a corpus smaller than top_k


def test_random_passages_need_a_corpus() -> None:
    with pytest.raises(ValueError, match="at least one passage"):
        RandomPassages([])


def test_a_failed_search_ends_an_evaluation() -> None:
    assert ids(Unfailing(FakeRetriever(passages=CORPUS)).search(["7"], 1)) == [["p7"]]
    with pytest.raises(RetrievalFailed, match="refused the connection; nothing is lost"):
        Unfailing(FakeRetriever(fails=True)).search(["x"], 1)
