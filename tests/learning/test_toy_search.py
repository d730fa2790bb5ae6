"""A transformer of two layers learns a two-turn search game, with every algorithm that the quickstart compares.

The game: a question names a colour; searching for that colour finds the thing behind it; the answer is that thing.
The warm start teaches first the game and then poor play (a third of the choices on purpose, the others at random), so
that a sampled episode earns about 0.2. Learning must double that within the updates below; chance is 1/8.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

import sorl_env  # noqa: F401  (registers the environments)
from retrieval_index.types import Passage
from sorl_algos.config import TrainConfig
from sorl_algos.demonstrations import answer_text, demonstrate, search_text
from sorl_algos.learner import make_learner
from sorl_algos.metrics import read_metrics
from sorl_algos.models import Policy
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import SyncSource
from sorl_algos.tiny import tiny_language_model, train_tokenizer
from sorl_algos.trainer import train
from sorl_algos.warmup import supervised
from sorl_env.questions import Question, QuestionSet
from tests.fakes import FakeRetriever

THINGS = {
    "red": "moon", "green": "ship", "blue": "tree", "black": "lamp", "white": "drum", "brown": "fish",
    "pink": "coin", "grey": "bell",
}  # fmt: skip
TABLE = {colour: [Passage(colour, colour, thing)] for colour, thing in THINGS.items()}
QUESTIONS = QuestionSet(Question(colour, colour, (thing,)) for colour, thing in THINGS.items())
UPDATES = 18


def make_env(slots: int) -> Any:
    return gymnasium.make_vec(
        "SearchQA-v0", num_envs=slots, retriever=FakeRetriever(TABLE), questions=QUESTIONS, prompt="{question}\n",
        max_searches=1, top_k=1,
    )  # fmt: skip


def player(skill: float) -> Any:
    """Makes the right move with chance `skill`, otherwise any move of the right form."""

    def play(question: Question, observation: str, turn: int, rng: random.Random) -> str:
        if turn == 0:
            return search_text(question.id if rng.random() < skill else rng.choice(list(THINGS)))
        read = next(thing for thing in THINGS.values() if thing in observation)
        return answer_text(read if rng.random() < skill else rng.choice(list(THINGS.values())))

    return play


@pytest.fixture(scope="module")
def warm() -> tuple[Any, Any]:
    """The warm-started model and its tokenizer."""
    torch.set_num_threads(1)
    texts = [f"{c}\n {c} {thing}\n\nDoc 1(Title: {c}) {thing}\n\n" for c, thing in THINGS.items()]
    tokenizer = train_tokenizer(texts * 8, 420)
    model = tiny_language_model(
        len(tokenizer), hidden_size=64, layers=2, heads=4, intermediate_size=128,
        pad_id=tokenizer.pad_token_id, end_id=tokenizer.eos_token_id,
    )  # fmt: skip
    for skill, steps in ((1.0, 120), (0.35, 80)):
        played = demonstrate(make_env(64), Renderer(tokenizer), list(QUESTIONS) * 32, player(skill), seed=0)
        supervised(
            Policy(model), played, steps=steps, batch_sequences=16, lr=3e-3, pad_id=tokenizer.pad_token_id, seed=0
        )
    return model, tokenizer


@pytest.mark.parametrize("algorithm", ["ppo", "turn_ppo", "s_ppo", "so_ppo", "grpo", "so_grpo", "gspo"])
def test_it_doubles_its_reward(algorithm: str, warm: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = copy.deepcopy(warm[0]), warm[1]
    config = TrainConfig(
        run_dir=tmp_path, algorithm=algorithm, questions_per_update=8, group_size=8, minibatch_sequences=32,
        microbatch_sequences=64, max_turn_tokens=6, max_total_tokens=80, lr=1e-3, critic_lr=1e-2,
        lr_warmup_updates=0, critic_warmup_updates=1, updates=UPDATES, save_every=UPDATES,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = Policy(model, shared_critic=config.algorithm_row().needs_critic)
    source = SyncSource(
        make_env(config.episodes_per_update), HFEngine(model, tokenizer), Renderer(tokenizer), QUESTIONS,
        questions_per_update=config.questions_per_update, group_size=config.group_size,
        sampling=Sampling(max_tokens=config.max_turn_tokens), seed=0, max_total_tokens=config.max_total_tokens,
    )  # fmt: skip
    train(config, make_learner(config, policy), source, pad_id=tokenizer.pad_token_id)
    rewards = [line["reward_mean"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    start, end = sum(rewards[:2]) / 2, sum(rewards[-5:]) / 5
    assert 0.1 < start < 0.3, f"the warm start should play, and leave room; it earns {start:.2f}"
    assert end > 2 * start, f"{algorithm}: from {start:.2f} to {end:.2f}: {rewards}"
