"""SearchQA for verifiers (0.4, its ``verifiers.v1``): a taskset of questions, and an environment in which our episode
answers as the user.

verifiers finds a taskset by the name of a module, so make one, ``sorl_search_qa.py``::

    from sorl_env.adapters.verifiers import *

and name it: ``eval sorl-search-qa --env.taskset.questions nq.jsonl --env.max-searches 3``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found, import-untyped, unused-ignore]

from sorl_env.adapters.play import Player
from sorl_env.episode import question_block
from sorl_env.prompts import prompt_text
from sorl_env.questions import Question, QuestionSet
from sorl_env.search_qa import resolve_questions

__all__ = ["SearchQAConfig", "SearchQAData", "SearchQAEnv", "SearchQAEnvConfig", "SearchQATask", "SearchQATaskset"]


class SearchQAConfig(vf.TasksetConfig):  # type: ignore[misc, unused-ignore]
    """Which questions: a JSONL file, or a split of the bundled ones; and the prompt around them."""

    questions: str | None = None
    split: str = "train"
    prompt: str = "search_r1"


class SearchQAData(vf.TaskData):  # type: ignore[misc, unused-ignore]
    """A question with its answers, so that a task is whole by itself."""

    question: str
    answers: list[str]
    kind: str = "open"
    options: dict[str, str] = {}


class SearchQATask(vf.Task[SearchQAData, vf.State, vf.TaskConfig]):  # type: ignore[misc, unused-ignore]
    """One question."""


class SearchQAEnvConfig(vf.EnvConfig):  # type: ignore[misc, unused-ignore]
    """The rules that matter most; ``retriever`` is ``module:function``, called once to make the retriever."""

    player: vf.AgentConfig = vf.AgentConfig()
    retriever: str | None = None
    reward: str = "exact_match"
    max_searches: int = 2
    top_k: int = 3


class SearchQATaskset(vf.Taskset[SearchQATask, SearchQAConfig]):  # type: ignore[misc, unused-ignore]
    """The questions as tasks, in the order of the set."""

    def load(self) -> Iterator[Any]:
        """One task a question; its prompt is the first observation."""
        questions: QuestionSet = resolve_questions(self.config.questions, self.config.split)
        for question in questions:
            data = SearchQAData(
                id=question.id,
                prompt=prompt_text(self.config.prompt, question_block(question)),
                question=question.text,
                answers=list(question.answers),
                kind=question.kind,
                options=dict(question.metadata.get("options") or {}),
            )
            yield SearchQATask(data, self.config.task)


class SearchQAEnv(vf.Env[SearchQAEnvConfig]):  # type: ignore[misc, unused-ignore]
    """Plays our episode against the player: each reply is a turn, each observation the next user message."""

    async def run(self, task: Any, agents: Any) -> None:
        """One episode; its reward and scores go into the trace. A failed search is an error of the rollout."""
        player = Player(
            retriever=_made(self.config.retriever),
            questions=[question_of(task.data)],
            reward=self.config.reward,
            max_searches=self.config.max_searches,
            top_k=self.config.top_k,
        )
        player.begin(player.questions[0])  # the task's prompt shows it already
        async with agents.player.interaction(task) as interaction:
            await play(player, interaction)


async def play(player: Player, interaction: Any) -> None:
    """The exchange itself. Raises RuntimeError if a search failed, so that nothing is learnt from the episode."""
    assert player.episode is not None
    segment = await interaction.turn()
    while not segment.terminated:
        step = player.step(segment.last_reply)
        if step.info["stop"] == "retrieval_error":
            raise RuntimeError("the search failed; is the retriever running?")
        if step.info["stop"] is not None:
            break
        segment = await interaction.turn(step.observation)
    episode = player.episode
    interaction.trace.record_reward("reward", sum(episode.rewards), 1.0)
    interaction.trace.record_metric("searches", float(episode.searches))
    interaction.trace.info["stop"] = episode.stop or "ended by the harness"


def question_of(data: Any) -> Question:
    """The question that a task holds."""
    metadata = {"options": dict(data.options)} if data.options else {}
    return Question(str(data.id), data.question, tuple(data.answers), data.kind, metadata)


@cache
def _made(path: str | None) -> Any:
    """The retriever, made once in each process."""
    if path is None:
        return None
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)()
