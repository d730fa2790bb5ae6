"""SearchQA-v0, many episodes at once: one batched search a step, nothing restarts by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from retrieval_index.types import Hit, RetrievalError, Retriever
from sorl_env.dialects import dialect_named
from sorl_env.episode import INFO_KEYS, Episode
from sorl_env.questions import Question, QuestionSet
from sorl_env.rewards import RewardSpec, check_questions_fit, resolve_reward
from sorl_env.search_qa import (
    RENDER_MODES,
    check_action,
    checked_options,
    checked_render_mode,
    make_rules,
    resolve_questions,
    resolve_retriever,
    searched,
)
from sorl_env.spaces import AnyText


class SearchQAVectorEnv(VectorEnv[tuple[str, ...], Sequence[str], np.ndarray]):
    """``num_envs`` episodes of SearchQAEnv in lockstep; the other arguments are those of SearchQAEnv.

    Episode for episode equal to single environments, where slot ``i`` is seeded with ``seed + i``. All
    queries of a step go to the retriever in one call. A finished slot keeps still until ``reset``: its action
    is ignored, its observation is "", its reward 0, its flags, ``stop``, ``searches`` and ``answer`` stay as
    they were at the end, and what an info says of the turn (``action_kind``, ``retrieved_ids``,
    ``retrieved_titles``) is empty.

    ``reset(options=…)`` takes ``question_ids`` (one id a slot; None leaves the slot idle, which counts as
    finished) and ``reset_mask`` (which slots to reset; the others go on).

    ``infos`` holds one object array of length ``num_envs`` for each of ``episode.INFO_KEYS``.
    """

    metadata: dict[str, Any] = {
        "render_modes": list(RENDER_MODES),
        "render_fps": 4,
        "autoreset_mode": AutoresetMode.DISABLED,
    }

    def __init__(
        self,
        num_envs: int = 1,
        retriever: Retriever | None = None,
        questions: QuestionSet | Sequence[Question] | str | Path | None = None,
        reward: RewardSpec = "exact_match",
        split: str = "train",
        render_mode: str | None = None,
        **rules: Any,
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ValueError(f"num_envs must be a whole number of at least 1, got {num_envs!r}")
        self.num_envs = num_envs
        self.rules = make_rules(rules)
        self.reward_fn = resolve_reward(reward)
        self.questions = resolve_questions(questions, split)
        check_questions_fit(reward, self.questions)
        self.retriever = resolve_retriever(retriever)
        self.render_mode = checked_render_mode(render_mode)
        self.single_observation_space = AnyText()
        self.single_action_space = AnyText()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.finished = np.ones(num_envs, dtype=bool)
        self._episodes: list[Episode | None] = [None] * num_envs
        self._infos: list[dict[str, Any]] = [_idle_info() for _ in range(num_envs)]
        self._generators: list[np.random.Generator] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What an engine must stop at, keeping it in the text."""
        return dialect_named(self.rules.dialect).stop_strings

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas that the chat template has to show the policy; none in most dialects."""
        return dialect_named(self.rules.dialect).tools

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Begin episodes. Raises KeyError for an unknown question id, ValueError for options that do not
        fit.
        """
        chosen = checked_options(options, ("question_ids", "reset_mask"))
        mask = self._per_slot(chosen.get("reset_mask"), "reset_mask", default=True)
        super().reset(seed=seed)
        if seed is not None:
            self._generators = None
        questions = self._questions_for(chosen.get("question_ids"), mask)  # all looked up before any slot changes
        observations = []
        for slot, question in enumerate(questions):
            episode = self._episodes[slot]
            if not mask[slot]:
                observations.append("" if episode is None else episode.observations[-1])
                continue
            if question is None:
                self._episodes[slot], self._infos[slot] = None, _idle_info()
                observations.append("")
            else:
                episode = self._episodes[slot] = Episode(question, self.rules, self.reward_fn)
                observations.append(episode.begin())
                self._infos[slot] = episode.info()
            self.finished[slot] = question is None
        return tuple(observations), self._batched_infos()

    def step(
        self, actions: Sequence[str]
    ) -> tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Play one turn in every slot that is not finished.

        Returns observations (a tuple of N texts), rewards (N,) float64, terminated (N,) bool, truncated (N,)
        bool, infos. Raises RuntimeError if all slots are finished, ValueError for a wrong number of actions.
        """
        if isinstance(actions, str) or len(actions) != self.num_envs:
            raise ValueError(f"step() takes one action for each of the {self.num_envs} slots, got {actions!r:.80}")
        live = [(slot, episode) for slot, episode in enumerate(self._episodes) if episode and not episode.finished]
        if not live:
            raise RuntimeError("every episode is over; call reset() before the next step")
        for slot, _ in live:
            check_action(actions[slot])
        observations = [""] * self.num_envs
        rewards = np.zeros(self.num_envs)
        self._infos = [info | _NOTHING_DONE for info in self._infos]
        found = self._search({slot: episode.query(actions[slot]) for slot, episode in live})
        for slot, episode in live:
            hits = found.get(slot)
            step = episode.advance(actions[slot], hits, error=slot in found and hits is None)
            observations[slot], rewards[slot], self._infos[slot] = step.observation, step.reward, step.info
            self.finished[slot] = episode.finished
        if self.render_mode == "human":
            print(f"{int(self.finished.sum())} of {self.num_envs} episodes finished", flush=True)
        stops = [info["stop"] for info in self._infos]
        terminated = np.array([stop == "answered" for stop in stops])
        truncated = np.array([stop not in (None, "answered") for stop in stops])
        return tuple(observations), rewards, terminated, truncated, self._batched_infos()

    def episode(self, question_id: str) -> Episode:
        """An episode of its own, outside the slots, under the same rules: for callers that take turns one by one."""
        return Episode(self.questions.by_id(question_id), self.rules, self.reward_fn)

    def search(self, queries: Sequence[str]) -> list[list[Hit]] | None:
        """The hits of each query, from one call of the retriever; None if it failed."""
        try:
            return searched(self.retriever, queries, self.rules.top_k)
        except RetrievalError:
            return None

    def render(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """The transcripts so far in mode "ansi"; None otherwise."""
        if self.render_mode != "ansi":
            return None
        return tuple("" if episode is None else episode.transcript() for episode in self._episodes)

    def get_state(self) -> dict[str, Any]:
        """Every episode, idle slots too, and the random generators, as plain data that JSON can hold."""
        generators = self._slot_generators()  # made here at the latest: they come from a seed that is no part of it
        return {
            "episodes": [None if episode is None else episode.get_state() for episode in self._episodes],
            "infos": [info | {name: list(info[name]) for name in _TUPLES} for info in self._infos],
            "finished": self.finished.tolist(),
            "np_random": self.np_random.bit_generator.state,
            "generators": [one.bit_generator.state for one in generators],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``get_state`` was called, here or in an environment with the same options.

        Raises ValueError for a state of another number of slots.
        """
        if len(state["episodes"]) != self.num_envs:
            raise ValueError(f"the state is of {len(state['episodes'])} slots, this environment has {self.num_envs}")
        episodes: list[Episode | None] = []
        for saved in state["episodes"]:
            episode = None
            if saved is not None:
                episode = Episode(self.questions.by_id(saved["question_id"]), self.rules, self.reward_fn)
                episode.set_state(saved)
            episodes.append(episode)
        self._episodes = episodes
        self._infos = [info | {name: tuple(info[name]) for name in _TUPLES} for info in state["infos"]]
        self.finished[:] = state["finished"]
        self.np_random.bit_generator.state = state["np_random"]
        self._generators = [seeding.np_random(0)[0] for _ in range(self.num_envs)]
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = saved

    def _search(self, queries: Mapping[int, str | None]) -> dict[int, list[Hit] | None]:
        """Hits of every slot that searches, from one call; None for all of them if it failed."""
        asked = {slot: query for slot, query in queries.items() if query is not None}
        if not asked:
            return {}
        found = self.search(list(asked.values()))
        return dict.fromkeys(asked) if found is None else dict(zip(asked, found, strict=True))

    def _questions_for(self, question_ids: Sequence[str | None] | None, mask: Sequence[bool]) -> list[Question | None]:
        """One question a slot; drawn with the slot's own generator where no ids are given."""
        if question_ids is not None:
            ids = self._per_slot(question_ids, "question_ids", default=None)
            return [None if question_id is None else self.questions.by_id(question_id) for question_id in ids]
        generators = self._slot_generators()
        return [
            self.questions[int(generators[slot].integers(len(self.questions)))] if mask[slot] else None
            for slot in range(self.num_envs)
        ]

    def _slot_generators(self) -> list[np.random.Generator]:
        if self._generators is None:
            # the base class made np_random from the seed of the last seeded reset, or from the system's
            # entropy
            base = self.np_random_seed
            if base is None or base < 0:  # gymnasium's mark for a generator set by hand
                base = int(self.np_random.integers(2**31))
            self._generators = [seeding.np_random(base + slot)[0] for slot in range(self.num_envs)]
        return self._generators

    def _per_slot(self, values: Any, name: str, default: Any) -> Sequence[Any]:
        if values is None:
            return [default] * self.num_envs
        if isinstance(values, str) or len(values) != self.num_envs:
            raise ValueError(f"{name} must hold one entry for each of the {self.num_envs} slots")
        return values

    def _batched_infos(self) -> dict[str, Any]:
        infos = {}
        for key in INFO_KEYS:
            column = np.empty(self.num_envs, dtype=object)
            for slot, info in enumerate(self._infos):
                column[slot] = info[key]
            infos[key] = column
        return infos


_NOTHING_DONE: dict[str, Any] = {"action_kind": None, "retrieved_ids": (), "retrieved_titles": ()}
_TUPLES = ("retrieved_ids", "retrieved_titles")


def _idle_info() -> dict[str, Any]:
    return dict.fromkeys(INFO_KEYS) | _NOTHING_DONE | {"searches": 0}
