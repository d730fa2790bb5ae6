"""The grammar of one turn."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env.actions import (
    STOP_STRINGS,
    Answer,
    CutText,
    Invalid,
    Search,
    dialect_of,
    elements,
    parse,
    parse_parts,
)

TAGS = [f"<{slash}{name}>" for name in ("think", "search", "answer", "information") for slash in ("", "/")]
pieces = st.lists(st.one_of(st.sampled_from(TAGS), st.text(max_size=12)), max_size=14).map("".join)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search>height of K2</search>", Search("height of K2")),
        ("<answer> 8611 m\n</answer>", Answer("8611 m")),
        # the first complete element decides; what follows was never reached
        (
            "<think>need data</think><search>height of K2</search><answer>8611 m</answer>",
            Search("height of K2"),
        ),
        ("<answer>Oslo</answer><search>Oslo</search>", Answer("Oslo")),
        # a quoted tag is a thought
        ("<think>maybe <answer>Rome</answer>?</think><answer>Milan</answer>", Answer("Milan")),
        ("<think>a</think>b<think><search>c</search></think><search>d</search>", Search("d")),
        # written by the policy, an information block is no evidence of anything and hides its content too
        ("<information><answer>Rome</answer></information><answer>Milan</answer>", Answer("Milan")),
        # an element that is not complete does not count, a later one does
        ("<search>K2 <answer>8611 m</answer>", Answer("8611 m")),
        ("<search>a<search>b</search>", Search("b")),
        # a stray closing tag is plain text
        ("so it is.</think><search>Lima</search>", Search("Lima")),
        ("</search><answer>Lima</answer>", Answer("Lima")),
        # blanks are collapsed in queries, kept inside answers
        ("<search>capital\n of\t Peru</search>", Search("capital of Peru")),
        ("<answer>a < b > c</answer>", Answer("a < b > c")),
        ("<answer>naïve café №5 🧪 \u2028</answer>", Answer("naïve café №5 🧪")),
    ],
)
def test_actions(text: str, action: object) -> None:
    assert parse(text) == action


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no <search> or <answer>"),
        ("I will answer: Milan", "no <search> or <answer>"),
        ("<search>capital of Peru", "<search> was not closed"),
        ("<think>so <search>Lima</search>", "<think> was not closed"),
        ("<information>x<answer>Lima</answer>", "<information> was not closed"),
        ("<search>   </search>", "query is empty"),
        ("<search>\u200b\ufeff\n</search>", "query is empty"),
        ("<answer></answer>", "answer is empty"),
        ("<search> </search><answer>Lima</answer>", "query is empty"),
        ("<search>a</answer>", "no <search> or <answer>"),
        ("<answer>a<think>b</think>c</answer>", "no <search> or <answer>"),
        # look-alikes are plain text
        ("＜answer＞Milan＜/answer＞", "no <search> or <answer>"),
        ("<ANSWER>Milan</ANSWER>", "no <search> or <answer>"),
        ("< answer>Milan</ answer>", "no <search> or <answer>"),
        ("&lt;answer&gt;Milan&lt;/answer&gt;", "no <search> or <answer>"),
    ],
)
def test_invalid_actions(text: str, reason: str) -> None:
    action = parse(text)
    assert isinstance(action, Invalid)
    assert reason in action.reason


def test_cut_text_is_never_an_action() -> None:
    assert isinstance(parse(CutText("<answer>Lima</answer>")), Invalid)
    assert parse(str(CutText("<answer>Lima</answer>"))) == Answer("Lima")


def test_long_query_is_cut_after_collapsing_blanks() -> None:
    action = parse("<search>" + "whale " * 2000 + "</search>")
    assert isinstance(action, Search)
    assert action.query == ("whale " * 86)[:512].rstrip()  # 85 words of 6 characters are 510, "wh" fits
    assert parse("<search>" + " " * 9000 + "x y</search>", max_query_chars=2) == Search("x")


def test_query_can_be_sent_as_utf8() -> None:
    action = parse("<search>broken \ud83d half</search>")
    assert action == Search("broken ? half")


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("<think>x</think><search>q</search>", "search_r1"),
        ("first <|begin_of_query|> q <|end_of_query|>", "r1_searcher"),
        ('<tool_call>{"name":"search","arguments":{"query_list":["q"]}}</tool_call>', "tool_call"),
        ("so it is \\boxed{12}", "boxed"),
        ("<think>x</think> no action", None),
        ("", None),
    ],
)
def test_foreign_dialects_are_recognised_and_not_executed(text: str, dialect: str | None) -> None:
    assert dialect_of(text) == dialect
    assert isinstance(parse(text), Search if dialect == "search_r1" else Invalid)


def test_before_and_after() -> None:
    parts = parse_parts("<think>t</think> <search>q</search>\n tail")
    assert (parts.before, parts.after) == ("<think>t</think> ", "\n tail")
    assert parse_parts("nothing").before == "nothing"


@pytest.mark.parametrize("unit", ["<search>", "<think>", "</think>", "<search>a</answer>", "<", "<answer ", "< search"])
def test_reading_is_linear(unit: str) -> None:
    # 20 million characters a minute would still be far slower than one pass; a quadratic reader takes hours
    text = unit * (1_000_000 // len(unit))
    start = time.perf_counter()
    parse(text)
    assert time.perf_counter() - start < 3.0


@given(pieces)
def test_never_raises_and_is_decided_by_the_first_closing_tag(text: str) -> None:
    parts = parse_parts(text)
    if isinstance(parts.action, Invalid):
        return
    # generation stops at the stop string: what comes after it cannot change the action
    upto = text[: len(text) - len(parts.after)]
    assert upto.endswith(STOP_STRINGS)
    assert parse(upto) == parts.action
    assert parts.before == text[: len(parts.before)]


@given(pieces, pieces)
def test_hidden_text_never_acts(hidden: str, tail: str) -> None:
    for name in ("think", "information"):
        inside = hidden.replace(f"</{name}>", "")
        assert parse(f"<{name}>{inside}</{name}>{tail}") == parse(tail) or isinstance(parse(tail), Invalid)
        assert isinstance(parse(f"<{name}>{inside}"), Invalid)


@given(pieces)
def test_elements_hold_no_tag(text: str) -> None:
    for element in elements(text):
        assert not any(tag in element.content for tag in TAGS)
        assert text[element.start : element.end].endswith(f"{element.content}</{element.name}>")
