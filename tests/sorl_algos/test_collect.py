"""Episodes played by a scripted engine: rewards, turns, stops, calls; ids as sampled; waves; limits; failures."""

from __future__ import annotations

from typing import Any

import pytest

from sorl_algos.rollout.collect import collect, usable
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_env.actions import STOP_STRINGS
from sorl_env.trajectory import Trajectory
from tests.fakes import FakeRetriever, ScriptedEngine
from tests.sorl_algos.small_game import PASSAGES, QUESTIONS, good_player, make_env

PERU = QUESTIONS.by_id("q0")


def play(tokenizer: Any, script: Any, questions: Any = (PERU,), envs: int = 3, **options: Any) -> list[Trajectory]:
    environment = {name: options.pop(name) for name in ("retriever", "invalid_penalty") if name in options}
    return collect(
        make_env(envs, **environment), ScriptedEngine(tokenizer, script), Renderer(tokenizer), questions, **options
    )


def test_an_episode_by_hand(tokenizer: Any) -> None:
    said = ["<search> capital of Peru</search>", "<answer> Lima</answer>"]
    [trajectory] = play(tokenizer, said, seed=3)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert [turn.action_text for turn in trajectory.turns] == said
    assert [turn.truncated for turn in trajectory.turns] == [False, False]
    assert (trajectory.stop, trajectory.question_id, trajectory.group_id) == ("answered", "q0", "q0")
    assert trajectory.turns[0].observation_text == "Question: What is the capital of Peru?\n"
    assert "The capital of Peru is Lima." in trajectory.turns[1].observation_text
    renderer = Renderer(tokenizer)
    assert list(trajectory.turns[0].observation_ids) == renderer.first(trajectory.turns[0].observation_text)
    assert list(trajectory.turns[1].observation_ids) == renderer.next(trajectory.turns[1].observation_text)
    assert list(trajectory.turns[1].action_ids) == tokenizer.encode(said[1])
    assert trajectory.turns[1].action_logprobs[:2] == (-0.25, -0.5)
    assert trajectory.info["turns"] == [
        {"action_kind": "search", "retrieved_ids": ["p0"], "retrieved_titles": ["Peru"]},
        {"action_kind": "answer", "retrieved_ids": [], "retrieved_titles": []},
    ]
    assert trajectory.info["searches"] == 1 and trajectory.info["scores"]["exact_match"] == 1.0


def test_one_engine_call_and_one_retriever_call_a_turn(tokenizer: Any) -> None:
    retriever, engine = FakeRetriever(passages=PASSAGES), ScriptedEngine(tokenizer, good_player)
    trajectories = collect(make_env(3, retriever), engine, Renderer(tokenizer), list(QUESTIONS))
    assert [sum(turn.reward for turn in item.turns) for item in trajectories] == [1.0, 1.0, 1.0]
    assert len(engine.calls) == 2 and len(retriever.calls) == 1
    assert sorted(retriever.calls[0][0]) == ["capital of Chile", "capital of Ecuador", "capital of Peru"]


def test_each_prompt_begins_with_all_the_tokens_before_it(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, good_player)
    [trajectory] = collect(make_env(1), engine, Renderer(tokenizer), [PERU])
    [first], [second] = (prompts for prompts, _ in engine.calls)
    turns = trajectory.turns
    assert tuple(first) == turns[0].observation_ids
    assert tuple(second) == turns[0].observation_ids + turns[0].action_ids + turns[1].observation_ids
    assert trajectory.token_ids() == second + list(turns[1].action_ids)


def test_sampled_ids_are_never_encoded_again(tokenizer: Any) -> None:
    # The same text spelt out letter by letter, as no encoder would write it: stored and continued as it is.
    text = "<search> capital of Peru</search>"
    open_tag, close_tag = tokenizer.encode("<search>")[0], tokenizer.encode("</search>")[0]
    letters = tuple(i for char in " capital of Peru" for i in tokenizer.encode(char))
    odd = (open_tag, *letters, close_tag)
    assert tokenizer.decode(list(odd)) == text and list(odd) != tokenizer.encode(text)
    engine = ScriptedEngine(tokenizer, [odd, "<answer> Lima</answer>"])
    [trajectory] = collect(make_env(1), engine, Renderer(tokenizer), [PERU])
    assert trajectory.turns[0].action_ids == odd and trajectory.turns[0].action_text == text
    second_prompt = tuple(engine.calls[1][0][0])
    assert second_prompt[len(trajectory.turns[0].observation_ids) :][: len(odd)] == odd
    assert trajectory.turns[1].reward == 1.0


def test_the_end_token_is_kept_when_sampled_and_never_added(tokenizer: Any) -> None:
    [trajectory] = play(tokenizer, ["no tag", "<answer> Lima</answer>"])
    assert trajectory.turns[0].action_ids[-1] == tokenizer.eos_token_id  # the engine sampled it
    assert trajectory.turns[0].action_text == "no tag"
    assert trajectory.turns[1].action_ids[-1] == tokenizer.encode("</answer>")[0]
    assert trajectory.info["turns"][0]["action_kind"] == "invalid"


def test_a_search_in_the_last_turn_is_asked_for_but_not_carried_out(tokenizer: Any) -> None:
    retriever = FakeRetriever(passages=PASSAGES)
    [trajectory] = play(tokenizer, ["<search> capital of Peru</search>"] * 3, retriever=retriever)
    assert trajectory.stop == "turn_limit" and len(trajectory.turns) == 3
    assert [note["action_kind"] for note in trajectory.info["turns"]] == ["search"] * 3
    assert trajectory.info["searches"] == len(retriever.calls) == 2


