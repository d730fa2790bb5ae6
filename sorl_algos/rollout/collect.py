"""Where text meets tokens: plays episodes of a vector environment with an engine and records Trajectories."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sorl_algos.rollout.engine import Completion, RolloutEngine, Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_env.actions import CutText
from sorl_env.trajectory import Trajectory, Turn


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """What the episodes of a collection have in common.

    Attributes:
        renderer: makes ids of observations.
        sampling: how actions are sampled.
        seed: the episode of place i draws its tokens from (seed, i, turn) alone.
        max_total_tokens: longest sequence; an episode that would pass it ends with ``stop="length_limit"``.
    """

    renderer: Renderer
    sampling: Sampling
    seed: int = 0
    max_total_tokens: int | None = None


def settings_for(
    env: Any, renderer: Renderer, sampling: Sampling | None, seed: int, max_total_tokens: int | None
) -> PlaySettings:
    """Settings whose stop strings are those of the environment's dialect where ``sampling`` names none.

    Raises:
        ValueError: a tokenizer whose text lacks the stop strings.
    """
    sampling = sampling or Sampling()
    if not sampling.stop:
        sampling = replace(sampling, stop=tuple(env.stop_strings))
    check_readable(renderer.tokenizer, sampling.stop)
    return PlaySettings(renderer, sampling, seed, max_total_tokens)


@dataclass(frozen=True, slots=True)
class Ask:
    """What an episode wants from the engine next."""

    prompt_ids: list[int]
    seed: int
    budget: int


class Play:
    """One episode under way: the ids so far and the turns made of them.

    In turn `ask`, `said` and `heard`, until ``stop`` is set; then `trajectory`.

    Args:
        question: a `sorl_env.questions.Question` or its id.
        group_id: default the question's id.
        place: see `PlaySettings.seed`.
        observation: the first one.
    """

    def __init__(self, settings: PlaySettings, question: Any, group_id: Any, place: int, observation: str) -> None:
        self.settings = settings
        self.question_id = getattr(question, "id", question)
        self.group_id = self.question_id if group_id is None else group_id
        self.place = place
        self.observation = observation
        self.stop: str | None = None
        self.ids: list[int] = []
        self.turns: list[Turn] = []
        self.policy_version = 0
        self._new_ids: list[int] = []
        self._notes: list[dict[str, Any]] = []
        self._searches = 0
        self._scores: dict[str, float] = {}

    def ask(self) -> Ask | None:
        """The next prompt; None, and ``stop``, where the sequence has no room left.

        Raises:
            ValueError: a first observation that alone passes ``max_total_tokens``.
        """
        settings, first = self.settings, not self.turns
        if first:
            self._new_ids = settings.renderer.first(self.observation)
        else:
            self._new_ids = settings.renderer.next(self.observation, self.turns[-1].action_ids)
        room = settings.sampling.max_tokens
        if settings.max_total_tokens is not None:
            room = min(room, settings.max_total_tokens - len(self.ids) - len(self._new_ids))
        if room >= 1:
            return Ask(self.ids + self._new_ids, _seed(settings.seed, self.place, len(self.turns)), room)
        if first:
            raise ValueError(
                f"question {self.question_id!r} needs {len(self._new_ids)} prompt tokens, but max_total_tokens is "
                f"{settings.max_total_tokens}; raise it or use a shorter prompt"
            )
        self.stop = "length_limit"
        return None

    def said(self, completion: Completion) -> str:
        """Records what the engine sampled; returns the action's text for the environment."""
        if not self.turns:
            self.policy_version = completion.policy_version
        text = self.settings.renderer.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        cut = completion.stop == "length"
        self.turns.append(
            Turn(
                observation_ids=tuple(self._new_ids),
                action_ids=completion.token_ids,
                action_logprobs=completion.logprobs,
                reward=0.0,
                observation_text=self.observation,
                action_text=text,
                truncated=cut,
            )
        )
        self.ids += self._new_ids
        self.ids += completion.token_ids
        return CutText(text) if cut else text

    def heard(self, observation: str, reward: float, info: Mapping[str, Any]) -> None:
        """Records what the environment answered; ``info`` is one episode's."""
        self.turns[-1] = replace(self.turns[-1], reward=float(reward))
        self._notes.append(
            {
                "action_kind": info["action_kind"],
                "retrieved_ids": list(info["retrieved_ids"]),
                "retrieved_titles": list(info["retrieved_titles"]),
            }
        )
        self.observation, self.stop = observation, info["stop"]
        self._searches = int(info["searches"])
        if self.stop is not None:
            self._scores = dict(info["scores"] or {})

    def trajectory(self) -> Trajectory:
        return Trajectory(
            turns=tuple(self.turns),
            question_id=self.question_id,
            group_id=self.group_id,
            policy_version=self.policy_version,
            stop=self.stop or "length_limit",
            info={"scores": self._scores, "searches": self._searches, "turns": self._notes},
        )


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
        renderer, max_total_tokens: as in `PlaySettings`.
        questions: `sorl_env.questions.Question` or question ids, repeated for groups.
        sampling: its stop strings are set to those of the environment's dialect if it has none.
        group_ids: one a question; default the question's id.
        seed: the episode of place i draws its tokens from (seed, first_place + i, turn) alone.
        first_place: of these questions in the batch of all ranks.
        on_episodes: called with the number of episodes just finished, for progress.

    Returns:
        Trajectories in the order of the questions. Episodes that ended in a retrieval error are among them, marked
        by ``stop="retrieval_error"``: training drops and counts them (`usable`).

    Raises:
        ValueError: a first observation that alone passes ``max_total_tokens``, or a tokenizer whose text lacks the
            stop strings.
    """
    settings = settings_for(env, renderer, sampling, seed, max_total_tokens)
    trajectories: list[Trajectory] = []
    for start in range(0, len(questions), env.num_envs):
        wave = questions[start : start + env.num_envs]
        groups = group_ids[start : start + env.num_envs] if group_ids is not None else [None] * len(wave)
        trajectories += _collect_wave(env, engine, settings, wave, groups, first_place + start)
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
    settings: PlaySettings,
    questions: Sequence[Any],
    group_ids: Sequence[Any],
    offset: int,
) -> list[Trajectory]:
    names = [getattr(question, "id", question) for question in questions]
    observations, infos = env.reset(options={"question_ids": names + [None] * (env.num_envs - len(names))})
    plays = [
        Play(settings, name, group, offset + slot, observations[slot])
        for slot, (name, group) in enumerate(zip(names, group_ids, strict=True))
    ]
    while True:
        asks = {slot: ask for slot, play in enumerate(plays) if play.stop is None and (ask := play.ask())}
        if not asks:
            return [play.trajectory() for play in plays]
        completions = engine.generate(
            [ask.prompt_ids for ask in asks.values()],
            replace(
                settings.sampling,
                seeds=tuple(ask.seed for ask in asks.values()),
                budgets=tuple(ask.budget for ask in asks.values()),
            ),
        )
        actions = [""] * env.num_envs
        for slot, completion in zip(asks, completions, strict=True):
            actions[slot] = plays[slot].said(completion)
        observations, rewards, _, _, infos = env.step(actions)
        for slot in asks:
            info = {name: column[slot] for name, column in infos.items()}
            plays[slot].heard(observations[slot], rewards[slot], info)


def _seed(seed: int, place: int, turn: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{place}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
