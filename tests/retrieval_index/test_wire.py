from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_index import Hit, Passage
from retrieval_index.wire import (
    BadRequest,
    Limits,
    SearchRequest,
    parse_answer,
    parse_request,
    render_answer,
    render_request,
)

LIMITS = Limits(queries=3, query_chars=20, top_k=10)


@pytest.mark.parametrize(
    ("fields", "request_"),
    [
        ({"queries": ["a", "b"], "topk": 5, "return_scores": True}, SearchRequest(("a", "b"), 5, True)),
        ({"queries": ["a"]}, SearchRequest(("a",), 3, False)),
        ({"queries": ["a"], "topk": None, "return_scores": None}, SearchRequest(("a",), 3, False)),
        ({"queries": "a"}, SearchRequest(("a",), 3, False)),
        ({"query": "a", "top_n": 2}, SearchRequest(("a",), 2, False)),
        ({"query": ["a", "b"], "k": 1}, SearchRequest(("a", "b"), 1, False)),
        ({"query": "a", "top_k": 4, "topk": 4}, SearchRequest(("a",), 4, False)),
        ({"queries": []}, SearchRequest((), 3, False)),
        ({"queries": [""], "other": {"ignored": 1}}, SearchRequest(("",), 3, False)),
    ],
)
def test_every_dialect_is_understood(fields: dict, request_: SearchRequest) -> None:
    assert parse_request(json.dumps(fields).encode(), LIMITS) == request_


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"\xff", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "queries"),
        (b'{"queries": null}', "queries"),
        (b'{"queries": {"a": 1}}', "queries"),
        (b'{"query": 3}', "query"),
        (b'{"queries": ["a", 3]}', "queries[1]"),
        (b'{"query": ["a", null]}', "query[1]"),
        (b'{"queries": ["a", "b", "c", "d"]}', "queries"),
        (b'{"queries": ["123456789012345678901"]}', "queries[0]"),
        (b'{"queries": ["a"], "query": "b"}', "query"),
        (b'{"queries": ["a"], "topk": 3, "k": 4}', "k"),
        (b'{"queries": ["a"], "topk": 0}', "topk"),
        (b'{"queries": ["a"], "topk": 11}', "topk"),
        (b'{"queries": ["a"], "top_k": "3"}', "top_k"),
        (b'{"queries": ["a"], "topk": true}', "topk"),
        (b'{"queries": ["a"], "topk": 2.0}', "topk"),
        (b'{"queries": ["a"], "topk": NaN}', "topk"),
        (b'{"queries": ["a"], "return_scores": "yes"}', "return_scores"),
        (b'{"queries": ["a"], "return_scores": 1}', "return_scores"),
    ],
)
def test_a_bad_request_names_its_field(body: bytes, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(body, LIMITS)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


HIT = Hit(Passage("7", "Lima", "is a city"), 0.5)
DOCUMENT = {"id": "7", "contents": '"Lima"\nis a city', "title": "Lima", "text": "is a city"}


def test_answers_carry_the_documents_with_or_without_scores() -> None:
    assert json.loads(render_answer([[HIT], []], True)) == {"result": [[{"document": DOCUMENT, "score": 0.5}], []]}
    assert json.loads(render_answer([[HIT], [HIT]], False)) == {"result": [[DOCUMENT], [DOCUMENT]]}


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PASSAGE = st.builds(Passage, TEXT.filter(bool), TEXT, TEXT)
HITS = st.lists(st.builds(Hit, PASSAGE, st.floats(0, 100)), max_size=3)


@given(st.lists(HITS, max_size=4))
def test_an_answer_is_read_back_as_it_was(answers: list[list[Hit]]) -> None:
    assert parse_answer(render_answer(answers, True), len(answers)) == answers


@given(st.lists(st.text(), max_size=3), st.integers(1, 10))
def test_a_request_is_read_back_as_it_was(queries: list[str], top_k: int) -> None:
    body = render_request(queries, top_k)
    assert parse_request(body, Limits()) == SearchRequest(tuple(queries), top_k, True)


def test_half_a_surrogate_pair_does_not_break_an_answer() -> None:
    body = render_answer([[Hit(Passage("7", "", "x\ud800"), 1.0)]], True)
    assert parse_answer(body, 1)[0][0].passage.text == "x?"


def test_an_answer_of_a_server_with_contents_alone_is_read() -> None:
    body = json.dumps({"result": [[{"document": {"id": 7, "contents": '"T"\nx'}, "score": 1}]]}).encode()
    assert parse_answer(body, 1) == [[Hit(Passage("7", "T", "x"), 1.0)]]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"null",
        b'{"result": null}',
        b'{"result": []}',
        b'{"result": [[], []]}',
        b'{"result": [[{"id": "7", "title": "", "text": "without scores"}]]}',
        b'{"result": [[{"document": {"id": "7", "contents": "x"}, "score": null}]]}',
        b'{"result": [[{"document": "text", "score": 1}]]}',
        b'{"result": [[{"document": {"contents": "no id"}, "score": 1}]]}',
        b'{"error": "out of memory"}',
        render_answer([[HIT]], True)[:-10],
    ],
)
def test_half_an_answer_is_no_answer(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"not an answer|answers to"):
        parse_answer(body, 1)
