"""Multiple choice: which option an answer chooses, and the rewards made of it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env.actions import CutText
from sorl_env.choices import choice_of, gold_letter, gold_of, letter_of, options_of, yes_no_maybe
from sorl_env.legacy import mirage_legacy, mirage_letter, search_r1_legacy, search_r1_legacy_score
from sorl_env.questions import Question
from sorl_env.rewards import (
    REWARDS,
    WeightedSum,
    answer_scores,
    choice_accuracy,
    format_reward,
    resolve_reward,
)

VITAMINS = {"A": "Vitamin B", "B": "Vitamin C", "C": "Vitamin B12", "D": "Folate"}
SCURVY = Question("s", "Lack of what causes scurvy?", ("B",), "choice", {"options": VITAMINS})


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: **D**", "D"),
        ("Answer seems simple enough.\n\nAnswer: C", "C"),
        ("The correct answer is (B).", "B"),
        ("I first considered (A), but it is wrong. Final answer: D.", "D"),
        ("b", "B"),
        ("(c)", "C"),
        ("B) Metformin", "B"),
        ("B. Metformin", "B"),
        ("(B) Metformin", "B"),
        ("D: 40 mg", "D"),
        ("D.", "D"),
        ("Option C", "C"),
        ("the answer is A", "A"),
        ("The answer is option B, since A is wrong.", "B"),
        ("Answer: B, because A and C are wrong", "B"),
        ("The answer would be C.", "C"),
        ("$\\boxed{B}$", "B"),
        ("The answer is \\textbf{C}.", "C"),
        ("Ｂ", "B"),
        ("answer: (b)", "B"),
        ("Answer: A. Then again, the correct option is D.", "D"),
        # articles, pronouns and initials are no letters
        ("A patient with fever most likely has malaria.", None),
        ("The answer is a virus", None),
        ("The answer is A virus of the liver", None),
        ("Based on the findings we cannot decide.", None),
        ("A. baumannii", None),
        ("I think so", None),
        ("Answer: Dopamine", None),
        ("The answer isn't clear", None),
        # two letters are no answer, nor is a letter that no option has
        ("Answer: A, B", None),
        ("The answer is A or B", None),
        ("Answer: (A) and (C)", None),
        ("Answer: A/B", None),
        ("A) yes\nB) no", None),
        ("E", None),
        ("Answer: E", None),
        ("AB", None),
        ("", None),
    ],
)
def test_letter_of(text: str, letter: str | None) -> None:
    assert letter_of(text, ["A", "B", "C", "D"]) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Vitamin B12", "C"), ("vitamin c", "B"), ("Vitamin", None), ("D", "D"), ("Vitamin B", "A"),
        ("The answer is Vitamin B12.", "C"), ("vitamin-c", None), ("“Folate”", "D"), ("folate.", "D"),
        ("C) Vitamin B12", "C"), ("Vitamin B or Vitamin C", None), ("Vitamin D", None),
    ],
)  # fmt: skip
def test_choice_of(text: str, letter: str | None) -> None:
    assert choice_of(text, VITAMINS) == letter


def test_numbers_are_not_normalised_away() -> None:
    doses = {"A": "1.5 mg", "B": "15 mg", "C": "-5", "D": "5"}
    assert [choice_of(text, doses) for text in ("1.5 mg", "15 mg", "-5", "5", "1,5mg")] == [
        "A",
        "B",
        "C",
        "D",
        None,
    ]


def test_the_letter_of_a_name_is_no_article() -> None:
    vitamins = {"A": "Vitamin A", "B": "Vitamin C"}
    assert [choice_of(text, vitamins) for text in ("vitamin a", "a vitamin", "vitamin")] == ["A", None, None]


def test_equal_options_cannot_be_chosen_by_text() -> None:
    assert choice_of("aspirin", {"A": "Aspirin", "B": "aspirin", "C": "none"}) is None


def test_labels_as_options() -> None:
    labels = {"A": "yes", "B": "no", "C": "maybe"}
    texts = ("yes", "No, the trial failed", "maybe", "both yes and no", "C")
    assert [choice_of(text, labels) for text in texts] == ["A", "B", "C", None, "C"]


def test_yes_no_maybe_reads_whole_words() -> None:
    texts = ("Knowledge is limited here", "Yes", "no, the trial failed", "both yes and no", "no no", "")
    assert [yes_no_maybe(text) for text in texts] == [None, "yes", "no", None, "no", None]


def test_gold_index() -> None:
    assert gold_letter(0, 4, index_base=0) == "A"
    assert gold_letter(4, 4, index_base=1) == "D"
    assert gold_letter(-1, 4, index_base=0) is None  # a hidden label is not the last option
    for index, base in ((4, 0), (0, 1), (5, 1), (-2, 0)):
        with pytest.raises(ValueError, match="outside the 4 options"):
            gold_letter(index, 4, base)


def test_gold_and_options() -> None:
    assert gold_of(SCURVY) == "B"
    by_text = Question("t", "?", ("Folate",), "choice", {"options": ["Iron", "Folate"]})
    assert (gold_of(by_text), options_of(by_text)) == ("B", {"A": "Iron", "B": "Folate"})
    with pytest.raises(ValueError, match="'u': none of its answers"):
        gold_of(Question("u", "?", ("Zinc",), "choice", {"options": VITAMINS}))
    with pytest.raises(ValueError, match="'v' has no options"):
        choice_accuracy(["<answer>A</answer>"], Question("v", "?", ("A",)))


@given(st.text(max_size=40))
def test_never_raises(text: str) -> None:
    assert choice_of(text, VITAMINS) in (None, *VITAMINS)


@pytest.mark.parametrize("unit", ["Answer: ", "(A) ", "answer is is ", "A, ", "\\boxed{", "option option "])
def test_reading_is_linear(unit: str) -> None:
    start = time.perf_counter()
    letter_of(unit * (200_000 // len(unit)), ["A", "B"])
    assert time.perf_counter() - start < 3.0


def test_choice_accuracy_and_its_scores() -> None:
    def scores(text: str) -> tuple[float, float]:
        found = answer_scores([text], SCURVY)
        assert found["choice_accuracy"] == choice_accuracy([text], SCURVY)
        return found["choice_accuracy"], found["unparseable"]

    assert scores("<answer>B</answer>") == (1.0, 0.0)
    assert scores("<answer>Vitamin C</answer>") == (1.0, 0.0)
    assert scores("<answer>The answer is (A)</answer>") == (0.0, 0.0)
    assert scores("<answer>some vitamin</answer>") == (0.0, 1.0)
    assert scores("B") == (0.0, 0.0)  # no answer at all is not an unparseable one


def test_format_reward() -> None:
    good = ["<think>a</think><search>q</search>", "<think>b</think>\n<answer>c</answer>"]
    assert format_reward(good, SCURVY) == 1.0
    assert format_reward(good[1:], SCURVY) == 1.0
    assert format_reward(good[:1], SCURVY) == 0.0
    assert format_reward(["hm", *good], SCURVY) == 0.0
    assert format_reward(["<search>q</search>", good[1]], SCURVY) == 0.0
    # the environment's block, written by the policy
    assert format_reward(["<think>a</think><search>q</search><information>i</information>" + good[1]], SCURVY) == 0.0


def test_weighted_sums() -> None:
    texts = ["<think>so</think><answer>B</answer>"]
    for spec in ("choice_accuracy + 0.25*format", {"choice_accuracy": 1, "format": 0.25}):
        reward = resolve_reward(spec)
        assert reward(texts, SCURVY) == 1.25
        assert reward(["<answer>B</answer>"], SCURVY) == 1.0
    assert resolve_reward("-0.5*format")(texts, SCURVY) == -0.5
    for spec, message in (
        ("exact_match + 0.1*forms", "unknown reward 'forms'; known"),
        ("x*format", "not a weighted reward"),
        ({}, "at least one reward"),
        ({"format": float("nan")}, "finite"),
        ("", "unknown reward ''"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_reward(spec)
    assert WeightedSum((("format", 1.0),)) == resolve_reward({"format": 1.0})


def test_search_r1_legacy_keeps_that_projects_faults() -> None:
    lisbon = Question("q", "?", ("Lisbon", "the"))
    legacy = REWARDS["search_r1_legacy"]
    assert legacy(["<search>x</search>", "<answer>lisbon.</answer>"], lisbon) == 1.0
    assert legacy(["<think><answer>Lisbon</answer></think>"], lisbon) == 1.0  # a thought counts there
    assert legacy(["<answer>...</answer>"], lisbon) == 1.0  # "the" is empty there, and so is this
    assert legacy(["<answer>Lisboa</answer>"], lisbon) == 0.0
    assert legacy(["Lisbon"], lisbon) == 0.0
    # a whole transcript: the prompt's example is the first answer, retrieved text can be the last
    prompt = "For example, <answer> Beijing </answer>. Question: ?"
    assert search_r1_legacy_score(prompt + "<answer> Lisbon </answer>", lisbon.answers) == 1.0
    assert search_r1_legacy_score(prompt + "<information><answer>Lisbon</answer></information>", ["Lisbon"]) == 1.0
    assert search_r1_legacy_score(prompt, ["Beijing"]) == 0.0
    assert search_r1_legacy(["<answer>Zoë</answer>"], Question("z", "?", ("Zoe\u0308",))) == 0.0


def test_mirage_legacy_keeps_that_projects_faults() -> None:
    texts = {
        "B": "B", " C. because": "C", "Option D is right": "D", "The answer is: B": "B", "A or B": "A",
        "B and C": "B",
        "D/E": "D", "C, surely": "C", "I do not know": "A", "b": "A", "E": "A", 'D"': "D", "B) x": "A",
    }  # fmt: skip
    assert {text: mirage_letter(text) for text in texts} == texts
    assert mirage_legacy(["<answer>B</answer>"], SCURVY) == 1.0
    assert mirage_legacy(["It must be option B: no, Option B"], SCURVY) == 1.0
    assert mirage_legacy([CutText("Option B")], SCURVY) == 0.0
    assert mirage_legacy([], Question("a", "?", ("A",), "choice", {"options": VITAMINS})) == 1.0