def test_a_cut_generation_is_marked_and_spared_the_penalty(tokenizer: Any) -> None:
    said = ["<search>" + " capital of Peru" * 4 + "</search>", "no tag", "<answer> Lima</answer>"]
    [trajectory] = play(tokenizer, said, sampling=Sampling(max_tokens=5), invalid_penalty=0.5)
    assert [turn.truncated for turn in trajectory.turns] == [True, True, False]
    assert len(trajectory.turns[0].action_ids) == 5
    [spared] = play(tokenizer, said, sampling=Sampling(max_tokens=8), invalid_penalty=0.5)
    assert [turn.reward for turn in spared.turns] == [0.0, -0.5, 1.0]
    assert [note["action_kind"] for note in spared.info["turns"]] == ["cut", "invalid", "answer"]


def test_an_episode_without_room_ends_at_the_length_limit(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "<search> capital of Peru</search>")
    renderer = Renderer(tokenizer)
    prompt = len(renderer.first("Question: What is the capital of Peru?\n"))
    action = len(tokenizer.encode("<search> capital of Peru</search>"))
    limit = prompt + action + 4  # the first turn fits, the passage does not
    [trajectory] = collect(
        make_env(1), engine, renderer, [PERU], sampling=Sampling(max_tokens=20), max_total_tokens=limit
    )
    assert trajectory.stop == "length_limit" and len(trajectory.turns) == 1
    assert len(trajectory.token_ids()) <= limit
    assert engine.calls[0][1].budgets == (min(20, limit - prompt),)
    tight = collect(make_env(1), engine, renderer, [PERU], max_total_tokens=prompt + 3)
    assert len(tight[0].token_ids()) == prompt + 3 and tight[0].turns[0].truncated
    with pytest.raises(ValueError, match=f"question 'q0' needs {prompt} prompt tokens, but max_total_tokens is 2"):
        collect(make_env(1), engine, renderer, [PERU], max_total_tokens=2)


def test_others_go_on_when_one_runs_out_of_room(tokenizer: Any) -> None:
    # A long-winded search about Chile leaves no room for its passage; the other two fit exactly.
    def wordy(prompt: str) -> str:
        said = good_player(prompt)
        return said.replace(" Chile</search>", " Chile" + " red green blue" * 20 + "</search>")

    renderer, sampling = Renderer(tokenizer), Sampling(max_tokens=80)
    whole = collect(make_env(3), ScriptedEngine(tokenizer, wordy), renderer, list(QUESTIONS), sampling=sampling)
    limit = max(len(whole[0].token_ids()), len(whole[2].token_ids()))
    engine = ScriptedEngine(tokenizer, wordy)
    trajectories = collect(make_env(3), engine, renderer, list(QUESTIONS), sampling=sampling, max_total_tokens=limit)
    assert [item.stop for item in trajectories] == ["answered", "length_limit", "answered"]
    assert trajectories[0] == whole[0] and trajectories[2] == whole[2]
    assert [len(prompts) for prompts, _ in engine.calls] == [3, 2]


def test_failed_retrieval_is_marked_and_not_for_training(tokenizer: Any) -> None:
    said = {"Peru": "<search> capital of Peru</search>", "Chile": "<answer> Santiago</answer>"}
    trajectories = play(
        tokenizer,
        lambda prompt: said["Peru" if "Peru" in prompt else "Chile"],
        [PERU, QUESTIONS.by_id("q1")],
        retriever=FakeRetriever(fails=True),
    )
    assert [item.stop for item in trajectories] == ["retrieval_error", "answered"]
    assert [item.question_id for item in usable(trajectories)] == ["q1"]
    assert "secret-host" not in "".join(turn.observation_text for item in trajectories for turn in item.turns)


def test_waves_give_the_same_episodes_in_the_same_order(tokenizer: Any) -> None:
    questions = [QUESTIONS[i % 3] for i in range(7)]
    groups = list(range(7))
    finished: list[int] = []
    one_wave = play(tokenizer, good_player, questions, envs=8, group_ids=groups, seed=5)
    waves = play(tokenizer, good_player, questions, envs=3, group_ids=groups, seed=5, on_episodes=finished.append)
    assert waves == one_wave and finished == [3, 3, 1]
    assert [item.group_id for item in waves] == groups


def test_seeds_belong_to_places_and_turns_not_to_waves(tokenizer: Any) -> None:
    def seeds(envs: int, seed: int) -> dict[tuple[str, ...], int]:
        engine = ScriptedEngine(tokenizer, good_player)
        collect(make_env(envs), engine, Renderer(tokenizer), list(QUESTIONS), seed=seed)
        found = {}
        for prompts, sampling in engine.calls:
            assert sampling.seeds is not None
            found |= {tuple(prompt): number for prompt, number in zip(prompts, sampling.seeds, strict=True)}
        return found

    assert seeds(3, 1) == seeds(2, 1) == seeds(1, 1)
    assert len(set(seeds(3, 1).values())) == 6  # three places, two turns
    assert not set(seeds(3, 1).values()) & set(seeds(3, 2).values())


def test_question_ids_will_do_and_the_version_is_the_engines(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, good_player)
    engine.update_weights([], 7)
    [trajectory] = collect(make_env(2), engine, Renderer(tokenizer), ["q1"])
    assert trajectory.question_id == "q1" and trajectory.policy_version == 7


def test_stop_strings_are_those_of_the_actions_unless_given(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, good_player)
    collect(make_env(1), engine, Renderer(tokenizer), [PERU])
    assert engine.calls[0][1].stop == STOP_STRINGS
    collect(make_env(1), engine, Renderer(tokenizer), [PERU], sampling=Sampling(stop=("</answer>",)))
    assert engine.calls[-1][1].stop == ("</answer>",)
