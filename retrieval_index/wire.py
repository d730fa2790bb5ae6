"""The JSON of ``POST /retrieve``: reading requests in every dialect in use, writing and reading answers.

    {"queries": ["…"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id", "contents", "title", "text"}, "score": 0.83}, …], …]}

``query`` (one text or a list) stands for ``queries``; ``top_k``, ``top_n`` and ``k`` for ``topk``.
Without scores each element is the document alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retrieval_index.corpus import make_passage
from retrieval_index.types import Hit, Passage

QUERY_NAMES = ("queries", "query")
TOP_K_NAMES = ("topk", "top_k", "top_n", "k")


class BadRequest(ValueError):
    """A request that cannot be answered; `field` names the part that is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a request may be."""

    body_bytes: int = 4 << 20
    queries: int = 1024
    query_chars: int = 8192
    top_k: int = 1000
    default_top_k: int = 3


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A request in our own words."""

    queries: tuple[str, ...]
    top_k: int
    return_scores: bool


def parse_request(body: bytes, limits: Limits) -> SearchRequest:
    """Read a request body.

    Raises:
        BadRequest: it is not JSON, not in one of the dialects, or over a limit.
    """
    try:
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadRequest("body", f"not valid JSON ({type(error).__name__})") from error
    if not isinstance(fields, dict):
        raise BadRequest("body", f"a JSON object is wanted, got {_kind(fields)}")
    name, queries = _one_of(fields, QUERY_NAMES)
    if queries is None:
        raise BadRequest("queries", "missing; give a list of texts")
    queries = [queries] if isinstance(queries, str) else queries
    if not isinstance(queries, list):
        raise BadRequest(name, f"a list of texts is wanted, got {_kind(queries)}")
    if len(queries) > limits.queries:
        raise BadRequest(name, f"{len(queries)} queries, at most {limits.queries} are taken at once")
    for number, query in enumerate(queries):
        if not isinstance(query, str):
            raise BadRequest(f"{name}[{number}]", f"a text is wanted, got {_kind(query)}")
        if len(query) > limits.query_chars:
            raise BadRequest(f"{name}[{number}]", f"{len(query)} characters, at most {limits.query_chars} are taken")
    return_scores = fields.get("return_scores")
    if not isinstance(return_scores, bool | None):
        raise BadRequest("return_scores", f"true or false is wanted, got {_kind(return_scores)}")
    return SearchRequest(tuple(queries), _top_k(fields, limits), bool(return_scores))


def _top_k(fields: dict[str, Any], limits: Limits) -> int:
    name, top_k = _one_of(fields, TOP_K_NAMES)
    if top_k is None:
        return limits.default_top_k
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise BadRequest(name, f"a whole number is wanted, got {_kind(top_k)}")
    if not 1 <= top_k <= limits.top_k:
        raise BadRequest(name, f"must lie between 1 and {limits.top_k}")
    return top_k


def _one_of(fields: dict[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """The one field of several synonyms that is given and not null; equal repetitions count once."""
    given = [(name, fields[name]) for name in names if fields.get(name) is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise BadRequest(name, f"differs from `{given[0][0]}`, which means the same; give one")
    return given[0] if given else (names[0], None)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def render_answer(answers: Sequence[Sequence[Hit]], return_scores: bool) -> bytes:
    """Write an answer; half surrogate pairs, which UTF-8 cannot hold, become question marks."""
    from retrieval_index.fast_json import dumps  # here: the client needs the standard library alone

    result = [
        [
            {"document": _document(hit.passage), "score": hit.score} if return_scores else _document(hit.passage)
            for hit in own
        ]
        for own in answers
    ]
    return dumps({"result": result})


def _document(passage: Passage) -> dict[str, str]:
    return {"id": passage.id, "contents": passage.contents, "title": passage.title, "text": passage.text}


def render_request(queries: Sequence[str], top_k: int) -> bytes:
    """Write a request with scores."""
    return json.dumps({"queries": list(queries), "topk": top_k, "return_scores": True}).encode("utf-8")


def parse_answer(body: bytes, expected: int) -> list[list[Hit]]:
    """Read an answer with scores, of this server or of another that speaks the dialect.

    Raises:
        ValueError: it is not one, or not for `expected` queries. Half an answer is never taken.
    """
    try:
        result = json.loads(body.decode("utf-8"))["result"]
        answers = [[_hit(element) for element in own] for own in result]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an answer to a search ({error!r})") from error
    if len(answers) != expected:
        raise ValueError(f"answers to {len(answers)} queries, {expected} were asked")
    return answers


def _hit(element: Any) -> Hit:
    document, score = element["document"], element["score"]
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise TypeError(f"score {score!r}")
    if not isinstance(document, dict):
        raise TypeError(f"document {document!r:.80}")
    return Hit(make_passage(document), float(score))
