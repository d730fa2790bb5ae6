"""MedicalQA-v0: multiple choice on medicine with a search engine, up to six turns.

SearchQA with other defaults: the bundled medical book, ``choice_accuracy``, five searches and one turn for
the answer, and options that stay out of the queries, as MIRAGE prescribes (``options_in_query=True`` lets
them in). The answer is a letter or an option's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval_index.types import Retriever
from sorl_env.medical import medical_questions, medical_retriever
from sorl_env.questions import Question, QuestionSet
from sorl_env.rewards import RewardSpec
from sorl_env.search_qa import SearchQAEnv
from sorl_env.vector import SearchQAVectorEnv

RULES: dict[str, Any] = {"max_searches": 5, "options_in_query": False}
PROMPTS = {"search_r1": "medical", "tool_call": "medical_tools"}  # by dialect


class MedicalQAEnv(SearchQAEnv):
    """One episode at a time; arguments as in SearchQAEnv, splits "train", "dev", "test", "all"."""

    def __init__(
        self,
        retriever: Retriever | None = None,
        questions: QuestionSet | Sequence[Question] | str | Path | None = None,
        reward: RewardSpec = "choice_accuracy",
        split: str = "train",
        render_mode: str | None = None,
        **rules: Any,
    ) -> None:
        retriever = medical_retriever() if retriever is None else retriever
        questions = medical_questions(split) if questions is None else questions
        super().__init__(retriever, questions, reward, split, render_mode, **medical_rules(rules))


class MedicalQAVectorEnv(SearchQAVectorEnv):
    """Many episodes at once; arguments as in SearchQAVectorEnv."""

    def __init__(
        self,
        num_envs: int = 1,
        retriever: Retriever | None = None,
        questions: QuestionSet | Sequence[Question] | str | Path | None = None,
        reward: RewardSpec = "choice_accuracy",
        split: str = "train",
        render_mode: str | None = None,
        **rules: Any,
    ) -> None:
        retriever = medical_retriever() if retriever is None else retriever
        questions = medical_questions(split) if questions is None else questions
        super().__init__(num_envs, retriever, questions, reward, split, render_mode, **medical_rules(rules))


def medical_rules(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules given, over those of this environment."""
    prompt = PROMPTS.get(rules.get("dialect", "search_r1"))
    return {**RULES, **({"prompt": prompt} if prompt else {}), **rules}
