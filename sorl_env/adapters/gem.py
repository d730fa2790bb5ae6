"""SearchQA as an environment of GEM (package gem-llm).

import gem
gem.register("sorl:SearchQA", entry_point="sorl_env.adapters.gem:GemSearchQA")
env = gem.make("sorl:SearchQA", questions="nq.jsonl", max_searches=3)
"""

from __future__ import annotations

from typing import Any

from gem.core import Env  # type: ignore[import-not-found, import-untyped, unused-ignore]

from sorl_env.adapters.play import Player


class GemSearchQA(Env):  # type: ignore[misc, unused-ignore]
    """Arguments as in ``SearchQAEnv``; ``seed`` decides the order of the questions."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._player = Player(**options)
        self._seed, self._place = seed, 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """The next question of the order; a seed begins another order."""
        super().reset(seed)
        if seed is not None:
            self._seed, self._place = seed, 0
        [question] = self._player.questions.batch(self._seed, self._place, 1)
        self._place += 1
        observation = self._player.begin(question)
        assert self._player.episode is not None
        return observation, self._player.episode.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn."""
        step = self._player.step(action)
        return step.observation, step.reward, step.terminated, step.truncated, step.info

    def sample_random_action(self) -> str:
        """A search for the question itself."""
        assert self._player.episode is not None, "call reset() first"
        return f"<search>{self._player.episode.question.text}</search>"

    def get_state(self) -> dict[str, Any]:
        """The episode and the place in the order, as plain data."""
        assert self._player.episode is not None, "call reset() first"
        return {"episode": self._player.episode.get_state(), "seed": self._seed, "place": self._place}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``get_state`` was called."""
        self._seed, self._place = state["seed"], state["place"]
        self._player.begin(self._player.questions.by_id(state["episode"]["question_id"]))
        assert self._player.episode is not None
        self._player.episode.set_state(state["episode"])
