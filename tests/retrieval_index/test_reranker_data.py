from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrieval_index import Passage
from retrieval_index.bm25 import BM25Index
from retrieval_index.reranker_data import (
    Mined,
    TrainingQuestion,
    hash_share,
    load_questions,
    make_lists,
    split_held_out,
    without,
)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def asked(*texts: str) -> list[TrainingQuestion]:
    return [TrainingQuestion(text, ("x",)) for text in texts]


def test_questions_are_read_once_with_what_tells_the_right_passage(tmp_path: Path) -> None:
    first = write(
        tmp_path / "a.jsonl",
        {"question": "Who? ", "golden_answers": ["Ada"], "positive_ids": None, "source": "x"},
        "",
        {"question": "Is it?", "golden_answers": ["Yes", "sure"], "positive_ids": ["7"]},
    )
    second = write(tmp_path / "b.jsonl", {"question": "the WHO", "golden_answers": ["again"]})
    assert load_questions([first, second]) == [
        TrainingQuestion("Who?", ("Ada",)),
        TrainingQuestion("Is it?", ("sure",), frozenset({"7"})),
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "not JSON"),
        ("[]", 'text under "question"'),
        ({"question": " ", "golden_answers": ["a"]}, 'text under "question"'),
        ({"question": "q"}, '"golden_answers" or "positive_ids" are wanted'),
        ({"question": "q", "golden_answers": "a"}, '"golden_answers" must be a list'),
        ({"question": "q", "positive_ids": [7]}, '"positive_ids" must be a list'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, says: str) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "q", "golden_answers": ["a"]}, row)
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: .*{says}"):
        load_questions([path])


def test_no_question_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no question in .*a\.jsonl"):
        load_questions([write(tmp_path / "a.jsonl", "")])


def test_near_questions_are_dropped_whatever_their_case_and_order() -> None:
    unseen = ["Who painted the Guernica in Paris?"]  # five words without the article
    same, near, far = "in paris who painted GUERNICA", "who painted guernica in madrid", "who painted it"
    # near: 4 shared of 6 words; far: 2 of 6
    assert without(asked(same, near, far), unseen) == asked(near, far)
    assert without(asked(same, near, far), unseen, similarity=4 / 6) == asked(far)
    assert without(asked(same, near, far), unseen, similarity=0.3) == []
    assert without(asked(same), []) == asked(same)
    with pytest.raises(ValueError, match="similarity"):
        without([], [], similarity=0)


def test_the_short_cut_finds_what_comparing_all_finds() -> None:
    """Every question against every other, by the definition of Jaccard's measure."""
    texts = [f"q{i % 3} w{i % 5} v{i * i % 11} u{i * i % 7} t{i % 13}" for i in range(60)]
    questions, unseen = asked(*texts[:40]), texts[40:]

    def near(one: str, other: str, least: float) -> bool:
        a, b = set(one.split()), set(other.split())
        return len(a & b) / len(a | b) >= least

    for least, left in ((0.25, 0), (0.4, 14), (0.6, 38), (1.0, 40)):
        kept = [own for own in questions if not any(near(own.text, other, least) for other in unseen)]
        assert len(kept) == left  # so that the comparison is one
        assert without(questions, unseen, similarity=least) == kept


def test_the_held_out_share_is_the_same_on_every_run() -> None:
    questions = asked(*(f"question {number}" for number in range(1000)))
    train, out = split_held_out(questions, 0.1)
    assert sorted(train + out, key=questions.index) == questions
    assert 70 <= len(out) <= 130  # 100 expected, three standard deviations are 28
    assert split_held_out(questions[:500], 0.1)[1] == [own for own in out if own in questions[:500]]
    assert split_held_out(questions, 0) == (questions, [])
    assert hash_share("Is it?") == hash_share("is IT")
    with pytest.raises(ValueError, match="held-out share"):
        split_held_out(questions, 1)


@pytest.fixture
def base() -> BM25Index:
    """The shorter, the earlier among the hits of "red"."""
    texts = ["red kite", "red old kite", "red old blue kite Ada", "red old blue sea kite Ada Ada", "moon"]
    return BM25Index.from_passages(Passage(str(number), "", text) for number, text in enumerate(texts))


def test_the_first_hit_with_an_answer_is_right_and_others_without_are_wrong(base: BM25Index) -> None:
    [row], counts = make_lists([TrainingQuestion("red", ("ada",))], base)
    assert row.positive == "red old blue kite Ada"
    assert row.negatives == ("red kite", "red old kite")  # not passage 3, which holds the answer too
    assert (row.texts[0], row.place) == (row.positive, 2)
    assert counts == Mined(lists=1, unlabelled=0, no_positive=0, no_negative=0)


def test_a_named_passage_goes_before_one_with_an_answer(base: BM25Index) -> None:
    [row], _ = make_lists([TrainingQuestion("red", ("Ada",), frozenset({"1"}))], base)
    assert (row.positive, row.negatives, row.place) == ("red old kite", ("red kite",), 1)


def test_the_title_is_read_too() -> None:
    base = BM25Index.from_passages([Passage("a", "Kites", "red"), Passage("b", "", "red sea")])
    [row], _ = make_lists([TrainingQuestion("red", ("kites",))], base)
    assert row.positive == "Kites red"


def test_what_teaches_nothing_is_counted(base: BM25Index) -> None:
    questions = [
        TrainingQuestion("red"),  # a yes/no question
        TrainingQuestion("red", ("absent",)),
        TrainingQuestion("unknown", ("Ada",)),  # no hit
        TrainingQuestion("moon", ("moon",)),  # one hit, and it is right
    ]
    assert make_lists(questions, base) == ([], Mined(lists=0, unlabelled=1, no_positive=2, no_negative=1))
    with pytest.raises(ValueError, match="depth must be 2"):
        make_lists(questions, base, depth=1)


def test_negatives_are_drawn_by_seed_and_question_alone() -> None:
    base = BM25Index.from_passages(Passage(str(n), "", "red " + "x " * n + f"n{n}") for n in range(40))
    one, two = TrainingQuestion("red", ("n5",)), TrainingQuestion("red x", ("n5",))
    [first, _], _ = make_lists([one, two], base, negatives=6)
    [_, again], _ = make_lists([two, one], base, negatives=6)
    [other], _ = make_lists([one], base, negatives=6, seed=1)
    assert first == again
    assert first.negatives != other.negatives
    assert len(set(first.negatives)) == 6
    assert first.positive not in first.negatives
    [shallow], _ = make_lists([one], base, depth=7, negatives=30)
    assert len(shallow.negatives) == 6
