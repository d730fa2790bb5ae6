"""Demonstrations on real questions: queries that hit, answers as they stand, a split that holds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gymnasium
import pytest

import sorl_env  # noqa: F401  registers the environments
from retrieval_index.types import Passage
from sorl_algos.models import save_language_model
from sorl_algos.real_demonstrations import (
    ReadingScript,
    find_queries,
    in_dev,
    keywords,
    read,
    real_demonstrations,
)
from sorl_algos.real_warm_start import WarmStart, WarmStartConfig, check_same, split
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.tiny import tiny_language_model, train_tokenizer
from sorl_env.controls import named_passages
from sorl_env.questions import Question, QuestionSet, load_questions
from tests.fakes import FakeRetriever

ELWAY = Passage("p1", "Super Bowl (game)", "He is 39. The record was held by John Elway, who was 38. It ended.")
OTHER = Passage("p2", "Lima", "Lima is the capital of Peru.")
QUESTION = Question("q1", "Who held the record at 38?", ("john elway", "Elway"), metadata={"positive_ids": ["p1"]})
SHOWN = (
    "\n\n<information>Doc 1(Title: Super Bowl (game)) He is 39. The record was held by John Elway, who was 38. "
    "It ended.</information>\n\n"
)


def test_keywords_are_the_words_that_carry_meaning() -> None:
    assert keywords("Who held the record at 38?") == "held record 38"
    assert keywords("what's the U.S. state of New-York?") == "what's U.S state New-York"


def test_a_question_of_function_words_alone_is_searched_as_it_stands() -> None:
    assert keywords("Who is it?") == "Who is it"


def test_a_query_counts_only_if_a_known_passage_is_among_the_hits() -> None:
    """Keywords miss for q2, its full text hits; q3's passage is never found; q4 knows no passage."""
    questions = [
        QUESTION,
        Question("q2", "Where is the capital?", ("Peru",), metadata={"positive_ids": ["p2"]}),
        Question("q3", "Where is gold?", ("Peru",), metadata={"positive_ids": ["p9"]}),
        Question("q4", "Who held the record at 38?", ("Elway",)),
    ]
    retriever = FakeRetriever(
        {
            "held record 38": [OTHER, ELWAY],
            "capital": [ELWAY],
            "Where is the capital": [OTHER],
            "gold": [OTHER],
            "Where is gold": [OTHER],
        }
    )
    assert find_queries(questions, retriever, top_k=2) == {"q1": "held record 38", "q2": "Where is the capital"}
    assert [len(queries) for queries, _ in retriever.calls] == [3, 2]  # one batch for each kind of query
    assert find_queries([QUESTION], retriever, top_k=1) == {}  # p1 is only the second hit


def test_the_answer_is_given_as_it_stands_in_the_passage() -> None:
    found = read(SHOWN, QUESTION.text, QUESTION.answers)
    assert found is not None
    assert found.answer == "John Elway"
    assert found.title == "Super Bowl (game)"


def test_the_sentence_nearest_to_the_question_is_taken() -> None:
    """38 stands in two passages; the second shares "record" and "held" with the question."""
    shown = "<information>Doc 1(Title: T) Room 38 was closed.\nDoc 2(Title: U) The record was 38.</information>"
    found = read(shown, "What record was held?", ["38"])
    assert found is not None and (found.answer, found.title) == ("38", "U")


def test_yes_and_no_stand_nowhere() -> None:
    assert read("<information>Doc 1(Title: T) There was no record.</information>", "Was there one?", ["no"]) is None


def test_a_passage_without_title_is_called_the_passage() -> None:
    script, rng = ReadingScript({"q1": "held record 38"}), random.Random(0)
    shown = "<information>Doc 1 The record was held by John Elway.</information>"
    assert script(QUESTION, shown, 1, rng).startswith("<think>According to the passage, it is John Elway.</think>")


