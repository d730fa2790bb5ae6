"""Scripted episodes: good players win, bad ones stay in form; rewriting of names."""

from __future__ import annotations

import random
from typing import Any

import pytest

from retrieval_index.types import Passage
from sorl_algos.demonstrations import MixedScript, common_words, demonstrate, renamed
from sorl_algos.rollout.renderer import Renderer
from sorl_env.actions import Answer, Search, parse
from sorl_env.questions import Question, QuestionSet
from tests.fakes import FakeRetriever
from tests.sorl_algos.small_game import make_env

PASSAGES = (
    Passage("p0", "Peru", "Peru is a country. The capital of Peru is Lima. Its currency is the Sol."),
    Passage("p1", "Lima (city)", "Lima lies on the river Rímac. Lima was founded in 1535."),
)
ONE_HOP = Question("one", "What is the capital of Peru?", ("Lima",), metadata={
    "queries": ["Peru capital"], "hop_answers": ["Lima"]})  # fmt: skip
TWO_HOPS = Question("two", "On which river lies the capital of Peru?", ("Rímac",), metadata={
    "queries": ["Peru capital", "Lima river"], "hop_answers": ["Lima", "Rímac"]})  # fmt: skip
QUESTIONS = QuestionSet([ONE_HOP, TWO_HOPS])
GOOD = MixedScript(max_searches=2)


def env(slots: int = 3) -> Any:
    return make_env(slots, FakeRetriever(passages=PASSAGES), questions=QUESTIONS)


def test_the_good_script_wins(tokenizer: Any) -> None:
    finished: list[int] = []
    one, two = demonstrate(env(), Renderer(tokenizer), [ONE_HOP, TWO_HOPS], GOOD, seed=0, on_episodes=finished.append)
    assert one.action_texts == ("<search> Peru capital</search>", "<answer> Lima</answer>")
    assert two.action_texts == (
        "<search> Peru capital</search>", "<search> Lima river</search>", "<answer> Rímac</answer>",
    )  # fmt: skip
    assert (one.reward, two.reward, one.stop, two.stop) == (1.0, 1.0, "answered", "answered")
    assert finished == [2]
    assert list(two.turns[2].action_ids) == tokenizer.encode("<answer> Rímac</answer>")
    assert list(two.turns[2].observation_ids) == Renderer(tokenizer).next(two.turns[2].observation_text)
    assert "Rímac" in two.turns[2].observation_text and two.turns[2].action_logprobs[0] == 0.0


def test_a_bad_script_stays_in_form_and_seldom_wins(tokenizer: Any) -> None:
    bad = MixedScript(
        good_query=0.0, good_answer=0.0, max_searches=2, common_words=frozenset({"capital", "river"}),
        foreign_subjects=("Chile",),
    )  # fmt: skip
    played = demonstrate(env(), Renderer(tokenizer), [TWO_HOPS] * 40, bad, seed=1)
    assert all(isinstance(parse(text), (Search, Answer)) for item in played for text in item.action_texts)
    assert all(item.stop == "answered" for item in played)
    assert sum(item.reward for item in played) < 15
    assert len({item.action_texts for item in played}) > 5
    assert not any("<search> Peru capital</search>" in item.action_texts for item in played)


def test_guessing_answers_at_once(tokenizer: Any) -> None:
    played = demonstrate(env(), Renderer(tokenizer), [ONE_HOP] * 5, MixedScript(guess=1.0), seed=0)
    assert all(len(item.turns) == 1 and item.stop == "answered" for item in played)


def test_equal_seeds_give_equal_plays_in_any_number_of_slots(tokenizer: Any) -> None:
    mixed = MixedScript(good_query=0.5, good_answer=0.5, guess=0.2, max_searches=2)
    questions = [ONE_HOP, TWO_HOPS] * 4
    first = demonstrate(env(3), Renderer(tokenizer), questions, mixed, seed=5)
    assert demonstrate(env(8), Renderer(tokenizer), questions, mixed, seed=5) == first
    assert demonstrate(env(3), Renderer(tokenizer), questions, mixed, seed=6) != first


def test_rewriting_changes_what_is_learnt_and_not_what_is_played(tokenizer: Any) -> None:
    def swap(question: Any, rng: random.Random) -> Any:
        return renamed({"Peru": "Zorland", "Lima": "Quex"})

    [item] = demonstrate(env(), Renderer(tokenizer), [ONE_HOP], GOOD, seed=0, rewrite=swap)
    assert item.reward == 1.0
    assert item.action_texts == ("<search> Zorland capital</search>", "<answer> Quex</answer>")
    assert "capital of Zorland is Quex" in item.turns[1].observation_text
    assert "Peru" not in tokenizer.decode(item.token_ids())


def test_special_tokens_in_an_answer_stay_text(tokenizer: Any) -> None:
    odd = Question("odd", "What?", ("x",), metadata={"queries": [], "hop_answers": ["What"]})
    questions = QuestionSet([odd])
    [item] = demonstrate(
        make_env(1, questions=questions), Renderer(tokenizer), [odd],
        lambda *_: "<answer> <|end|></answer>", seed=0,
    )  # fmt: skip
    assert not set(item.turns[0].action_ids) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize(
    ("others", "text", "expected"),
    [
        ({"Oman": "Bex"}, "Oman's Romania, oman and OMAN (Oman)", "Bex's Romania, bex and OMAN (Bex)"),
        ({"New York": "A", "York": "B"}, "New York and York", "A and B"),
        ({"a.b": "x"}, "a.b acb", "x acb"),
        ({}, "left alone", "left alone"),
    ],
)
def test_names_are_exchanged_as_whole_words(others: dict[str, str], text: str, expected: str) -> None:
    assert renamed(others)(text) == expected


def test_common_words_are_those_of_relations() -> None:
    questions = [
        Question(f"q{n}", "?", ("a",), metadata={"queries": [f"name{n} capital"], "hop_answers": ["a"]})
        for n in range(50)
    ]
    assert common_words(questions, share=0.1) == {"capital"}
