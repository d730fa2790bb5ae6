"""Rewards and normalisation. Expected scores are worked by hand from the rules in the docstrings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env.actions import CutText
from sorl_env.questions import Question
from sorl_env.rewards import (
    REWARDS,
    answer_of,
    checked_reward,
    contains,
    contains_score,
    exact_match,
    exact_match_score,
    format_valid,
    normalize_answer,
    resolve_reward,
    token_f1,
    token_f1_score,
)

LISBON = Question("q", "Capital of Portugal?", ("Lisbon", "City of Lisbon", "Lisbonne"))


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        # an article is kept where nothing else is left
        ("A", "A", 1), ("C", "A", 0), ("the", "A", 0), ("", "A", 0), ("The Beatles", "beatles", 1),
        # dashes and apostrophes of every kind
        ("1914-1918", "1914–1918", 1), ("1914—1918", "1914-1918", 1), ("1914 to 1918", "1914-1918", 0),
        ("O’Neill", "O'Neill", 1),
        ("OʼNeill", "O`Neill", 1), ("Xi´an", "Xi'an", 1),
        ("5′ 3″", "5' 3\"", 1),
        ("−40", "-40", 1), ("co\u00adop", "coop", 1),
        # normal forms, case, width
        ("Zoe\u0308 Kravitz", "Zoë Kravitz", 1), ("ＢＢＣ　２０１２", "BBC 2012", 1),
        ("STRASSE", "Straße", 1),
        ("ﬁlm", "film", 1), ("ＣＤ－ＲＯＭ", "cd-rom", 1),
        ("Zoe", "Zoë", 0),
        # punctuation beyond ASCII
        ("《红楼梦》", "红楼梦", 1), ("東京。", "東京", 1), ("東京", "京東", 0), ("北京、", "北京", 1),
        ("¿Qué?", "qué", 1),
        # numbers
        ("$8.540", "$9.540", 0), ("1,234 metres", "1234 metres", 1), ("4 9", "4, 9", 1), ("9", "4, 9", 0),
        # equality, not containment
        ("not Jane Harlow", "Jane Harlow", 0), ("", "retriever", 0), ("TRUE.", "true", 1),
        ("Mount Elgon or Kilimanjaro", "Kilimanjaro", 0),
        # nothing but punctuation
        ("%", "%", 1), ("?", "%", 0), ("", "%", 0), ("...", "", 0), ("", "", 0),
    ],
)  # fmt: skip
def test_exact_match_score(prediction: str, gold: str, score: float) -> None:
    assert exact_match_score(prediction, gold) == score


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  A-Team!", "ateam"),
        ("“An” apple a day", "apple day"),
        ("An", "an"),
        ("the the", "the the"),
        ("", ""),
        (" \n", ""),
        ("100 °C", "100 °c"),
        ("e-\u0301", "é"),
    ],
)
def test_normalize_answer(text: str, normalized: str) -> None:
    assert normalize_answer(text) == normalized


@given(st.text(st.characters(codec=None), max_size=20))
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = normalize_answer(text)
    assert normalize_answer(once) == once
    assert once == " ".join(once.split())


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("Oslo Oslo Oslo Oslo", "Oslo", 0.4),  # P 1/4, R 1: 2 * .25 / 1.25
        ("new york new york", "new york", 2 / 3),  # P 2/4, R 1
        ("red blue", "red red blue", 0.8),  # P 1, R 2/3
        ("the red blue", "blue red", 1.0),
        ("", "Oslo", 0.0),
        ("Bergen", "Oslo", 0.0),
    ],
)
def test_token_f1_score(prediction: str, gold: str, score: float) -> None:
    assert token_f1_score(prediction, gold) == pytest.approx(score)


def test_best_over_all_answers() -> None:
    golds = Question("q", "Colours?", ("red red blue", "red blue", "green"))
    assert token_f1(["<answer>red blue</answer>"], golds) == 1.0
    scores = [exact_match([f"<answer>{text}</answer>"], LISBON) for text in ("lisbon", "LISBONNE", "Porto")]
    assert scores == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("it is Lima, Peru", "Lima", 1), ("limassol", "Lima", 0), ("not Lima", "lima", 1),
        ("", "Lima", 0),
        ("答案是北京市", "北京", 1),
        ("Lima", "Lima, Peru", 0), ("new yorkshire", "new york", 0), ("x", "", 0),
    ],
)  # fmt: skip
def test_contains_score(prediction: str, gold: str, score: float) -> None:
    assert contains_score(prediction, gold) == score


@pytest.mark.parametrize(
    ("texts", "answer"),
    [
        (["<search>x</search>", "<answer> Lima </answer>"], "Lima"),
        (["<think>count</think><answer>18</answer>" + " The reasoning checks out." * 400], "18"),
        (["<answer>a</answer> no, <answer>b</answer>"], "b"),
        (["<think><answer>Lima</answer></think> I stop."], None),
        (["<information><answer>Lima</answer></information>"], None),
        (["<search>x</search><answer>Lima</answer>"], None),  # never reached
        (["<answer>Lima"], None),
        (["<answer> </answer>"], None),
        ([CutText("<answer>Lima</answer>")], None),
        ([], None),
    ],
)
def test_answer_of(texts: list[str], answer: str | None) -> None:
    assert answer_of(texts) == answer


def test_no_answer_earns_nothing() -> None:
    empty = Question("q", "?", ("a", "the"))
    for reward in (REWARDS[name] for name in ("exact_match", "token_f1", "contains", "math_equal")):
        assert reward(["<think>Lisbon</think> Lisbon"], LISBON) == 0.0
        assert reward(["<answer></answer>"], empty) == 0.0
        assert reward(["<answer>Lisbon</answer>"], LISBON) == 1.0
    assert contains(["<answer>in Lisbon</answer>"], LISBON) == 1.0


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("<think>a</think>\n\n<answer>b</answer>\n", True),
        (
            "<think>a</think><search>q</search><information>i</information><think>b</think><answer>c</answer>",
            True,
        ),
        ("<think></think><answer>b</answer>", True),
        ("<think>a</think><think>b</think><answer>c</answer>", False),
        ("<think>a</think><answer>b</answer> extra", False),
        ("extra <think>a</think><answer>b</answer>", False),
        ("<answer>b</answer>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a</think><search>q</search><think>b</think><answer>c</answer>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a</think><answer>b", False),
        ("<think>a</think><answer>b</search>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a</think><search>q</search><information>i</information>", False),
        ("</think>a<think><answer>b</answer>", False),
        ("<think>a</think>", False),
        ("", False),
        ("text", False),
    ],
)
def test_format_valid(text: str, valid: bool) -> None:
    assert format_valid(text) is valid


def test_format_check_is_linear() -> None:
    assert not format_valid("<think>a</think>" * 100_000)  # a backtracking pattern would not come back


def test_names_and_functions() -> None:
    assert resolve_reward("exact_match") is exact_match
    assert resolve_reward(token_f1) is token_f1
    with pytest.raises(ValueError, match=r"'exact'; known: .*exact_match"):
        resolve_reward("exact")
    with pytest.raises(ValueError, match="must be a name"):
        resolve_reward(3)  # type: ignore[arg-type]


def test_a_reward_must_be_finite() -> None:
    def broken(action_texts: object, question: object) -> float:
        return float("nan")

    with pytest.raises(ValueError, match="broken gave nan for question 'q'"):
        checked_reward(broken, ["x"], LISBON)


def test_the_short_way_of_f1_is_the_long_one() -> None:
    # both ways against the definition: 2 |common| / (|a| + |b|) over multisets
    rng = random.Random(0)
    for size in (3, 40):
        for _ in range(100):
            one, other = ([rng.choice("bcdefgh") for _ in range(rng.randint(1, size))] for _ in range(2))
            common = sum(min(one.count(word), other.count(word)) for word in set(one))
            expected = 2 * common / (len(one) + len(other))
            assert token_f1_score(" ".join(one), " ".join(other)) == pytest.approx(expected)