def test_part_of_a_word_is_no_answer_and_long_answers_are_left_out() -> None:
    assert read("<information>Doc 1(Title: T) 1380 men</information>", "How many?", ["38"]) is None
    text = "one two three four five six seven"
    assert read(f"<information>Doc 1(Title: T) {text}</information>", "What?", [text]) is None


def test_the_script_searches_then_names_the_passage_and_answers() -> None:
    script, rng = ReadingScript({"q1": "held record 38"}), random.Random(0)
    assert script(QUESTION, "Question: ...", 0, rng).endswith("<search> held record 38</search>")
    assert script(QUESTION, SHOWN, 1, rng) == (
        "<think>According to Super Bowl (game), it is John Elway.</think><answer> John Elway</answer>"
    )


def test_a_question_with_options_is_answered_with_the_right_one() -> None:
    question = Question("q5", "Does it help?", ("B",), "choice", {"options": {"A": "yes", "B": "no"}, "pmid": "7"})
    retriever = FakeRetriever({"help": [Passage("pmid-7", "PubMed 7", "It did not.")]})
    queries = find_queries([question], retriever, top_k=1, named=named_passages)
    assert queries == {"q5": "help"}
    script, rng = ReadingScript(queries), random.Random(0)
    assert script(question, SHOWN, 1, rng) == "<think>The passage suggests no.</think><answer> no</answer>"


def test_only_rewarded_short_episodes_become_demonstrations() -> None:
    """q2's known passage is found but does not hold its answer; q3 has no known passage."""
    questions = QuestionSet(
        [
            QUESTION,
            Question("q2", "Where is the capital?", ("Quito",), metadata={"positive_ids": ["p2"]}),
            Question("q3", "Where is the capital?", ("Peru",)),
        ]
    )
    retriever = FakeRetriever({"held record 38": [ELWAY], "capital": [OTHER]})
    env = gymnasium.make_vec(
        "SearchQA-v0",
        num_envs=2,
        retriever=retriever,
        questions=questions,
        prompt="short",
        max_searches=1,
        top_k=1,
        max_observation_words=40,
    )
    renderer = Renderer(train_tokenizer([SHOWN, QUESTION.text], 400))
    options = {"top_k": 1, "seed": 0}
    (episode,) = real_demonstrations(env, renderer, questions, retriever, max_tokens=400, **options)
    assert episode.question_id == "q1" and episode.stop == "answered"
    assert [turn.reward for turn in episode.turns] == [0.0, 1.0]
    assert "John Elway" in episode.turns[1].observation_text
    tokens = sum(len(turn.observation_ids) + len(turn.action_ids) for turn in episode.turns)
    assert real_demonstrations(env, renderer, questions, retriever, max_tokens=tokens - 1, **options) == []


def test_the_split_is_a_function_of_seed_and_id_alone() -> None:
    """Binomial(5000, 0.2): standard deviation 28, so four of them are 113."""
    held = [in_dev(f"q{number}", share=0.2, seed=0) for number in range(5000)]
    assert abs(sum(held) - 1000) < 113
    assert held[:100] == [in_dev(f"q{number}", share=0.2, seed=0) for number in range(100)]
    assert held != [in_dev(f"q{number}", share=0.2, seed=1) for number in range(5000)]


def test_the_parts_are_disjoint_and_their_files_load_as_the_same_questions(tmp_path: Path) -> None:
    questions = QuestionSet(
        Question(f"q{number}", "Who?", ("A", "B"), metadata={"positive_ids": ["p1"]}) for number in range(50)
    )
    train, dev = split(WarmStartConfig(run_dir=tmp_path), questions)
    assert set(train.ids) | set(dev.ids) == set(questions.ids) and not set(train.ids) & set(dev.ids)
    assert load_questions(tmp_path / "train.jsonl") == train
    assert load_questions(tmp_path / "dev.jsonl") == dev


