"""SearchQA-v0: open-domain questions with a search engine, one episode at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium

from retrieval_index.types import Hit, RetrievalError, Retriever
from sorl_env.console import show_question, show_turn
from sorl_env.dialects import dialect_named
from sorl_env.episode import Episode, EpisodeRules
from sorl_env.questions import Question, QuestionSet, load_questions
from sorl_env.rewards import RewardSpec, check_questions_fit, resolve_reward
from sorl_env.spaces import AnyText

RENDER_MODES = ("ansi", "human")


class SearchQAEnv(gymnasium.Env[str, str]):
    """Observations and actions are texts; each step is one turn of the policy.

    Args:
        retriever: answers the queries; None: BM25 over the bundled corpus.
        questions: a QuestionSet, any sequence of Questions, or the path of a JSONL file; None: the bundled
            ones.
        reward: a name in ``rewards.REWARDS``, a weighted sum of them (``"exact_match + 0.1*format"`` or a
            mapping), or a function ``(action_texts, question) -> float``.
        split: which of the bundled questions: "train", "dev", "test" or "test_unseen".
        render_mode: None, "ansi" (``render()`` returns the transcript) or "human" (every turn is printed).
        rules: options of ``EpisodeRules``: max_searches, top_k, max_observation_words, max_query_chars,
            invalid_penalty, search_cost, prompt, tell_budget, max_turn_words, max_total_words, dialect,
            options_in_query, last_turn_answers.

    ``reset(options={"question_id": id})`` picks the question; without it the question is drawn with the
    environment's seeded generator.
    """

    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": 4}

    def __init__(
        self,
        retriever: Retriever | None = None,
        questions: QuestionSet | Sequence[Question] | str | Path | None = None,
        reward: RewardSpec = "exact_match",
        split: str = "train",
        render_mode: str | None = None,
        **rules: Any,
    ) -> None:
        self.rules = make_rules(rules)
        self.reward_fn = resolve_reward(reward)
        self.questions = resolve_questions(questions, split)
        check_questions_fit(reward, self.questions)
        self.retriever = resolve_retriever(retriever)
        self.render_mode = checked_render_mode(render_mode)
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._episode: Episode | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What an engine must stop at, keeping it in the text."""
        return dialect_named(self.rules.dialect).stop_strings

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas that the chat template has to show the policy; none in most dialects."""
        return dialect_named(self.rules.dialect).tools

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode. Raises KeyError for an unknown question id, ValueError for an unknown option."""
        question_id = checked_options(options, ("question_id",)).get("question_id")
        super().reset(seed=seed)
        if question_id is None:
            question = self.questions[int(self.np_random.integers(len(self.questions)))]
        else:
            question = self.questions.by_id(question_id)
        self._episode = Episode(question, self.rules, self.reward_fn)
        observation = self._episode.begin()
        if self.render_mode == "human":
            show_question(question.id, observation)
        return observation, self._episode.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn. Raises RuntimeError where ``reset`` is needed first."""
        episode = self._running()
        check_action(action)
        query = episode.query(action)
        if query is None:
            step = episode.advance(action)
        else:
            try:
                [hits] = searched(self.retriever, [query], self.rules.top_k)
            except RetrievalError:
                step = episode.advance(action, error=True)
            else:
                step = episode.advance(action, hits)
        if self.render_mode == "human":
            show_turn(len(episode.action_texts), action, step.observation, step.reward, step.info["stop"])
        return step.observation, step.reward, step.terminated, step.truncated, step.info

    def render(self) -> str | None:  # type: ignore[override]
        """The transcript so far in mode "ansi"; None otherwise ("human" prints as it goes)."""
        if self.render_mode != "ansi":
            return None
        return "" if self._episode is None else self._episode.transcript()

    def get_state(self) -> dict[str, Any]:
        """The episode and the random generator, as plain data."""
        return {"episode": self._running().get_state(), "np_random": self.np_random.bit_generator.state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``get_state`` was called, here or in an environment with the same options."""
        episode = Episode(self.questions.by_id(state["episode"]["question_id"]), self.rules, self.reward_fn)
        episode.set_state(state["episode"])
        self._episode = episode
        self.np_random.bit_generator.state = state["np_random"]

    def _running(self) -> Episode:
        if self._episode is None:
            raise RuntimeError("no episode yet; call reset() first")
        return self._episode


def make_rules(options: Mapping[str, Any]) -> EpisodeRules:
    """EpisodeRules from keyword arguments. Raises TypeError, naming the known options, for an unknown one."""
    known = EpisodeRules.__dataclass_fields__
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
    return EpisodeRules(**options)


def resolve_questions(questions: QuestionSet | Sequence[Question] | str | Path | None, split: str) -> QuestionSet:
    """The questions meant by the argument of that name. Raises ValueError for an empty set."""
    if questions is None:
        from sorl_env.world import world_questions  # the bundled data is read only where it is wanted

        chosen = world_questions(split)
    elif isinstance(questions, QuestionSet):
        chosen = questions
    elif isinstance(questions, (str, Path)):
        chosen = load_questions(questions)
    else:
        chosen = QuestionSet(questions)
    if not len(chosen):
        raise ValueError(f"{chosen.name} holds no question; give at least one")
    return chosen


def resolve_retriever(retriever: Retriever | None) -> Retriever:
    """The retriever itself, or the bundled one. Raises TypeError for something that cannot search."""
    if retriever is None:
        from sorl_env.world import world_retriever

        return world_retriever()
    if not callable(getattr(retriever, "search", None)):
        raise TypeError(f"retriever must have search(queries, top_k), got {type(retriever).__name__}")
    return retriever


def searched(retriever: Retriever, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
    """One list of hits for each query. Raises ValueError if the retriever breaks that promise."""
    found = retriever.search(queries, top_k)
    if len(found) != len(queries):
        raise ValueError(f"{type(retriever).__name__}.search gave {len(found)} results for {len(queries)} queries")
    return found


def checked_options(options: Mapping[str, Any] | None, known: Sequence[str]) -> Mapping[str, Any]:
    """The options of reset. Raises ValueError for an unknown key."""
    for name in options or {}:
        if name not in known:
            raise ValueError(f"unknown reset option {name!r}; known: {', '.join(known)}")
    return options or {}


def checked_render_mode(render_mode: str | None) -> str | None:
    if render_mode is not None and render_mode not in RENDER_MODES:
        raise ValueError(f"unknown render_mode {render_mode!r}; known: {', '.join(RENDER_MODES)}")
    return render_mode


def check_action(action: object) -> None:
    if not isinstance(action, str):
        raise TypeError(f"an action is a text (str), got {type(action).__name__}")
