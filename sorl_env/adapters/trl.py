"""SearchQA as tools for TRL's ``GRPOTrainer(environment_factory=…)``: ``search`` and ``answer``.

    trainer = GRPOTrainer(
        model=…,
        train_dataset=Dataset.from_list(trl_rows(questions)),
        environment_factory=environment_factory(questions=questions, retriever=retriever),
        args=GRPOConfig(…),
    )

TRL renders the tools through the model's chat template, runs the calls, and asks the environment for its reward. An
episode whose search failed has no reward (None), which TRL leaves out of the group. Nothing of TRL is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from sorl_env.adapters.play import Player
from sorl_env.questions import Question

RULES: dict[str, Any] = {"dialect": "tool_call", "prompt": "short"}
OVER = "The episode is over."
_TAG = re.compile(r"<(?=/?(?:think|tool_call|tool_response|answer)>)")  # the text is one answer, whatever is in it


class SearchTools:
    """One environment instance; its public methods are the tools."""

    def __init__(self, player: Player) -> None:
        self._player = player

    def reset(self, question_id: str | None = None, **row: Any) -> str:
        """Begin an episode on the question of a row of ``trl_rows``; returns the text shown to the policy."""
        if question_id is None:
            raise ValueError("the row has no question_id; make the data set with trl_rows(questions)")
        return self._player.begin(self._player.questions.by_id(question_id))

    def search(self, query: str) -> str:
        """
        Search the passages.

        Args:
            query: What to look for.

        Returns:
            The passages that were found.
        """
        call = json.dumps({"name": "search", "arguments": {"query_list": [query]}})
        return self._play(f"<tool_call>{_inert(call)}</tool_call>")

    def answer(self, text: str) -> str:
        """
        Give the final answer; the episode ends.

        Args:
            text: The answer itself, as short as possible.

        Returns:
            A confirmation.
        """
        return self._play(f"<answer>{_TAG.sub('‹', text)}</answer>")

    def get_reward(self) -> float | None:
        """What the episode earned; 0.0 without an answer, None if a search failed."""
        episode = self._player.episode
        if episode is None or episode.stop == "retrieval_error":
            return None
        return sum(episode.rewards)

    def _play(self, action: str) -> str:
        episode = self._player.episode
        if episode is None or episode.finished:
            return OVER
        step = self._player.step(action)
        return OVER if step.info["stop"] else step.observation.strip()


def environment_factory(**options: Any) -> Callable[[], SearchTools]:
    """What ``GRPOTrainer`` calls to make environments; options as in ``SearchQAEnv``, shared by all of them."""
    settings = RULES | options
    first = Player(**settings)

    def make() -> SearchTools:
        return SearchTools(Player(**(settings | {"questions": first.questions, "retriever": first.retriever})))

    return make


def trl_rows(questions: Iterable[Question]) -> list[dict[str, Any]]:
    """Rows for the training data set; the question's text is put in by ``reset``."""
    return [{"prompt": [{"role": "user", "content": ""}], "question_id": question.id} for question in questions]


def _inert(text: str) -> str:
    """JSON without a ``<``, so that a query cannot close the call."""
    return text.replace("<", "\\u003c")
