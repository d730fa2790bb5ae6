"""Plays whole sets of questions, batch after batch, and goes on where it was stopped.

The numbers depend on the identity of the evaluation alone. Batches are cut from the set in its order and written when
they are whole, so a stop changes no batch. What a question's episode samples depends on the seed and its own tokens,
so batches of another size differ at most where floating point does (with float64 weights it does not in practice).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sorl_algos.evaluation.identity import question_digest
from sorl_algos.evaluation.results import QuestionLog, episode_row, make_result, write_result
from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.engine import Completion, RolloutEngine, Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_env.actions import answer_of


@dataclass(frozen=True)
class Plan:
    """One set to be played.

    Args:
        name: stem of its files.
        questions: in the order in which they are played.
        kind: "open", "choice" or "math": which scores are reported.
        make_env: a vector environment of so many slots over the questions.
        identity: all that decides the numbers, as plain data.
        sampling: of every turn; its seeds are set here.
        samples: episodes of each question.
        seed: of sampling and of the bootstrap.
        batch: questions played at one time.
        max_total_tokens: longest episode in tokens; None: no limit.
        style, system: of the `Renderer`.

    Raises:
        ValueError: no question, or several samples of greedy decoding.
    """

    name: str
    questions: Sequence[Any]
    kind: str
    make_env: Callable[[int], Any]
    identity: Mapping[str, Any]
    sampling: Sampling
    samples: int = 1
    seed: int = 0
    batch: int = 32
    max_total_tokens: int | None = None
    style: Literal["continuation", "chat"] = "continuation"
    system: str | None = None

    def __post_init__(self) -> None:
        if not len(self.questions):
            raise ValueError(f"set {self.name!r} holds no question; raise --limit or take another set")
        if self.batch < 1 or self.samples < 1:
            raise ValueError(f"batch ({self.batch}) and samples ({self.samples}) must be 1 or more")
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ValueError(f"{self.samples} samples of greedy decoding are all the same; set a temperature above 0")

    @property
    def episodes(self) -> int:
        return len(self.questions) * self.samples

    def batches(self) -> list[tuple[int, Sequence[Any]]]:
        """(sample, questions) of each batch."""
        starts = range(0, len(self.questions), self.batch)
        return [(n, self.questions[start : start + self.batch]) for n in range(self.samples) for start in starts]


class SeededByPrompt:
    """An engine whose seeds depend on (seed, sample, the prompt's tokens) alone, not on the place in a batch."""

    def __init__(self, engine: RolloutEngine, seed: int, sample: int) -> None:
        self.engine, self.salt = engine, f"{seed}:{sample}:".encode()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        return self.engine.generate(prompts, replace(sampling, seeds=tuple(map(self._seed, prompts))))

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.engine.update_weights(weights, version)

    def _seed(self, prompt: Sequence[int]) -> int:
        digest = hashlib.blake2b(self.salt + ",".join(map(str, prompt)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def renderer_for(plan: Plan, tokenizer: Any) -> Renderer:
    """The plan's renderer, which shows the tools of the plan's environment, where its dialect has any.

    Raises:
        ValueError: a chat template that cannot.
    """
    tools = plan.make_env(1).tools if len(plan.questions) else ()
    return Renderer(tokenizer, style=plan.style, system=plan.system, tools=tools)


def longest_prompt(plan: Plan, renderer: Renderer) -> tuple[int, str]:
    """Tokens of the longest first observation, and whose it is. Renders every question once.

    Raises:
        ValueError: it leaves no room for a turn within ``max_total_tokens``.
    """
    env = plan.make_env(min(64, len(plan.questions)))
    longest, whose = 0, ""
    for start in range(0, len(plan.questions), env.num_envs):
        ids = [question.id for question in plan.questions[start : start + env.num_envs]]
        observations, _ = env.reset(options={"question_ids": ids + [None] * (env.num_envs - len(ids))})
        for question_id, text in zip(ids, observations, strict=False):
            count = len(renderer.first(text))
            longest, whose = (count, question_id) if count > longest else (longest, whose)
    if plan.max_total_tokens is not None and longest >= plan.max_total_tokens:
        raise ValueError(
            f"question {whose!r} of {plan.name} has a prompt of {longest} tokens, but max_total_tokens is "
            f"{plan.max_total_tokens}; raise --max-total-tokens"
        )
    return longest, whose


def open_log(plan: Plan, directory: Path, *, restart: bool = False) -> QuestionLog:
    """The log of a plan. Raises ValueError where the directory holds another evaluation of that name."""
    path = directory / f"{plan.name}.questions.jsonl"
    if restart:
        path.unlink(missing_ok=True)
        (directory / f"{plan.name}.json").unlink(missing_ok=True)
    return QuestionLog(path, plan.identity)


def play(
    plan: Plan,
    engine: RolloutEngine,
    renderer: Renderer,
    directory: Path,
    *,
    session: Mapping[str, Any],
    restart: bool = False,
    on_episodes: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Plays what has not been played yet, writes the two files of the set, and returns the result.

    Args:
        directory: holds ``NAME.questions.jsonl`` and, in the end, ``NAME.json``.
        session: code revision and versions, recorded beside the numbers; a stopped evaluation may go on under others.
        restart: drop what is there.
        on_episodes: hears of episodes, first of those that are there already.

    Raises:
        ValueError: the directory holds another evaluation of that name.
        RuntimeError: an engine or a search failed. What was written before stays, and the same call goes on.
    """
    log = open_log(plan, directory, restart=restart)
    due, keep = [], []
    for sample, questions in plan.batches():
        keys = [(sample, question.id) for question in questions]
        if all(key in log.rows for key in keys):
            keep += keys
        else:
            due.append((sample, questions))
    if due or not log.sessions:
        log.begin(session, keep)
    on_episodes(len(keep))
    env = plan.make_env(min(plan.batch, len(plan.questions))) if due else None
    for sample, questions in due:
        trajectories = collect(
            env,
            SeededByPrompt(engine, plan.seed, sample),
            renderer,
            questions,
            sampling=plan.sampling,
            seed=plan.seed,
            max_total_tokens=plan.max_total_tokens,
        )
        failed = [item.question_id for item in trajectories if item.stop == "retrieval_error"]
        if failed:
            raise RuntimeError(
                f"the search failed for {len(failed)} of {len(trajectories)} questions ({failed[0]!r} first); is the "
                "retriever up? The same command goes on from here"
            )
        log.append(
            [
                episode_row(trajectory, question, sample, answer_of(trajectory.action_texts))
                for trajectory, question in zip(trajectories, questions, strict=True)
            ]
        )
        on_episodes(len(questions))
    digests = [question_digest(question) for question in plan.questions]
    result = make_result(log, plan.questions, digests, kind=plan.kind, samples=plan.samples, seed=plan.seed)
    write_result(directory / f"{plan.name}.json", result)
    return result
