"""A small game of two-turn searches, made-up trajectories, and a source that replays them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium

import sorl_env  # noqa: F401  (registers the environments)
from retrieval_index.types import Passage
from sorl_algos.config import TrainConfig
from sorl_env.questions import Question, QuestionSet
from sorl_env.trajectory import Trajectory, Turn
from tests.fakes import FakeRetriever

CAPITALS = {"Peru": "Lima", "Chile": "Santiago", "Ecuador": "Quito"}
PASSAGES = tuple(
    Passage(f"p{number}", land, f"The capital of {land} is {city}.")
    for number, (land, city) in enumerate(CAPITALS.items())
)
QUESTIONS = QuestionSet(
    Question(f"q{number}", f"What is the capital of {land}?", (city,))
    for number, (land, city) in enumerate(CAPITALS.items())
)


def make_env(num_envs: int, retriever: Any = None, **options: Any) -> Any:
    """SearchQA-v0 over the three capitals; finds one passage a search, allows two."""
    settings: dict[str, Any] = {
        "retriever": retriever or FakeRetriever(passages=PASSAGES),
        "questions": QUESTIONS,
        "prompt": "short",
        "max_searches": 2,
        "top_k": 1,
    }
    return gymnasium.make_vec("SearchQA-v0", num_envs=num_envs, **settings | options)


def good_player(prompt: str) -> str:
    """Searches for the capital asked for, then answers what the passage says."""
    if "<information>" not in prompt:
        return "<search> capital of " + prompt.split("capital of ")[1].split("?")[0] + "</search>"
    return "<answer>" + prompt.rsplit(" is ", 1)[1].split(".")[0] + "</answer>"


def made_up(
    rows: int,
    *,
    seed: int = 0,
    group_size: int = 2,
    vocabulary: int = 300,
    turns: Sequence[int] = (1, 2, 3),
    reward: Any = None,
) -> list[Trajectory]:
    """Trajectories of random tokens: `rows` episodes in groups, each with one of `turns` turns.

    reward: a function of the row; by default a random 0 or 1 on the last turn.
    """
    rng = random.Random(seed)
    items = []
    for row in range(rows):
        count = turns[row % len(turns)]
        made = []
        for number in range(count):
            action = [rng.randrange(4, vocabulary) for _ in range(rng.randint(1, 6))]
            last = number == count - 1
            earned = float(rng.random() < 0.5) if reward is None else float(reward(row))
            made.append(
                Turn(
                    observation_ids=tuple(rng.randrange(4, vocabulary) for _ in range(rng.randint(1, 8))),
                    action_ids=tuple(action),
                    action_logprobs=tuple(-rng.random() for _ in action),
                    reward=earned if last else 0.0,
                    observation_text="seen",
                    action_text="said",
                )
            )
        notes = [{"action_kind": "search", "retrieved_ids": [], "retrieved_titles": []} for _ in made]
        notes[-1] = notes[-1] | {"action_kind": "answer"}
        info = {"scores": {"exact_match": made[-1].reward, "f1": made[-1].reward}, "searches": count - 1}
        group = row // group_size
        items.append(Trajectory(tuple(made), f"q{group}", group, 0, "answered", info | {"turns": notes}))
    return items


class ReplaySource:
    """A TrajectorySource that gives ``batches[version]``, round and round."""

    def __init__(self, batches: Sequence[list[Trajectory]]) -> None:
        self.batches, self.version = list(batches), 0
        self.published: list[int] = []

    def publish(self, policy: Any, version: int) -> None:
        self.published.append(version)
        self.version = version

    def __next__(self) -> list[Trajectory]:
        return self.batches[self.version % len(self.batches)]


def small_config(run_dir: Path, **changes: Any) -> TrainConfig:
    """Eight episodes an update in groups of two, two minibatches of four, no warm-up."""
    settings: dict[str, Any] = {
        "run_dir": run_dir,
        "algorithm": "so_ppo",
        "questions_per_update": 4,
        "group_size": 2,
        "minibatch_sequences": 4,
        "microbatch_sequences": 2,
        "critic_warmup_updates": 0,
        "lr_warmup_updates": 0,
        "lr": 1e-3,
        "updates": 2,
        "eval_every": 1,
        "save_every": 1,
        "value_clip": None,
    }
    return TrainConfig(**settings | changes)
