"""SearchQA as a text environment of SkyRL-gym.

    import skyrl_gym
    skyrl_gym.register(id="sorl", entry_point=text_env(retriever=retriever, max_searches=3))
    env = skyrl_gym.make("sorl", env_config={}, extras={"question": …, "reward_spec": {"ground_truth": …}})

The question comes with each row: ``extras["question"]`` or ``extras["extra_info"]["question"]``, its answers from
``extras["reward_spec"]["ground_truth"]`` (a text, a list, or ``{"target": […]}``), as SkyRL's data has them. The rows
that ``scripts/prepare_data.py`` writes also bring kind and options in their ``extra_info``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    BaseTextEnv,
    BaseTextEnvStepOutput,
)

from sorl_env.adapters.play import Player
from sorl_env.questions import Question


def text_env(**options: Any) -> type:
    """A class of environments with these options (those of ``SearchQAEnv``, without questions)."""

    class SearchQATextEnv(BaseTextEnv):  # type: ignore[misc, valid-type, unused-ignore]
        """One episode of SearchQA."""

        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
            super().__init__()
            self._question = question_of(extras or {})
            self._player = Player(**(options | {"questions": [self._question]}))
            self.max_turns = self._player.rules.max_turns

        def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
            """The prompt with our first observation in the place of its user message."""
            kept = [message for message in prompt or [] if message["role"] == "system"]
            return [*kept, {"role": "user", "content": self._player.begin(self._question)}], {}

        def step(self, action: str) -> Any:
            """Play one turn."""
            self.turns += 1
            step = self._player.step(action)
            done = step.terminated or step.truncated
            said = [] if done else [{"role": "user", "content": step.observation}]
            return BaseTextEnvStepOutput(observations=said, reward=step.reward, done=done, metadata=step.info)

        def get_metrics(self) -> dict[str, Any]:
            """Searches, turns and the scores of the answer."""
            episode = self._player.episode
            if episode is None:
                return {}
            return {"searches": episode.searches, "turns": len(episode.action_texts), "reward": sum(episode.rewards)}

    return SearchQATextEnv


def question_of(extras: Mapping[str, Any]) -> Question:
    """The question of a row. Raises ValueError for a row without one, or without answers."""
    extra = extras.get("extra_info") or {}
    text = extras.get("question") or extra.get("question")
    truth: Any = (extras.get("reward_spec") or {}).get("ground_truth")
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if not text or truth is None:
        raise ValueError("extras need `question` (or extra_info.question) and `reward_spec.ground_truth`")
    answers = [truth] if isinstance(truth, (str, int, float)) else list(truth)
    name = extras.get("id") or extra.get("question_id") or extra.get("index") or "question"
    metadata = json.loads(extra["metadata"]) if extra.get("metadata") else {}
    return Question(str(name), str(text), tuple(map(str, answers)), str(extra.get("kind") or "open"), metadata)
