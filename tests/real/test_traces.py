"""Real outputs of two search agents: the parser, and our exact match against the one recorded with them.

Search-R1's evaluation took the last <answer> of the whole response and compared it in SQuAD's manner. Ours
reads turn by turn, so it can differ where an answer was never reached; every such trace must fall under a
rule named here.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sorl_env.actions import Answer, Invalid, Search, dialect_of, elements, parse
from sorl_env.legacy import search_r1_legacy_score
from sorl_env.rewards import answer_of, exact_match_score, format_valid

DATA = Path(
    os.environ.get("SORL_DATA") or Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
).resolve()
TRACES = DATA / "traces"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no real data at {DATA}; set SORL_DATA")

# the search tool's answer stands directly behind </search>; any other block was written by the model
TOOL = re.compile(r"(?<=</search>)\s*<information>.*?</information>\s*", re.DOTALL)
OUTCOMES = {
    "Search",
    "Answer",
    "<think> was not closed",
    "<information> was not closed",
    "the query is empty",
}
DOCUMENTS = re.compile(r"<\|begin_of_documents\|>.*?<\|end_of_documents\|>", re.DOTALL)


def read(name: str) -> list[dict[str, Any]]:
    with gzip.open(TRACES / name, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


@pytest.fixture(scope="module")
def search_r1() -> list[dict[str, Any]]:
    return read("search_r1.jsonl.gz")


def turns_of(response: str) -> list[str]:
    return TOOL.split(response)


def rule_of_difference(turns: list[str], recorded: str) -> str | None:
    """Why an answer that the recorded evaluation read is none here."""
    for turn in turns:
        found = list(elements(turn))
        if found and found[0].name == "search" and recorded in [element.content.strip() for element in found]:
            return "an answer behind a search in the same turn was never reached"
        if recorded in turn and not any(element.content.strip() == recorded for element in found):
            return "an answer inside a thought or a block of information is none"
    return None


def test_exact_match_equals_the_recorded_one(search_r1: list[dict[str, Any]]) -> None:
    compared, same_score, rules = 0, 0, Counter[str | None]()
    for trace in search_r1:
        if not trace["pred"]:  # the recorded evaluation found no answer
            assert answer_of(turns_of(trace["response"])) is None
            continue
        turns = turns_of(trace["response"])
        answer = answer_of(turns)
        score = max((exact_match_score(answer or "", gold) for gold in trace["golden_answers"]), default=0.0)
        compared += 1
        same_score += score == trace["em"]
        if answer != trace["pred"].strip():
            rules[rule_of_difference(turns, trace["pred"].strip())] += 1
    assert (len(search_r1), compared) == (834, 709)
    assert None not in rules, rules
    assert same_score >= 0.99 * compared
    assert rules.total() <= 0.01 * compared


def test_legacy_score_equals_the_recorded_one(search_r1: list[dict[str, Any]]) -> None:
    example = "For example, <answer> Beijing </answer>. "  # stands in the prompt of every trace
    for trace in search_r1:
        scored = search_r1_legacy_score(example + trace["response"], trace["golden_answers"])
        if trace["pred"]:
            assert scored == trace["em"], trace["id"]


def test_nothing_from_information_or_thoughts_is_executed(search_r1: list[dict[str, Any]]) -> None:
    executed = Counter[str]()
    for trace in search_r1:
        for text in (trace["response"], *turns_of(trace["response"])):
            executed[type(parse(text)).__name__] += 1
            for hidden in ("think", "information"):
                inside = text.replace(f"</{hidden}>", "")
                assert isinstance(parse(f"<{hidden}>{inside}</{hidden}>"), Invalid)
                assert isinstance(parse(f"<{hidden}>{inside}"), Invalid)
    assert executed["Search"] > 500 and executed["Answer"] > 500


def test_turns_that_were_searched_are_searches_here(search_r1: list[dict[str, Any]]) -> None:
    # each turn but the last was followed by the search tool; that environment knew no thoughts, so it also
    # searched for what stands in one that was never closed
    outcomes = Counter[str]()
    for trace in search_r1:
        for turn in turns_of(trace["response"])[:-1]:
            action = parse(turn)
            outcomes[action.reason if isinstance(action, Invalid) else type(action).__name__] += 1
    assert set(outcomes) <= OUTCOMES, outcomes
    assert outcomes["Search"] >= 0.9 * outcomes.total(), outcomes


def test_the_strict_format_is_kept_by_none(search_r1: list[dict[str, Any]]) -> None:
    # most lack the thought after the information, and many have words between the blocks
    assert not any(format_valid(trace["response"]) for trace in search_r1)
    closest = sum(
        format_valid(trace["response"].replace("</information>", "</information><think></think>"))
        for trace in search_r1
    )
    assert closest >= 150


def test_the_official_example() -> None:
    # several episodes in one text: two searches, an answer, and at the end another answer
    [line] = (TRACES / "search_r1_official_case.jsonl").read_text(encoding="utf-8").splitlines()
    assert [parse(turn) for turn in turns_of(json.loads(line)["response"])] == [
        Search("Paul Walker's cars in Fast and Furious"),
        Search("list of cars paul walker drove in Fast and Furious"),
        Answer("Charger"),
        Answer("sinoatrial (SA) node"),
    ]


def test_the_foreign_dialect_is_recognised_and_its_queries_are_not_executed() -> None:
    traces = read("r1_searcher.jsonl.gz")
    assert len(traces) == 286
    searched = 0
    for trace in traces:
        turns = DOCUMENTS.split(trace["response"])
        for turn in turns[:-1]:
            searched += 1
            assert dialect_of(turn) == "r1_searcher"
            assert not isinstance(parse(turn), Search)
    assert searched > 286
