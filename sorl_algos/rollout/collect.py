"""Where text meets tokens: plays episodes of a vector environment with an engine and records Trajectories."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sorl_algos.rollout.engine import RolloutEngine, Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_env.actions import CutText
from sorl_env.trajectory import Trajectory, Turn


@dataclass(slots=True)
class _Play:
    """One episode under way: the ids so far and the turns made of them."""

    question: Any
    group_id: Any
    observation: str
    ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    policy_version: int = 0
    stop: str | None = None
    searches: int = 0
    scores: dict[str, float] = field(default_factory=dict)


def collect(
    env: Any,
    engine: RolloutEngine,
    renderer: Renderer,
    questions: Sequence[Any],
    *,
    sampling: Sampling | None = None,
    group_ids: Sequence[Any] | None = None,
    seed: int = 0,
    first_place: int = 0,
    max_total_tokens: int | None = None,
    on_episodes: Callable[[int], None] | None = None,
) -> list[Trajectory]:
    """Plays every question once, in lockstep: one engine call and one retriever call a turn.

    Args:
        env: a vector environment with ``num_envs`` slots; more questions than slots are played in waves.
        engine: samples the actions.
        renderer: makes ids of observations.
        questions: `sorl_env.questions.Question` or question ids, repeated for groups.
        sampling: its stop strings are set to those of the environment's dialect if it has none.
        group_ids: one a question; default the question's id.
        seed: the episode of place i draws its tokens from (seed, first_place + i, turn) alone.
        first_place: of these questions in the batch of all ranks.
        max_total_tokens: longest sequence; an episode that would pass it ends with ``stop="length_limit"``.
        on_episodes: called with the number of episodes just finished, for progress.

    Returns:
        Trajectories in the order of the questions. Episodes that ended in a retrieval error are among them, marked
        by ``stop="retrieval_error"``: training drops and counts them (`usable`).

    Raises:
        ValueError: a first observation that alone passes ``max_total_tokens``, or a tokenizer whose text lacks the
            stop strings.
    """
    sampling = sampling or Sampling()
    if not sampling.stop:
        sampling = replace(sampling, stop=tuple(env.stop_strings))
    check_readable(renderer.tokenizer, sampling.stop)
    trajectories: list[Trajectory] = []
    for start in range(0, len(questions), env.num_envs):
        wave = questions[start : start + env.num_envs]
        groups = group_ids[start : start + env.num_envs] if group_ids is not None else [None] * len(wave)
        trajectories += _collect_wave(
            env, engine, renderer, wave, groups, sampling, seed, first_place + start, max_total_tokens
        )
        if on_episodes:
            on_episodes(len(wave))
    return trajectories


def check_readable(tokenizer: Any, stop: Sequence[str]) -> None:
    """That the environment can read what the engine stops at: special tokens are left out of the text it gets.

    Raises:
        ValueError: names the string.
    """
    for string in stop:
        ids = tokenizer.encode(string, add_special_tokens=False)
        whole, seen = (tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True))
        if string in whole and string not in seen:
            raise ValueError(
                f"{string!r} is a special token of tokenizer {tokenizer.name_or_path!r}, so the environment would not "
                "see it; make it an ordinary added token (special=False), or use another dialect"
            )


def usable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories fit for training: those that the infrastructure did not cut short."""
    return [item for item in trajectories if item.stop != "retrieval_error"]


def _collect_wave(
    env: Any,
    engine: RolloutEngine,
    renderer: Renderer,
    questions: Sequence[Any],
    group_ids: Sequence[Any],
    sampling: Sampling,
    seed: int,
    offset: int,
    max_total_tokens: int | None,
) -> list[Trajectory]:
    names = [getattr(question, "id", question) for question in questions]
    idle = [None] * (env.num_envs - len(names))
    observations, infos = env.reset(options={"question_ids": names + idle})
    plays = [
        _Play(name, name if group is None else group, observations[slot])
        for slot, (name, group) in enumerate(zip(names, group_ids, strict=True))
    ]
    turn = 0
    while live := [slot for slot, play in enumerate(plays) if play.stop is None]:
        live, new_ids, budgets = _room(plays, live, renderer, sampling, max_total_tokens, first=turn == 0)
        if not live:
            break
        completions = engine.generate(
            [plays[slot].ids + new_ids[slot] for slot in live],
            replace(
                sampling,
                seeds=tuple(_seed(seed, offset + slot, turn) for slot in live),
                budgets=tuple(budgets[slot] for slot in live),
            ),
        )
        actions = [""] * env.num_envs
        for slot, completion in zip(live, completions, strict=True):
            play = plays[slot]
            if turn == 0:
                play.policy_version = completion.policy_version
            text = renderer.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
            cut = completion.stop == "length"
            actions[slot] = CutText(text) if cut else text
            play.turns.append(
                Turn(
                    observation_ids=tuple(new_ids[slot]),
                    action_ids=completion.token_ids,
                    action_logprobs=completion.logprobs,
                    reward=0.0,
                    observation_text=play.observation,
                    action_text=text,
                    truncated=cut,
                )
            )
            play.ids += new_ids[slot]
            play.ids += completion.token_ids
        observations, rewards, _, _, infos = env.step(actions)
        for slot in live:
            play = plays[slot]
            play.turns[-1] = replace(play.turns[-1], reward=float(rewards[slot]))
            play.notes.append(
                {
                    "action_kind": infos["action_kind"][slot],
                    "retrieved_ids": list(infos["retrieved_ids"][slot]),
                    "retrieved_titles": list(infos["retrieved_titles"][slot]),
                }
            )
            play.observation = observations[slot]
            play.stop = infos["stop"][slot]
            play.searches = int(infos["searches"][slot])
            if play.stop is not None:
                play.scores = dict(infos["scores"][slot] or {})
        turn += 1
    return [
        Trajectory(
            turns=tuple(play.turns),
            question_id=play.question,
            group_id=play.group_id,
            policy_version=play.policy_version,
            stop=play.stop or "length_limit",
            info={"scores": play.scores, "searches": play.searches, "turns": play.notes},
        )
        for play in plays
    ]


def _room(
    plays: list[_Play],
    live: list[int],
    renderer: Renderer,
    sampling: Sampling,
    max_total_tokens: int | None,
    *,
    first: bool,
) -> tuple[list[int], dict[int, list[int]], dict[int, int]]:
    """Ids that each live episode appends now, and the tokens it may sample; episodes without room end."""
    new_ids: dict[int, list[int]] = {}
    budgets: dict[int, int] = {}
    still = []
    for slot in live:
        play = plays[slot]
        if first:
            ids = renderer.first(play.observation)
        else:
            ids = renderer.next(play.observation, play.turns[-1].action_ids)
        room = sampling.max_tokens
        if max_total_tokens is not None:
            room = min(room, max_total_tokens - len(play.ids) - len(ids))
        if room >= 1:
            new_ids[slot], budgets[slot] = ids, room
            still.append(slot)
        elif first:
            raise ValueError(
                f"question {play.question!r} needs {len(ids)} prompt tokens, but max_total_tokens is "
                f"{max_total_tokens}; raise it or use a shorter prompt"
            )
        else:
            play.stop = "length_limit"
    return still, new_ids, budgets


def _seed(seed: int, place: int, turn: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{place}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
