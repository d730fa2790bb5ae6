"""Dialects: how actions and passages are written. Chosen by name; the rules of the game are the same in all.

"search_r1"  ``<search>query</search>``, ``<answer>answer</answer>``, passages in ``<information>``
"tool_call"  ``<tool_call>{"name": "search", "arguments": {"query_list": ["query"]}}</tool_call>`` (the JSON of the
             chat templates of Qwen and Hermes, which show the tool to the model), ``<answer>answer</answer>``,
             passages in ``<tool_response>``
"boxed"      no search; the answer is the last ``\\boxed{…}`` of the turn
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
_TAG = re.compile(r"<(?=/?(?:think|search|answer|information)>)")
_STRAY = re.compile(r"<(?=/?(?:search|information|answer)>)")
_RESPONSE = re.compile(r"<(/?)tool_response>")
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)

SEARCH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches a collection of passages and returns the best matches.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "minItems": 1,
                    "maxItems": 1,
                    "description": "What to search for: a list with one query.",
                }
            },
            "required": ["query_list"],
        },
    },
}
"""The tool of the dialect "tool_call", as ``apply_chat_template(tools=[…])`` takes it."""


@dataclass(frozen=True, slots=True)
class Read:
    """An action, and where in the turn the element stands that asks for it (0, 0 where there is none)."""

    action: Action
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one dialect is read and written.

    Args:
        parse: the action of a turn, given its text and the longest query in characters. Never raises.
        render: the observation for the hits of a search, at most so many words long (None: no limit).
        stop_strings: what an engine must stop at, keeping it in the text.
        search_form, answer_form: what a hint tells the policy to write.
        tagged: a turn in the tags that rewards read: its decisive element in ``<search>`` or ``<answer>``, thoughts
            in ``<think>``, nothing that a query or an answer could pass for another tag.
        prompt: the name of the wording that explains the dialect, in ``prompts.PROMPTS``.
        tools: what a chat template has to show the model, as JSON schemas.
        tag_words: words that the tags of an observation are when it is split at blanks.
    """

    name: str
    parse: Callable[[str, int], Action]
    render: Callable[[Sequence[Hit], int | None], str]
    stop_strings: tuple[str, ...]
    search_form: str
    answer_form: str
    tagged: Callable[[str], str]
    prompt: str
    tools: tuple[dict[str, Any], ...] = ()
    tag_words: int = 0


def parse_tags(text: str, max_query_chars: int) -> Action:
    """``actions.parse``."""
    return parse(text, max_query_chars=max_query_chars)


def tags_as_they_are(text: str) -> str:
    """The turn itself: it is written in the tags that rewards read."""
    return text


def parse_tool_call(text: str, max_query_chars: int) -> Action:
    """The first complete ``<tool_call>`` or ``<answer>`` outside ``<think>`` and ``<tool_response>``.

    The call must be JSON with the name "search" and a query: ``query_list`` (its first text), ``query`` or
    ``queries``; the arguments may be a JSON text of their own. A hidden block that is not closed hides the rest.
    """
    return _read_tool_call(text, max_query_chars).action


def tagged_tool_call(text: str) -> str:
    """A turn of tool calls in tags; what a tool wrote (``<tool_response>``) becomes ``<information>``."""
    if isinstance(text, CutText):
        return text
    read = _read_tool_call(text, max(1, len(text)))
    before, after = (_in_tags(part) for part in (text[: read.start], text[read.end :]))
    if not isinstance(read.action, Invalid):
        return before + _element(read.action) + after
    if not read.end:
        return ""
    # a call that is none, or a blank answer: it decides the turn, so what follows it was not reached
    name = "answer" if text.startswith("<answer>", read.start) else "search"
    return f"{before}<{name}></{name}>{after}"


def _read_tool_call(text: str, max_query_chars: int) -> Read:
    if isinstance(text, CutText):
        return Read(Invalid("the turn was cut at the length limit"))
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
                action = _search_of(content, max_query_chars)
            else:
                action = Invalid("the answer is empty") if is_blank(content) else Answer(content.strip())
            return Read(action, opened.start(), tag.end())
        else:
            opened = None
    if hiding is not None:
        return Read(Invalid(f"<{hiding}> was not closed"))
    return Read(
        Invalid("no <tool_call> or <answer> was found" if opened is None else f"<{opened.group(2)}> was not closed")
    )


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


def tagged_boxed(text: str) -> str:
    """The thought that the turn begins with, if any, and the boxed answer; the working around it is left out."""
    if isinstance(text, CutText):
        return text
    action = parse_boxed(text, max(1, len(text)))
    if not isinstance(action, Answer):
        return ""
    thought = _THOUGHTS.match(text.lstrip())
    return (_TAG.sub("‹", thought.group()[7:-8]).join(("<think>", "</think>")) if thought else "") + _element(action)


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
    if isinstance(arguments, str):  # as OpenAI's API has them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return Invalid("the arguments of the tool call are not valid JSON")
    given = None
    if isinstance(arguments, dict):
        given = next((arguments[key] for key in ("query_list", "query", "queries") if key in arguments), None)
    if isinstance(given, list) and given:
        given = given[0]
    if not isinstance(given, str):
        return Invalid("the tool call holds no query")
    return Invalid("the query is empty") if is_blank(given) else Search(clean_query(given, max_query_chars))


def _element(action: Action) -> str:
    """The action in tags; a tag inside it loses its bracket, as it was none in its own dialect."""
    if isinstance(action, Answer):
        return f"<answer>{_TAG.sub('‹', action.text)}</answer>"
    return f"<search>{_TAG.sub('‹', action.query)}</search>" if isinstance(action, Search) else ""


def _in_tags(text: str) -> str:
    """What stands around the decisive element of a turn of tool calls: thoughts, responses and text, no action."""
    return _RESPONSE.sub(r"<\1information>", _STRAY.sub("‹", text))


DIALECTS: dict[str, Dialect] = {
    "search_r1": Dialect(
        "search_r1",
        parse_tags,
        render_observation,
        STOP_STRINGS,
        "<search>query</search>",
        "<answer>answer</answer>",
        tags_as_they_are,
        "search_r1",
    ),
    "tool_call": Dialect(
        "tool_call",
        parse_tool_call,
        render_tool_response,
        ("</tool_call>", "</answer>"),
        '<tool_call>{"name": "search", "arguments": {"query_list": ["query"]}}</tool_call>',
        "<answer>answer</answer>",
        tagged_tool_call,
        "tools",
        tools=(SEARCH_TOOL,),
        tag_words=2,
    ),
    "boxed": Dialect(
        "boxed", parse_boxed, render_observation, (), "", "\\boxed{answer}", tagged_boxed, "math"
    ),
}


def dialect_named(name: str) -> Dialect:
    """The dialect of that name. Raises ValueError, with the known names, for another."""
    try:
        return DIALECTS[name]
    except KeyError:
        raise ValueError(f"unknown dialect {name!r}; known: {', '.join(sorted(DIALECTS))}") from None
