"""The grammar: from the text of one turn to the action it asks for.

Tags: ``<think>`` and ``<information>`` hide what they enclose, ``<search>`` and ``<answer>`` are actions.
They are matched letter by letter: look-alikes (fullwidth brackets, other case, blanks inside) are plain text.

Rules, in the order in which they bite:

1. What stands between ``<think>`` and ``</think>``, or ``<information>`` and ``</information>``, is never an
   action. One that is not closed hides everything up to the end of the turn.
2. An element is an opening tag, text without any of the eight tags, and the matching closing tag. The first
   complete one decides, so a later action in the same turn was never reached.
3. A blank query or a blank answer is no action, and what follows it is not reached either.

Reading is one pass over the text, whatever is in it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

STOP_STRINGS = ("</search>", "</answer>")
MAX_QUERY_CHARS = 512

_TAG = re.compile(r"<(/?)(think|search|answer|information)>")
_HIDING = ("think", "information")
_DIALECT = re.compile(
    r"(?P<search_r1></?(?:search|answer|information)>)|(?P<r1_searcher><\|(?:begin|end)_of_(?:query|documents)\|>)"
    r"|(?P<tool_call></?tool_(?:call|response)>)|(?P<boxed>\\boxed\b)"
)


class CutText(str):
    """The text of a turn that the engine cut at its length limit.

    It is never an action, whatever it holds; the environment gives no invalid-action penalty for it.
    """

    __slots__ = ()


class Query(str):
    """What an episode asks the retriever: a text, and beside it whose question it is and how many searches came
    before it. An index sees the text; only the controls of an evaluation (``sorl_env.controls``) look at the rest.
    """

    question_id: str
    number: int

    def __new__(cls, text: str, question_id: str, number: int) -> Query:
        query = super().__new__(cls, text)
        query.question_id, query.number = question_id, number
        return query

    def __reduce__(self) -> tuple[type[Query], tuple[str, str, int]]:
        return Query, (str(self), self.question_id, self.number)


@dataclass(frozen=True, slots=True)
class Search:
    """A query for the retriever: blanks collapsed, at most ``max_query_chars`` characters, not blank."""

    query: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer, stripped, not blank."""

    text: str


@dataclass(frozen=True, slots=True)
class Invalid:
    """No action; ``reason`` says why, in words that the agent may be shown."""

    reason: str


Action: TypeAlias = Search | Answer | Invalid


@dataclass(frozen=True, slots=True)
class Element:
    """One complete element: tag name, the raw text inside, and where the whole element starts and ends."""

    name: str
    content: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Parsed:
    """An action with the text before and after its element; all is ``before`` if there is none."""

    action: Action
    before: str
    after: str


def elements(text: str) -> Sequence[Element]:
    """All complete ``<search>`` and ``<answer>`` elements that are not hidden, from left to right."""
    return _elements(text) if type(text) is str else _elements(str(text))


@lru_cache(maxsize=256)  # a turn is read for its action and again for its reward
def _elements(text: str) -> tuple[Element, ...]:
    hiding: str | None = None
    opened: re.Match[str] | None = None
    found = []
    for tag in _TAG.finditer(text):
        slash, name = tag.groups()
        if hiding is not None:
            if slash and name == hiding:
                hiding = None
        elif name in _HIDING:
            opened = None
            if not slash:
                hiding = name
        elif not slash:
            opened = tag
        else:
            if opened is not None and opened.group(2) == name:
                found.append(Element(name, text[opened.end() : tag.start()], opened.start(), tag.end()))
            opened = None
    return tuple(found)


def parse(text: str, *, max_query_chars: int = MAX_QUERY_CHARS) -> Action:
    """The action that ``text``, one turn of the policy, asks for. Never raises."""
    return parse_parts(text, max_query_chars=max_query_chars).action


def parse_parts(text: str, *, max_query_chars: int = MAX_QUERY_CHARS) -> Parsed:
    """Like ``parse``, with the text before and after the action."""
    if isinstance(text, CutText):
        return Parsed(Invalid("the turn was cut at the length limit"), str(text), "")
    found = elements(text)
    if not found:
        return Parsed(Invalid(_what_is_missing(text)), text, "")
    element = found[0]
    action: Action
    if is_blank(element.content):
        action = Invalid("the query is empty" if element.name == "search" else "the answer is empty")
    elif element.name == "search":
        action = Search(clean_query(element.content, max_query_chars))
    else:
        action = Answer(element.content.strip())
    return Parsed(action, text[: element.start], text[element.end :])


def answer_of(action_texts: Sequence[str]) -> str | None:
    """The answer that the policy gave, or None: the last complete ``<answer>`` that was reached.

    In a turn whose first element is a search or is blank, nothing after it was reached. A turn that was cut gives
    none.
    """
    for text in reversed(action_texts):
        if isinstance(text, CutText):
            continue
        found = elements(text)
        if found and found[0].name == "answer" and not is_blank(found[0].content):
            last = [element for element in found if element.name == "answer"][-1]
            return None if is_blank(last.content) else last.content.strip()
    return None


def dialect_of(text: str) -> str | None:
    """The tag dialect whose action markers come first in ``text``, or None.

    "search_r1" is the one that ``parse`` reads. "r1_searcher" (``<|begin_of_query|>``), "tool_call" (JSON in
    ``<tool_call>``) and "boxed" are recognised, so that a foreign policy is told apart from a clumsy one.
    """
    found = _DIALECT.search(text)
    return None if found is None else found.lastgroup


def clean_query(query: str, max_chars: int = MAX_QUERY_CHARS) -> str:
    """A query fit to be sent: one line, at most ``max_chars`` characters, encodable as UTF-8."""
    # a blank run can be longer than the limit, so collapse before cutting
    collapsed = " ".join(query.split())[:max_chars].rstrip()
    return collapsed.encode("utf-8", "replace").decode("utf-8")


def is_blank(text: str) -> bool:
    """True if nothing in ``text`` can be seen: white space, control and format characters only."""
    if text[:1].isalnum():
        return False  # nearly always
    return all(char.isspace() or unicodedata.category(char) in ("Cc", "Cf") for char in text)


def _what_is_missing(text: str) -> str:
    """Why there is no complete element, for the hint shown to the agent."""
    hiding: str | None = None
    last_open: str | None = None
    for tag in _TAG.finditer(text):
        closing, name = tag.group(1) == "/", tag.group(2)
        if hiding is not None:
            hiding = None if closing and name == hiding else hiding
        elif name in _HIDING:
            hiding = None if closing else name
        else:
            last_open = None if closing else name
    if hiding is not None:
        return f"<{hiding}> was not closed"
    if last_open is not None:
        return f"<{last_open}> was not closed"
    return "no <search> or <answer> was found"
