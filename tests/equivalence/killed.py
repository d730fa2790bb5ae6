"""Runs that are killed again and again, beside one that is not: `python -m tests.equivalence.killed FOLDER KILLS SEED`.

One process imports everything and forks a child for every start of a run, so that a start costs milliseconds. Half of
the kills come at a random moment, half when a checkpoint is being written. What each run leaves lies in FOLDER
("straight", "killed_0", "killed_1" ...), and FOLDER/summary.json says what was done.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sorl_algos.config import TrainConfig
from sorl_algos.learner import make_learner
from sorl_algos.metrics import MetricsLog
from sorl_algos.models import Critic, Policy
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import SyncSource
from sorl_algos.tiny import tiny_language_model, train_tokenizer
from sorl_algos.trainer import train
from sorl_env.trajectory import Trajectory
from tests.conftest import GAME_TEXTS
from tests.sorl_algos.small_game import QUESTIONS, make_env, small_config

UPDATES = 8


class ChanceRewards:
    """Rewards drawn from the global generators of Python, numpy and torch: a run that lost one of them would differ."""

    def __init__(self, inner: SyncSource) -> None:
        self.inner = inner

    def publish(self, policy: Any, version: int) -> None:
        self.inner.publish(policy, version)

    def __next__(self) -> list[Trajectory]:
        return [
            replace(item, turns=(*item.turns[:-1], replace(item.turns[-1], reward=self._draw())))
            for item in next(self.inner)
        ]

    def _draw(self) -> float:
        return random.random() + float(np.random.random()) + float(torch.rand(()))


def config_of(run_dir: Path) -> TrainConfig:
    """Everything that has a state: own critic, adaptive KL, a decaying rate, a best checkpoint, the alarm."""
    return small_config(
        run_dir, updates=UPDATES, save_every=2, eval_every=3, critic="own", passes=2, kl_reward_coef=0.05,
        kl_target=0.01, kl_horizon_episodes=50, lr_schedule="cosine", lr_warmup_updates=2, critic_warmup_updates=1,
        correction="truncated_is", questions_per_update=2, minibatch_sequences=2, max_turn_tokens=4,
        max_total_tokens=80, microbatch_tokens=120,
    )  # fmt: skip


def make_model(tokenizer: Any) -> Any:
    return tiny_language_model(
        len(tokenizer), hidden_size=16, layers=1, heads=2, intermediate_size=32, seed=0,
        pad_id=tokenizer.pad_token_id, end_id=tokenizer.eos_token_id,
    )  # fmt: skip


def run(run_dir: Path, tokenizer: Any) -> None:
    """The run in ``run_dir``, begun or resumed, with everything made anew."""
    config = config_of(run_dir)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model, reference = make_model(tokenizer), make_model(tokenizer)
    learner = make_learner(config, Policy(model), critic=Critic(model), reference=Policy(reference))
    source = SyncSource(
        make_env(4, max_searches=1),
        HFEngine(learner.raw_policy.lm, tokenizer),
        Renderer(tokenizer),
        QUESTIONS,
        questions_per_update=config.questions_per_update,
        group_size=config.group_size,
        sampling=Sampling(max_tokens=config.max_turn_tokens),
        seed=config.seed,
        max_total_tokens=config.max_total_tokens,
    )

    def evaluate() -> dict[str, float]:
        return {"exact_match": float(learner.raw_policy.lm.model.norm.weight.detach().double().sum()) % 1e-4}

    train(config, learner, ChanceRewards(source), pad_id=tokenizer.pad_token_id, evaluate=evaluate)


def start(run_dir: Path, tokenizer: Any) -> int:
    """A child process that does the run; its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(run_dir, tokenizer)
            status = 0
        finally:
            os._exit(status)
    return child


def saving(run_dir: Path) -> bool:
    """Whether a checkpoint is half written."""
    return any((run_dir / "checkpoints").glob("*.partial-*"))


def kill(child: int, run_dir: Path, moment: float | None) -> bool:
    """Kills the child after ``moment`` seconds, or (None) in its next save. False: it was done before."""
    deadline = time.monotonic() + (600.0 if moment is None else moment)
    while time.monotonic() < deadline and not (moment is None and saving(run_dir)):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, f"the run failed with status {status}"
            return False
        time.sleep(0.002 if moment is None else 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(GAME_TEXTS * 4, 360)
    make_model(tokenizer)  # what is imported only when it is needed, once here instead of in every child
    MetricsLog(folder / "scratch").close()
    make_env(4, max_searches=1)
    rng = random.Random(seed)
    began = time.monotonic()
    assert os.waitpid(start(folder / "straight", tokenizer), 0)[1] == 0
    seconds = time.monotonic() - began
    count = {"random": 0, "saving": 0, "rounds": 0, "saves_cut": 0}
    while count["random"] + count["saving"] < kills:
        run_dir = folder / f"killed_{count['rounds']}"
        count["rounds"] += 1
        killed = True
        while killed and count["random"] + count["saving"] < kills:
            kind = ("random", "saving")[(count["random"] + count["saving"]) % 2]
            for leftover in (run_dir / "checkpoints").glob("*.partial-*"):  # of the last kill: not this one's save
                leftover.rename(run_dir / f"cut_{count['saves_cut']}")
                count["saves_cut"] += 1
            moment = rng.uniform(0.0, 0.6 * seconds) if kind == "random" else None
            killed = kill(start(run_dir, tokenizer), run_dir, moment)
            count[kind] += killed
        if killed:  # the last round goes on to its end
            assert os.waitpid(start(run_dir, tokenizer), 0)[1] == 0
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    times = {"straight_seconds": seconds, "processor_seconds": [x.ru_utime + x.ru_stime for x in used]}
    (folder / "summary.json").write_text(json.dumps(count | times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
