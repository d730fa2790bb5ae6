"""One episode with its retriever: what every adapter plays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval_index.types import RetrievalError, Retriever
from sorl_env.episode import Episode, Step
from sorl_env.questions import Question, QuestionSet
from sorl_env.rewards import RewardSpec, resolve_reward
from sorl_env.search_qa import make_rules, resolve_questions, resolve_retriever, searched


class Player:
    """Plays questions one after another. Arguments as in ``SearchQAEnv``."""

    def __init__(
        self,
        retriever: Retriever | None = None,
        questions: QuestionSet | Sequence[Question] | str | Path | None = None,
        reward: RewardSpec = "exact_match",
        split: str = "train",
        **rules: Any,
    ) -> None:
        self.rules = make_rules(rules)
        self.reward_fn = resolve_reward(reward)
        self.questions = resolve_questions(questions, split)
        self.retriever = resolve_retriever(retriever)
        self.episode: Episode | None = None

    def begin(self, question: Question) -> str:
        """The first observation of an episode on this question."""
        self.episode = Episode(question, self.rules, self.reward_fn)
        return self.episode.begin()

    def step(self, action: str) -> Step:
        """One turn, with the search it asks for. Raises RuntimeError outside a running episode."""
        if self.episode is None:
            raise RuntimeError("no episode yet; reset the environment first")
        query = self.episode.query(action)
        if query is None:
            return self.episode.advance(action)
        try:
            [hits] = searched(self.retriever, [query], self.rules.top_k)
        except RetrievalError:
            return self.episode.advance(action, error=True)
        return self.episode.advance(action, hits)
