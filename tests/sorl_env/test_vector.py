"""Many episodes at once: equal to single ones, one search a step, finished slots keep still."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import sorl_env  # noqa: F401  (registers the environments)
from sorl_env.actions import CutText
from sorl_env.episode import INFO_KEYS
from sorl_env.search_qa import SearchQAEnv
from sorl_env.vector import SearchQAVectorEnv
from tests.fakes import FakeRetriever
from tests.sorl_env.test_search_qa import PASSAGES, QUESTIONS


def make(num_envs: int, **options: Any) -> SearchQAVectorEnv:
    settings = {"retriever": FakeRetriever(passages=PASSAGES), "questions": QUESTIONS, "prompt": "short"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make_vec("SearchQA-v0", num_envs=num_envs, **settings | options)
    assert isinstance(env, SearchQAVectorEnv)
    return env


def scripted(rng: np.random.Generator) -> str:
    number = int(rng.integers(20))
    return [
        f"<search>land {number}</search>",
        f"<search>capital of land {number}</search>",
        f"<answer>City {number}</answer>",
        "hm",
        "<search> </search>",
        CutText("<think>cut"),
    ][int(rng.integers(6))]


def test_equal_to_single_environments_episode_for_episode() -> None:
    size, rng = 5, np.random.default_rng(0)
    options: dict[str, Any] = {
        "max_searches": 3,
        "invalid_penalty": 0.1,
        "search_cost": 0.01,
        "prompt": "short",
    }
    vector = make(size, **options)
    singles = [SearchQAEnv(FakeRetriever(passages=PASSAGES), QUESTIONS, **options) for _ in range(size)]
    for episode in range(6):
        seed = 7 if episode == 0 else None
        observations, infos = vector.reset(seed=seed)
        for slot, single in enumerate(singles):
            observation, info = single.reset(seed=None if seed is None else seed + slot)
            assert observations[slot] == observation
            assert {key: infos[key][slot] for key in INFO_KEYS} == info
        done = [False] * size
        while not all(done):
            actions = [scripted(rng) for _ in range(size)]
            observations, rewards, terminated, truncated, infos = vector.step(actions)
            for slot, single in enumerate(singles):
                if done[slot]:
                    continue
                observation, reward, term, trunc, info = single.step(actions[slot])
                assert (observations[slot], rewards[slot], terminated[slot], truncated[slot]) == (
                    observation,
                    reward,
                    term,
                    trunc,
                )
                assert {key: infos[key][slot] for key in INFO_KEYS} == info
                done[slot] = term or trunc
            assert vector.finished.tolist() == done


def test_one_search_a_step_holding_only_live_searching_episodes() -> None:
    retriever = FakeRetriever(passages=PASSAGES)
    vector = make(4, retriever=retriever, max_searches=2)
    vector.reset(options={"question_ids": ["q0", "q1", "q2", None]})
    search = "<search>land {}</search>"
    vector.step([search.format(0), "<answer>City 1</answer>", "hm", search.format(9)])
    assert retriever.calls == [(["land 0"], 3)]  # slot 3 is idle
    vector.step([search.format(0), search.format(1), search.format(2), search.format(9)])
    assert retriever.calls[1:] == [(["land 0", "land 2"], 3)]  # slot 1 has answered
    vector.step([search.format(0), "", search.format(2), ""])
    assert len(retriever.calls) == 2  # the last turn is for the answer
    assert vector.finished.all()


def test_finished_and_idle_slots_keep_still() -> None:
    vector = make(3)
    observations, infos = vector.reset(options={"question_ids": ["q0", "q1", None]})
    assert observations[2] == "" and infos["question_id"][2] is None and infos["stop"][2] is None
    assert vector.finished.tolist() == [False, False, True]
    _, rewards, terminated, truncated, infos = vector.step(["<answer>City 0</answer>", "hm", "ignored"])
    assert rewards.tolist() == [1.0, 0.0, 0.0] and rewards.dtype == np.float64
    assert terminated.tolist() == [True, False, False] and not truncated.any()
    assert terminated.dtype == truncated.dtype == bool
    assert infos["action_kind"].tolist() == ["answer", "invalid", None]
    observations, rewards, terminated, _, infos = vector.step(["<answer>x</answer>", "<search>land 1</search>", ""])
    assert observations[0] == "" and rewards[0] == 0.0 and terminated.tolist() == [True, False, False]
    assert infos["action_kind"].tolist() == [None, "search", None]
    assert infos["stop"].tolist() == ["answered", None, None]
    assert infos["searches"].tolist() == [0, 1, 0]
    assert infos["answer"].tolist() == ["City 0", None, None]
    assert isinstance(infos["retrieved_ids"][1], tuple) and infos["retrieved_ids"][0] == ()


def test_a_failed_search_ends_the_searching_episodes_only() -> None:
    vector = make(3, retriever=FakeRetriever(fails=True))
    vector.reset(seed=0)
    observations, _, terminated, truncated, infos = vector.step(["<search>a</search>", "hm", "<search>b</search>"])
    assert infos["stop"].tolist() == ["retrieval_error", None, "retrieval_error"]
    assert truncated.tolist() == [True, False, True] and not terminated.any()
    assert observations[0] == "" and "secret" not in "".join(observations)


def test_reset_of_some_slots() -> None:
    vector = make(3)
    vector.reset(options={"question_ids": ["q0", "q1", "q2"]})
    vector.step(["<answer>City 0</answer>", "hm", "<answer>x</answer>"])
    mask = np.array([True, False, False])
    observations, infos = vector.reset(options={"question_ids": ["q5", "q9", None], "reset_mask": mask})
    assert observations[0] == "Question: Capital of land 5?\n" and observations[1].startswith("\n\nNot a valid")
    assert infos["question_id"].tolist() == ["q5", "q1", "q2"]
    assert vector.finished.tolist() == [False, False, True]


def test_a_group_plays_one_question() -> None:
    vector = make(4)
    observations, _ = vector.reset(options={"question_ids": ["q3"] * 4})
    assert len(set(observations)) == 1


def test_seeds() -> None:
    vector = make(3)
    first = vector.reset(seed=3)[0] + vector.reset()[0]
    assert vector.reset(seed=3)[0] + vector.reset()[0] == first
    make(2).reset()  # without a seed


def test_bad_calls() -> None:
    vector = make(2)
    with pytest.raises(RuntimeError, match="reset"):
        vector.step(["a", "b"])
    with pytest.raises(ValueError, match="one entry for each of the 2 slots"):
        vector.reset(options={"question_ids": ["q1"]})
    with pytest.raises(ValueError, match="unknown reset option 'question_id'"):
        vector.reset(options={"question_id": "q1"})
    vector.reset(options={"question_ids": ["q1", "q2"]})
    with pytest.raises(KeyError, match="'zebra'"):
        vector.reset(options={"question_ids": ["q3", "zebra"]})
    assert vector.step(["hm", "hm"])[4]["question_id"].tolist() == ["q1", "q2"]  # nothing was half reset
    for actions in (["a"], "ab", ["a", "b", "c"]):
        with pytest.raises(ValueError, match="one action for each of the 2 slots"):
            vector.step(actions)
    with pytest.raises(TypeError, match="got NoneType"):
        vector.step(["a", None])  # type: ignore[list-item]
    for num_envs in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="num_envs"):
            SearchQAVectorEnv(num_envs, FakeRetriever(), QUESTIONS)  # type: ignore[arg-type]


def test_gymnasium_sees_a_vector_environment() -> None:
    vector = make(3, render_mode="ansi")
    assert vector.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    observations, _ = vector.reset(seed=0)
    assert observations in vector.observation_space
    assert vector.action_space.sample() in vector.action_space
    vector.step(["<answer>x</answer>"] * 3)
    assert [text.split("\n")[1] for text in vector.render() or ()] == ["<answer>x</answer>"] * 3
    vector.close()
    vector.close()
