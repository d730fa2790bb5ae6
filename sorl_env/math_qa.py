"""MathQA-v0: problems solved in one turn, without a search engine; the answer in ``\\boxed{}`` (DAPO, AIME).

SearchQA with other defaults: generated problems, ``math_equal``, the "boxed" dialect, no search. A turn
without an answer ends the episode as answered, with reward 0; one that the engine cut ends it as cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval_index.types import Hit, Retriever
from sorl_env.math_problems import math_questions
from sorl_env.questions import Question, QuestionSet, load_questions
from sorl_env.rewards import RewardSpec
from sorl_env.search_qa import SearchQAEnv
from sorl_env.vector import SearchQAVectorEnv

RULES: dict[str, Any] = {"max_searches": 0, "prompt": "math", "dialect": "boxed", "last_turn_answers": True}


class NoPassages:
    """A retriever that finds nothing."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        return [[] for _ in queries]


class MathQAEnv(SearchQAEnv):
    """One episode at a time; arguments as in SearchQAEnv, splits "train", "dev", "test"."""

    def __init__(
        self,
        retriever: Retriever | None = None,
        questions: QuestionSet | Sequence[Question] | str | Path | None = None,
        reward: RewardSpec = "math_equal",
        split: str = "train",
        render_mode: str | None = None,
        **rules: Any,
    ) -> None:
        chosen = _problems(questions, split)
        super().__init__(retriever or NoPassages(), chosen, reward, split, render_mode, **(RULES | rules))


class MathQAVectorEnv(SearchQAVectorEnv):
    """Many episodes at once; arguments as in SearchQAVectorEnv."""

    def __init__(
        self,
        num_envs: int = 1,
        retriever: Retriever | None = None,
        questions: QuestionSet | Sequence[Question] | str | Path | None = None,
        reward: RewardSpec = "math_equal",
        split: str = "train",
        render_mode: str | None = None,
        **rules: Any,
    ) -> None:
        chosen = _problems(questions, split)
        super().__init__(num_envs, retriever or NoPassages(), chosen, reward, split, render_mode, **(RULES | rules))


def _problems(
    questions: QuestionSet | Sequence[Question] | str | Path | None, split: str
) -> QuestionSet | Sequence[Question]:
    if questions is None:
        return math_questions(split)
    if isinstance(questions, (str, Path)):
        return load_questions(questions, kind="math")
    return questions
