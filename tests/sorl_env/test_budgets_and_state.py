"""Budgets of words, and the whole state of many episodes."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest

import sorl_env  # noqa: F401  (registers the environments)
from retrieval_index.types import Hit, Passage
from sorl_env.actions import CutText
from sorl_env.episode import Episode, EpisodeRules
from sorl_env.questions import Question
from sorl_env.rewards import exact_match
from tests.fakes import FakeRetriever

HITS = [Hit(Passage("p", "", "one two three four five six"), 1.0)]
QUESTIONS = [Question(f"q{number}", f"Capital of land {number}?", (f"City {number}",)) for number in range(5)]
PASSAGES = [Passage(f"p{number}", f"Land {number}", f"land {number} has City {number}") for number in range(5)]


def begun(**rules: Any) -> Episode:
    episode = Episode(Question("q", "?", ("a",)), EpisodeRules(prompt="short", **rules), exact_match)
    episode.begin()
    return episode


def test_a_turn_over_its_budget_counts_as_cut_and_costs_nothing() -> None:
    episode = begun(max_turn_words=3, invalid_penalty=1.0)
    long = "well then I say <answer>a</answer>"
    assert episode.query("a b c <search>x</search>") is None
    step = episode.advance(long)
    assert (step.info["action_kind"], step.reward, step.terminated) == ("cut", 0.0, False)
    assert isinstance(episode.action_texts[0], CutText) and episode.action_texts[0] == long
    assert episode.advance("so it's <answer>a</answer>").reward == 1.0


def test_observations_are_cut_to_what_is_left_of_the_whole_budget() -> None:
    # 1 word said, 9 left: the two tags count 2, so 7 of the 8 words "Doc 1 one … six" fit
    episode = begun(max_total_words=10, max_searches=3)
    step = episode.advance("<search>x</search>", HITS)
    assert step.observation.strip() == "<information>Doc 1 one two three four five</information>"
    assert not step.truncated
    step = episode.advance("<search>y</search>")  # 1 left after it
    assert step.truncated and step.info["stop"] == "length_limit"


def test_a_search_that_no_longer_fits_is_not_carried_out() -> None:
    episode = begun(max_total_words=3, max_searches=3)
    assert episode.query("<search>x</search>") is None
    step = episode.advance("<search>x</search>")
    assert (step.info["stop"], step.info["searches"], step.observation, step.truncated) == ("length_limit", 0, "", True)


def test_an_answer_counts_whatever_is_left() -> None:
    step = begun(max_total_words=1).advance("a long way to <answer>a</answer>")
    assert (step.reward, step.info["stop"]) == (1.0, "answered")


def test_the_budget_is_told_with_what_is_left() -> None:
    episode = begun(max_total_words=100, tell_budget=True)
    assert episode.observations[0].endswith("Searches left: 2. Words left: 100.\n\n")
    step = episode.advance("<search>x</search>", HITS)
    # 1 said, 8 read, and the 6 of this line
    assert step.observation.endswith("Searches left: 1. Words left: 85.\n\n")
    spoken = ["<search>x</search>", *step.observation.split()]
    assert 100 - len(spoken) == 85


def test_a_hint_counts_too_and_may_use_the_budget_up() -> None:
    # the hint: Not a valid action: no <search> or <answer> was found. Write <search>query</search> or
    # <answer>answer</answer>. = 14 words; with the 2 said, 16
    assert begun(max_total_words=17).advance("well then").info["stop"] is None
    step = begun(max_total_words=16).advance("well then")
    assert (step.info["stop"], step.observation, step.truncated) == ("length_limit", "", True)
    told = begun(max_total_words=40, tell_budget=True).advance("well then")
    assert told.observation.endswith("Words left: 18.\n\n")  # 40 - 2 - 14 - 6


def test_a_filled_observation_leaves_room_for_an_answer_in_every_dialect() -> None:
    call = '<tool_call>{"name":"search","arguments":{"query":"x"}}</tool_call>'
    for rules in ({}, {"tell_budget": True}):
        # 1 said of 20; the passages get what is left but for the tags, the line of the budget and an answer
        episode = begun(max_total_words=20, dialect="tool_call", max_searches=3, **rules)
        many = [Hit(Passage("p", "", "word " * 50), 1.0)]
        step = episode.advance(call, many)
        assert step.info["stop"] is None and step.observation.count("word") > 3
        assert 1 + len(step.observation.split()) == 18
        assert episode.advance("<answer>a</answer>").reward == 1.0


@pytest.mark.parametrize("rules", [{"max_turn_words": 0}, {"max_total_words": 2.5}, {"max_total_words": True}])
def test_budgets_that_make_no_sense_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        EpisodeRules(**rules)


def make(num_envs: int = 3) -> Any:
    return gymnasium.make_vec(
        "SearchQA-v0",
        num_envs=num_envs,
        questions=QUESTIONS,
        retriever=FakeRetriever(passages=PASSAGES),
        prompt="short",
    )


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    *arrays, infos = one
    *others, other_infos = other
    equal = all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(arrays, others, strict=True))
    return equal and all(infos[key].tolist() == other_infos[key].tolist() for key in infos)


def test_the_state_of_many_episodes_is_exact_and_plain() -> None:
    envs = make()
    envs.reset(seed=3)
    envs.step(["<search>land 1</search>", "<answer>City 1</answer>", "nothing"])
    state = json.loads(json.dumps(envs.get_state()))
    actions = ["<answer>City 1</answer>", "late", "<search>land 2</search>"]
    again = make()
    again.reset(seed=99)
    again.set_state(state)
    assert same(envs.step(actions), again.step(actions))
    assert envs.reset()[0] == again.reset()[0]  # the generators went along
    mask = np.array([False, True, False])
    assert envs.reset(options={"reset_mask": mask})[0] == again.reset(options={"reset_mask": mask})[0]


def test_the_state_brings_its_generators_also_where_none_was_needed_yet() -> None:
    envs, again = make(), make()
    envs.reset(seed=3, options={"question_ids": ["q1", "q2", "q3"]})
    again.reset(seed=99, options={"question_ids": ["q1", "q2", "q3"]})
    again.set_state(json.loads(json.dumps(envs.get_state())))
    drawn = [env.reset()[0] for env in (envs, again)]
    assert drawn[0] == drawn[1]
    fresh = make()
    fresh.reset(seed=3, options={"question_ids": ["q1", "q2", "q3"]})
    assert drawn[0] == fresh.reset()[0]  # taking the state changed nothing


def test_a_refused_reset_changes_nothing() -> None:
    envs = make()
    envs.reset(seed=3)
    before = envs.get_state()
    for options in ({"question": 1}, {"reset_mask": [True]}):
        with pytest.raises(ValueError):
            envs.reset(seed=4, options=options)
    assert envs.get_state() == before


def test_idle_slots_and_other_numbers_of_slots() -> None:
    envs, again = make(), make()
    envs.reset(options={"question_ids": ["q1", None, None]})
    again.set_state(envs.get_state())
    assert again.finished.tolist() == [False, True, True]
    with pytest.raises(ValueError, match="the state is of 3 slots, this environment has 2"):
        make(2).set_state(envs.get_state())