def test_a_field_can_say_what_is_held_out(tmp_path: Path) -> None:
    questions = QuestionSet(
        Question(f"q{number}", "Who?", ("A",), metadata={"official_test": number < 3}) for number in range(9)
    )
    train, dev = split(WarmStartConfig(run_dir=tmp_path, held_out_field="official_test"), questions)
    assert dev.ids == ("q0", "q1", "q2") and len(train) == 6
    with pytest.raises(ValueError, match="held_out_field"):
        split(WarmStartConfig(run_dir=tmp_path, held_out_field="no_such"), questions)


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dev_share"):
        split(WarmStartConfig(run_dir=tmp_path), QuestionSet([QUESTION]))


def test_a_run_directory_of_other_settings_is_refused(tmp_path: Path) -> None:
    check_same(WarmStartConfig(run_dir=tmp_path), {"index": Path("indexes/wiki")})
    check_same(WarmStartConfig(run_dir=tmp_path), {"index": Path("indexes/wiki")})
    with pytest.raises(ValueError, match=r"lr=0\.0003, this one has 0\.001"):
        check_same(WarmStartConfig(run_dir=tmp_path, lr=1e-3), {"index": Path("indexes/wiki")})
    with pytest.raises(ValueError, match="indexes/other"):
        check_same(WarmStartConfig(run_dir=tmp_path), {"index": Path("indexes/other")})
    assert json.loads((tmp_path / "warm_start.json").read_text(encoding="utf-8"))["lr"] == 3e-4


class Silent:
    """A Progress that counts the stages begun."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def begin(self, stage: str, total: int) -> None:
        self.stages.append(stage)

    def advance(self, steps: int = 1, note: str = "") -> None:
        pass


def test_a_second_run_finds_every_stage_done(tmp_path: Path) -> None:
    """The loss of imitating one episode falls, the model is saved, and nothing is done twice."""
    tokenizer = train_tokenizer([SHOWN, QUESTION.text], 400)
    model = tiny_language_model(
        len(tokenizer),
        hidden_size=16,
        layers=1,
        heads=2,
        intermediate_size=32,
        seed=0,
        pad_id=tokenizer.pad_token_id,
        end_id=tokenizer.eos_token_id,
    )
    save_language_model(model, tokenizer, tmp_path / "start")
    config = WarmStartConfig(
        run_dir=tmp_path / "run",
        model=str(tmp_path / "start"),
        prompt="short",
        zero_shot_prompt="short",
        steps=5,
        batch_sequences=1,
        lr=1e-2,
        bfloat16=False,
        max_turn_tokens=4,
    )
    config.run_dir.mkdir()
    dev = QuestionSet([Question("q7", "Who?", ("A",))])
    retriever = FakeRetriever({"held record 38": [ELWAY]})
    first, second = Silent(), Silent()
    entries = WarmStart(config, QuestionSet([QUESTION]), dev, retriever, first).execute()
    assert [entry["name"] for entry in entries] == ["zero shot", "warm start"] and len(first.stages) == 3
    losses = json.loads((config.run_dir / "losses.json").read_text(encoding="utf-8"))["losses"]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert WarmStart(config, QuestionSet([QUESTION]), dev, retriever, second).execute() == entries
    assert second.stages == []


def test_questions_that_the_index_does_not_serve_are_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([SHOWN], 300)
    model = tiny_language_model(len(tokenizer), hidden_size=16, layers=1, heads=2, intermediate_size=32, seed=0,
                                pad_id=tokenizer.pad_token_id, end_id=tokenizer.eos_token_id)  # fmt: skip
    save_language_model(model, tokenizer, tmp_path / "start")
    config = WarmStartConfig(run_dir=tmp_path, model=str(tmp_path / "start"), zero_shot_limit=0)
    with pytest.raises(ValueError, match="positive_ids"):
        WarmStart(config, QuestionSet([QUESTION]), QuestionSet([QUESTION]), FakeRetriever(), Silent()).execute()
