"""Dialects: how actions and passages are written. Chosen by name; the rules of the game are the same in all.

"search_r1"  ``<search>query</search>``, ``<answer>answer</answer>``, passages in ``<information>``
"tool_call"  ``<tool_call>{"name": "search", "arguments": {"query_list": ["query"]}}</tool_call>`` (the JSON
of the chat
             templates of Qwen and Hermes), ``<answer>answer</answer>``, passages in ``<tool_response>``
"boxed"      no search; the answer is the last ``\\boxed{…}`` of the turn
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrieval_index.types import Hit
from sorl_env.actions import (
    STOP_STRINGS,
    Action,
    Answer,
    CutText,
    Invalid,
    Search,
    clean_query,
    is_blank,
    parse,
)
from sorl_env.math_answers import boxed
from sorl_env.observations import CLOSE, OPEN, render_observation

_CALL = re.compile(r"<(/?)(think|tool_response|tool_call|answer)>")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one dialect is read and written.

    Args:
        parse: the action of a turn, given its text and the longest query in characters. Never raises.
        render: the observation for the hits of a search, at most so many words long (None: no limit).
        stop_strings: what an engine must stop at, keeping it in the text.
        search_form, answer_form: what a hint tells the policy to write.
    """

    name: str
    parse: Callable[[str, int], Action]
    render: Callable[[Sequence[Hit], int | None], str]
    stop_strings: tuple[str, ...]
    search_form: str
    answer_form: str

    def tagged(self, text: str) -> str:
        """A turn in the tags that rewards read; in the dialect of those tags, the turn itself."""
        if self.name == "search_r1" or isinstance(text, CutText):
            return text
        action = self.parse(text, len(text))
        if isinstance(action, Answer):
            return f"<answer>{action.text}</answer>"
        return f"<search>{action.query}</search>" if isinstance(action, Search) else ""


def parse_tags(text: str, max_query_chars: int) -> Action:
    """``actions.parse``."""
    return parse(text, max_query_chars=max_query_chars)


def parse_tool_call(text: str, max_query_chars: int) -> Action:
    """The first complete ``<tool_call>`` or ``<answer>`` outside ``<think>`` and ``<tool_response>``.

    The call must be JSON with the name "search" and a query: ``query_list`` (its first text), ``query`` or
    ``queries``. A hidden block that is not closed hides the rest.
    """
    if isinstance(text, CutText):
        return Invalid("the turn was cut at the length limit")
    hiding: str | None = None
    opened: re.Match[str] | None = None
    for tag in _CALL.finditer(text):
        closing, name = tag.group(1) == "/", tag.group(2)
        if hiding is not None:
            hiding = None if closing and name == hiding else hiding
        elif name in ("think", "tool_response"):
            opened, hiding = None, None if closing else name
        elif not closing:
            opened = tag
        elif opened is not None and opened.group(2) == name:
            content = text[opened.end() : tag.start()]
            if name == "tool_call":
                return _search_of(content, max_query_chars)
            return Invalid("the answer is empty") if is_blank(content) else Answer(content.strip())
        else:
            opened = None
    if hiding is not None:
        return Invalid(f"<{hiding}> was not closed")
    return Invalid("no <tool_call> or <answer> was found" if opened is None else f"<{opened.group(2)}> was not closed")


def parse_boxed(text: str, max_query_chars: int) -> Action:
    """The content of the last ``\\boxed`` behind the last ``</think>``, or Invalid."""
    if isinstance(text, CutText):
        return Invalid("the turn was cut at the length limit")
    said = text.rpartition("</think>")[2]
    if "<think>" in said:
        return Invalid("<think> was not closed")
    if "\\boxed" not in said and "\\fbox" not in said:
        return Invalid("no \\boxed answer was found")
    answer = boxed(said)
    if answer is None:
        return Invalid("the \\boxed answer was not closed")
    return Invalid("the \\boxed answer is empty") if is_blank(answer) else Answer(answer.strip())


def render_tool_response(hits: Sequence[Hit], max_words: int | None) -> str:
    """Passages as in the other dialects, between ``<tool_response>`` tags."""
    body = render_observation(hits, max_words).strip().removeprefix(OPEN).removesuffix(CLOSE)
    return f"\n<tool_response>\n{body}\n</tool_response>\n"


def _search_of(content: str, max_query_chars: int) -> Action:
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):
        return Invalid("the tool call is not valid JSON")
    if not isinstance(call, dict) or call.get("name") != "search":
        return Invalid('the only tool is "search"')
    arguments = call.get("arguments")
    given = None
    if isinstance(arguments, dict):
        given = next((arguments[key] for key in ("query_list", "query", "queries") if key in arguments), None)
    if isinstance(given, list) and given:
        given = given[0]
    if not isinstance(given, str):
        return Invalid("the tool call holds no query")
    return Invalid("the query is empty") if is_blank(given) else Search(clean_query(given, max_query_chars))


DIALECTS: dict[str, Dialect] = {
    "search_r1": Dialect(
        "search_r1",
        parse_tags,
        render_observation,
        STOP_STRINGS,
        "<search>query</search>",
        "<answer>answer</answer>",
    ),
    "tool_call": Dialect(
        "tool_call",
        parse_tool_call,
        render_tool_response,
        ("</tool_call>", "</answer>"),
        '<tool_call>{"name": "search", "arguments": {"query_list": ["query"]}}</tool_call>',
        "<answer>answer</answer>",
    ),
    "boxed": Dialect("boxed", parse_boxed, render_observation, (), "", "\\boxed{answer}"),
}


def dialect_named(name: str) -> Dialect:
    """The dialect of that name. Raises ValueError, with the known names, for another."""
    try:
        return DIALECTS[name]
    except KeyError:
        raise ValueError(f"unknown dialect {name!r}; known: {', '.join(sorted(DIALECTS))}") from None
