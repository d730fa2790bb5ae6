"""The rules of the game, without gymnasium."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from retrieval_index.types import Hit, Passage
from sorl_env.actions import CutText
from sorl_env.episode import INFO_KEYS, STOP_REASONS, Episode, EpisodeRules, Step
from sorl_env.questions import Question
from sorl_env.rewards import exact_match

DAM = Question("dam", "Which dam is the tallest?", ("Jinping-I",))
HITS = [Hit(Passage("p1", "Jinping-I Dam", "It is 305 m tall."), 2.0)]
SEARCH, RIGHT, WRONG = "<search>tallest dam</search>", "<answer>Jinping-I</answer>", "<answer>Nurek</answer>"


def play(actions: Sequence[str], **rules: Any) -> tuple[Episode, list[Step]]:
    episode = Episode(DAM, EpisodeRules(**rules), exact_match)
    episode.begin()
    steps = []
    for action in actions:
        hits = HITS if episode.query(action) is not None else None
        steps.append(episode.advance(action, hits))
    return episode, steps


def flags(steps: Sequence[Step]) -> list[tuple[bool, bool, float]]:
    return [(step.terminated, step.truncated, step.reward) for step in steps]


def test_search_then_answer() -> None:
    episode, (first, second) = play([SEARCH, RIGHT], max_searches=1)
    assert first.observation == ("\n\n<information>Doc 1(Title: Jinping-I Dam) It is 305 m tall.</information>\n\n")
    assert first.info["retrieved_ids"] == ("p1",) and first.info["retrieved_titles"] == ("Jinping-I Dam",)
    assert (first.info["action_kind"], first.info["searches"], first.info["stop"]) == ("search", 1, None)
    assert (second.observation, second.reward, second.terminated, second.truncated) == ("", 1.0, True, False)
    assert (second.info["action_kind"], second.info["stop"], second.info["answer"]) == (
        "answer",
        "answered",
        "Jinping-I",
    )
    assert episode.finished and episode.turns_left == 0


def test_a_wrong_answer_ends_the_episode_too() -> None:
    assert flags(play([WRONG])[1]) == [(True, False, 0.0)]


def test_n_searches_and_one_further_turn() -> None:
    # two searches are allowed: the third turn is for the answer, a search in it is not carried out
    _, steps = play([SEARCH] * 3, max_searches=2)
    assert flags(steps) == [(False, False, 0.0), (False, False, 0.0), (False, True, 0.0)]
    assert steps[-1].info["stop"] == "turn_limit"
    assert (steps[-1].info["searches"], steps[-1].info["retrieved_ids"]) == (2, ())
    assert play([SEARCH, SEARCH, RIGHT], max_searches=2)[1][-1].reward == 1.0


def test_no_search_allowed() -> None:
    assert flags(play([SEARCH], max_searches=0)[1]) == [(False, True, 0.0)]
    assert flags(play([RIGHT], max_searches=0)[1]) == [(True, False, 1.0)]


def test_invalid_turns_count_and_change_nothing_else() -> None:
    episode, steps = play(["let me think", "<search> </search>", RIGHT], max_searches=2)
    assert flags(steps) == [(False, False, 0.0), (False, False, 0.0), (True, False, 1.0)]
    assert [step.info["action_kind"] for step in steps] == ["invalid", "invalid", "answer"]
    assert episode.searches == 0
    assert "<search>" in steps[0].observation and "query is empty" in steps[1].observation
    assert "<search>" not in steps[1].observation.split("Write ")[1]  # only the answer is left


def test_a_question_cannot_earn_the_reward() -> None:
    trap = Question("trap", "Say <answer>Jinping-I</answer>?", ("Jinping-I",))
    episode = Episode(trap, EpisodeRules(max_searches=0), exact_match)
    assert "<answer>Jinping-I</answer>" in episode.begin()
    assert episode.advance("I say nothing.").reward == 0.0


def test_penalty_cost_and_their_sum() -> None:
    _, steps = play(["hm", SEARCH, RIGHT], max_searches=2, invalid_penalty=0.25, search_cost=0.125)
    assert [step.reward for step in steps] == [-0.25, -0.125, 1.0]
    _, steps = play(["hm"], max_searches=0, invalid_penalty=0.25)
    assert steps[0].reward == -0.25


def test_cut_turns_are_invalid_without_penalty() -> None:
    _, steps = play([CutText(RIGHT), CutText("<think>long")], max_searches=1, invalid_penalty=0.5)
    assert flags(steps) == [(False, False, 0.0), (False, True, 0.0)]
    assert [step.info["action_kind"] for step in steps] == ["cut", "cut"]
    assert "cut at the length limit" in steps[0].observation
    assert steps[-1].info["stop"] == "length_limit"


def test_failed_retrieval_ends_the_episode_without_reward() -> None:
    episode = Episode(DAM, EpisodeRules(search_cost=0.5), lambda texts, question: 1.0)
    episode.begin()
    step = episode.advance(SEARCH, error=True)
    assert (step.observation, step.reward, step.terminated, step.truncated) == ("", 0.0, False, True)
    assert step.info["stop"] == "retrieval_error"


def test_step_after_the_end_and_before_the_start() -> None:
    episode, _ = play([RIGHT])
    for call in (episode.query, episode.advance):
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            call(SEARCH)
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        Episode(DAM, EpisodeRules(), exact_match).advance(RIGHT)
    assert episode.begin() and not episode.finished


def test_hits_must_fit_the_action() -> None:
    episode = Episode(DAM, EpisodeRules(), exact_match)
    episode.begin()
    with pytest.raises(ValueError, match="needs its hits"):
        episode.advance(SEARCH)
    with pytest.raises(ValueError, match="leads to no search"):
        episode.advance(RIGHT, HITS)
    assert episode.action_texts == []


def test_budget_is_told_when_asked() -> None:
    episode = Episode(DAM, EpisodeRules(max_searches=2, tell_budget=True), exact_match)
    assert episode.begin().endswith("Searches left: 2.\n\n")
    assert episode.advance(SEARCH, HITS).observation.endswith("</information>\n\nSearches left: 1.\n\n")
    assert episode.advance("hm").observation.endswith("Searches left: 0.\n\n")


def test_rewards_see_the_policys_own_words_only() -> None:
    seen: list[tuple[str, ...]] = []

    def spy(action_texts: Sequence[str], question: Question) -> float:
        seen.append(tuple(action_texts))
        return 0.5

    episode = Episode(DAM, EpisodeRules(), spy)
    episode.begin()
    episode.advance(SEARCH, HITS)
    assert episode.advance(RIGHT).reward == 0.5
    assert seen == [(SEARCH, RIGHT)]


@pytest.mark.parametrize("turns", range(4))
def test_state_is_restored_exactly(turns: int) -> None:
    actions = ["hm", SEARCH, CutText("<think>so"), RIGHT]
    rules = EpisodeRules(max_searches=3, invalid_penalty=0.1)
    one = Episode(DAM, rules, exact_match)
    one.begin()

    def advance(episode: Episode, action: str) -> Step:
        return episode.advance(action, HITS if episode.query(action) else None)

    for action in actions[:turns]:
        advance(one, action)
    state = json.loads(json.dumps(one.get_state()))
    two = Episode(DAM, rules, exact_match)
    two.set_state(state)
    three = pickle.loads(pickle.dumps(copy.deepcopy(one)))
    rest = [advance(one, action) for action in actions[turns:]]
    assert rest == [advance(two, action) for action in actions[turns:]]
    assert rest == [advance(three, action) for action in actions[turns:]]
    assert one.get_state() == two.get_state() and one.transcript() == two.transcript()


def test_state_of_something_else_is_refused() -> None:
    episode, _ = play([SEARCH])
    state = episode.get_state()
    with pytest.raises(ValueError, match="other rules"):
        Episode(DAM, EpisodeRules(max_searches=5), exact_match).set_state(state)
    other = Question("other", "Why?", ("so",))
    with pytest.raises(ValueError, match="'dam'"):
        Episode(other, EpisodeRules(), exact_match).set_state(state)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_searches": -1}, "max_searches"),
        ({"max_searches": 1.5}, "max_searches"),
        ({"max_searches": True}, "max_searches"),
        ({"top_k": 0}, "top_k"),
        ({"max_observation_words": 2}, "max_observation_words"),
        ({"max_query_chars": 0}, "max_query_chars"),
        ({"invalid_penalty": -0.1}, "invalid_penalty"),
        ({"search_cost": float("nan")}, "search_cost"),
        ({"prompt": "long"}, "known: closed_book, math, medical, medical_tools, search_r1, short, tools"),
        ({"prompt": "{question} {question}"}, "exactly once"),
        ({"prompt": "line one\nno place"}, "unknown prompt"),
        ({"tell_budget": "yes"}, "tell_budget must be True or False, got 'yes'"),
        ({"prompt": "search_r1", "dialect": "tool_call"}, "use 'tools' or 'medical_tools' or 'short', or a wording"),
        ({"prompt": "tools"}, "'tools' explains the dialect 'tool_call', but the dialect is 'search_r1'"),
    ],
)
def test_rules_that_make_no_sense(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        EpisodeRules(**options)


def test_prompts(tmp_path: Path) -> None:
    def first(prompt: str | Path, question: str = "Why?") -> str:
        return Episode(Question("q", question, ("a",)), EpisodeRules(prompt=prompt), exact_match).begin()

    assert first("short") == "Question: Why?\n"
    assert first("Q {question} A", "{question} {x} %s") == "Q {question} {x} %s A"
    assert all(tag in first("search_r1") for tag in ("<think>", "<search>", "<information>", "<answer>"))
    assert "<answer>" in first("closed_book") and "search" not in first("closed_book").lower()
    assert "<information>" not in first("closed_book") and first("closed_book").endswith("Question: Why?\n")
    (tmp_path / "own.txt").write_text("Frage: {question}", encoding="utf-8")
    assert first(tmp_path / "own.txt") == "Frage: Why?"
    (tmp_path / "bad.txt").write_text("Frage:", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.txt.*exactly once"):
        first(tmp_path / "bad.txt")
    (tmp_path / "latin.txt").write_bytes(b"\xfc {question}")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        first(tmp_path / "latin.txt")


def test_info_has_fixed_keys_and_named_stops() -> None:
    for actions in ([RIGHT], ["hm"], [SEARCH] * 3, [CutText("x")] * 3):
        for step in play(actions)[1]:
            assert tuple(step.info) == INFO_KEYS
            assert step.info["stop"] in (None, *STOP_REASONS)


def test_a_prompt_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Say it: {question}", encoding="utf-8")
    rules = EpisodeRules(prompt=path)
    path.write_text("broken", encoding="utf-8")
    assert Episode(DAM, rules, exact_match).begin() == f"Say it: {DAM.text}"
    assert rules == EpisodeRules(prompt="Say it: {question}")  # so that a state fits, wherever the file lies


@pytest.mark.parametrize(("dialect", "word"), [("search_r1", "<search>"), ("tool_call", "call the tool search")])
def test_without_a_prompt_the_dialect_explains_itself(dialect: str, word: str) -> None:
    assert word in Episode(DAM, EpisodeRules(dialect=dialect), exact_match).begin()
