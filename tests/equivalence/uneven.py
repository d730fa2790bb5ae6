"""Two ranks with unlike shares of the work: `python -m tests.equivalence.uneven FOLDER`.

Rank 0 has long episodes (several micro-batches), rank 1 short ones (one micro-batch), and in one update all of rank 1's
episodes were dropped. A rank that ran fewer forwards than the other would leave it waiting for ever. The process forks
both ranks, so that the libraries are imported once. Everything is in float64.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sorl_algos.distributed import rank, world_size
from sorl_algos.learner import make_learner
from sorl_algos.models import make_policy_and_critic
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import SyncSource
from sorl_algos.sharding import whole
from sorl_algos.tiny import tiny_language_model, train_tokenizer
from sorl_algos.trainer import train
from sorl_env.questions import Question, QuestionSet
from sorl_env.trajectory import Trajectory
from tests.conftest import GAME_TEXTS
from tests.fakes import ScriptedEngine
from tests.sorl_algos.small_game import made_up, make_env, small_config

RUNS: dict[str, dict[str, Any]] = {
    "own critic, gradient_norm": {"critic": "own", "normalisation": "gradient_norm", "threshold": 1e-3},
    "groups, a correction": {
        "algorithm": "so_grpo", "correction": "icepop", "correction_low": 0.0, "correction_high": 1e6,
        "rejected_leave_denominator": True,
    },
}  # fmt: skip
SHARDINGS = ("ddp", "fsdp2")
EPISODES = 8
TEN = QuestionSet(Question(f"t{number}", f"What is {number}?", ("x",)) for number in range(10))


class UnlikeSource:
    """Fixed episodes, longer on the first rank; those of the second half are all dropped in update 1."""

    def __init__(self, part: int, parts: int) -> None:
        self.rows = slice(part * EPISODES // parts, (part + 1) * EPISODES // parts)
        self.version = 0

    def publish(self, policy: Any, version: int) -> None:
        self.version = version

    def __next__(self) -> list[Trajectory]:
        half = EPISODES // 2
        long = made_up(half, seed=self.version, turns=(3, 4), reward=lambda row: float(row % 3))
        short = made_up(half, seed=9 + self.version, turns=(1,), reward=lambda row: float(row % 2))
        short = [replace(item, group_id=f"second {item.group_id}") for item in short]
        if self.version == 1:
            short = [replace(item, stop="retrieval_error") for item in short]
        return [*long, *short][self.rows]


def run(name: str, run_dir: Path, part: int, parts: int, sharding: Any) -> dict[str, Tensor]:
    """Weights after two updates of two passes each."""
    config = small_config(
        run_dir, minibatch_sequences=EPISODES, sharding=sharding, passes=2, max_turn_tokens=8, max_total_tokens=60,
        microbatch_tokens=60, microbatch_sequences=8, clip_low=0.01, clip_high=0.01, **RUNS[name],
    )  # fmt: skip
    torch.manual_seed(0)
    model = tiny_language_model(300, hidden_size=16, layers=1, heads=2, intermediate_size=32, seed=0).double()
    critic_kind = config.critic if config.algorithm_row().needs_critic else "none"
    policy, critic = make_policy_and_critic(model, critic=critic_kind)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    learner = make_learner(config, policy.double(), critic=critic and critic.double())
    logged: list[dict[str, float]] = []
    train(config, learner, UnlikeSource(part, parts), pad_id=0, on_update=lambda _, line: logged.append(line))
    Path(f"{run_dir}.{part}.json").write_text(json.dumps(logged))
    return {
        f"{kind}.{key}": whole(value.detach()).clone()
        for kind, module in learner.modules().items()
        for key, value in module.state_dict().items()
        if "lm_head" not in key  # tied to the embeddings
    }


def played(version: int, part: int, parts: int) -> list[list[Any]]:
    """Question and group of each episode that a rank plays."""
    tokenizer = train_tokenizer(GAME_TEXTS * 4, 360)
    engine = ScriptedEngine(tokenizer, lambda prompt: "<answer> x</answer>")
    source = SyncSource(
        make_env(4, questions=TEN), engine, Renderer(tokenizer), TEN, questions_per_update=4, group_size=2,
        sampling=Sampling(max_tokens=6), seed=3, rank=part, ranks=parts,
    )  # fmt: skip
    source.version = version
    return [[item.question_id, item.group_id] for item in next(source)]


def one_rank(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    results = {}
    for sharding in SHARDINGS:
        for name in RUNS:
            place = folder / f"{sharding}-{name}"
            for key, value in run(name, place, int(os.environ["RANK"]), 2, sharding).items():
                results[f"{sharding}|{name}|{key}"] = value.contiguous()
    assert world_size() == 2
    save_file(results, folder / f"weights.{rank()}")
    (folder / f"played.{rank()}").write_text(json.dumps([played(version, rank(), 2) for version in range(4)]))
    torch.distributed.destroy_process_group()


def main(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    tiny_language_model(300, hidden_size=16, layers=1, heads=2, intermediate_size=32, seed=0)  # imports, once
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            status = 1
            try:
                one_rank(folder)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
