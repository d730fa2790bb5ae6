"""Steps and short runs on this rank's part of fixed episodes: `python -m tests.equivalence.ranks OUTPUT FOLDER`.

RANK and WORLD_SIZE say which part. Rank r writes the weights after each step, and the scaled gradient norm and factor
that it saw, to OUTPUT.r, for every setting and both ways to share the work; and it trains in FOLDER. Everything is in
float64: a difference is a mistake, not rounding.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sorl_algos.batch import collate
from sorl_algos.config import TrainConfig
from sorl_algos.learner import Learner, make_learner
from sorl_algos.models import Policy, full_weights, make_policy_and_critic, score
from sorl_algos.sharding import whole
from sorl_algos.tiny import tiny_language_model
from sorl_algos.trainer import estimate_advantages, optimiser_step, train
from sorl_env.trajectory import Trajectory
from tests.sorl_algos.small_game import made_up, small_config

# Rows without a normalisation of their own get each of the three; those with one are such rows with the first.
BARE_ROWS = ("ppo", "turn_ppo", "grpo", "gspo", "rloo", "dr_grpo", "cispo", "reinforce")
NORMALISED_ROWS = ("s_ppo", "so_ppo", "s_grpo", "so_grpo")
# Low thresholds, so that the factor is below 1 whatever the size of a row's gradient.
ESTIMATORS = {"coefficient_ratio": 0.3, "gradient_norm": 1e-3, "gradient_ratio": 1e-3}
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in NORMALISED_ROWS},
    **{
        f"{name}, {estimator}": {"algorithm": name, "normalisation": estimator, "threshold": threshold}
        for name in (*BARE_ROWS, "so_grpo")
        for estimator, threshold in ESTIMATORS.items()
    },
    "own critic, activations made again": {"critic": "own", "gradient_checkpointing": True},
    "clipped gradient norm": {"max_grad_norm": 0.05},
    "turn_mean, KL in the reward": {"reduction": "turn_mean", "kl_reward_coef": 0.1},
    "turn_gae, KL in the loss": {"advantages": "turn_gae", "kl_loss_coef": 0.1},
    "no action tokens on the second rank": {"weight_decay": 0.1},
    "adapters, KL in the loss": {"lora_rank": 2, "kl_loss_coef": 0.1},
    "adapters, own critic, gradient_norm": {
        "lora_rank": 2, "critic": "own", "normalisation": "gradient_norm", "threshold": 1e-3,
        "gradient_checkpointing": True,
    },
}  # fmt: skip
SHARDINGS = ("ddp", "fsdp2")
RUNS: dict[str, dict[str, Any]] = {
    "own critic": {"critic": "own", "normalisation": "gradient_norm"},
    "adapters": {"lora_rank": 2, "lora_targets": "q_proj,v_proj", "critic": "own", "kl_reward_coef": 0.1},
}
EPISODES = 8


def model_of(seed: int) -> Any:
    return tiny_language_model(300, hidden_size=16, layers=1, heads=2, intermediate_size=32, seed=seed).double()


def learner_of(config: TrainConfig) -> Learner:
    torch.manual_seed(0)
    policy, critic = make_policy_and_critic(
        model_of(0),
        critic=config.critic if config.algorithm_row().needs_critic else "none",
        checkpointing=config.gradient_checkpointing,
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_targets=config.lora_targets,
    )
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    reference = Policy(model_of(1)) if config.needs_reference and not config.lora_rank else None
    return make_learner(config, policy.double(), critic=critic and critic.double(), reference=reference)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{part}.{key}": whole(value.detach()).clone()
        for part, module in learner.modules().items()
        for key, value in module.state_dict().items()
        if "lm_head" not in key  # tied to the embeddings
    }


def step(name: str, run_dir: Path, rank: int, ranks: int, sharding: Any = "ddp") -> dict[str, Tensor]:
    """The setting's step: policy (and critic) weights, and what was reported of factor and norms."""
    rows = slice(rank * EPISODES // ranks, (rank + 1) * EPISODES // ranks)
    settings = {"max_grad_norm": 1e6} | SETTINGS[name]  # clipping the norm would hide a wrong factor
    config = small_config(run_dir, minibatch_sequences=EPISODES, sharding=sharding, **settings)
    learner = learner_of(config)
    # Padded as one batch and cut afterwards, so that every rank sees the noise of its own rows.
    whole_batch = collate(made_up(EPISODES, seed=5, reward=lambda row: float(row % 3)), 0)
    noise = torch.randn(whole_batch.token_ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = 1.5 * (noise - noise[:, :1].abs()) * whole_batch.loss_mask
    if name.startswith("no action tokens"):
        silent = torch.arange(EPISODES)[:, None] >= EPISODES // 2
        whole_batch = whole_batch.replace(
            loss_mask=whole_batch.loss_mask & ~silent, turn_ids=whole_batch.turn_ids.masked_fill(silent, -1)
        )
    batch = whole_batch.rows(rows)
    batch = batch.replace(rewards=batch.rewards.double(), rollout_logp=batch.rollout_logp.double())
    batch, _ = score(batch, learner.policy, critic=learner.critic, reference=learner.reference, microbatch_sequences=2)
    batch = estimate_advantages(batch, learner.algorithm, config)
    assert batch.old_logp is not None and batch.advantages is not None
    noise = noise[rows, : batch.token_ids.shape[1]]
    if "gradient_" in name:  # every second row clipped all over: above where A > 0, below where A < 0
        rows_clipped = torch.arange(EPISODES)[rows, None] % 2 == 0
        noise = torch.where(rows_clipped, -3 * noise.abs() * batch.advantages.sign(), noise)
    batch = batch.replace(old_logp=batch.old_logp + noise)
    totals = optimiser_step(learner, batch, update=0)
    found = weights_of(learner)
    return found | {key: value.detach().double() for key, value in totals.items() if key.startswith("step/")}


class ShareSource:
    """This rank's half of fixed rollout batches."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rows = slice(rank * EPISODES // ranks, (rank + 1) * EPISODES // ranks)
        self.version, self.published = 0, 0.0

    def publish(self, policy: Any, version: int) -> None:
        self.version = version
        self.published = sum(float(value.abs().sum()) for _, value in full_weights(policy))

    def __next__(self) -> list[Trajectory]:
        return made_up(EPISODES, seed=self.version, reward=lambda row: float(row % 3))[self.rows]


def run(name: str, run_dir: Path, rank: int, ranks: int, sharding: Any, updates: int) -> Learner:
    """A short run over fixed episodes, made anew as a new process would; one minibatch an update."""
    config = small_config(
        run_dir, minibatch_sequences=EPISODES, sharding=sharding, updates=updates, keep_checkpoints=9, **RUNS[name]
    )
    learner = learner_of(config)
    train(config, learner, ShareSource(rank, ranks), pad_id=0)
    return learner


def main(output: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # rewards too: the run must be exact
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {}
    for sharding in SHARDINGS:
        with TemporaryDirectory() as scratch:
            for name in SETTINGS:
                for key, value in step(name, Path(scratch), rank, ranks, sharding).items():
                    results[f"{sharding}|{name}|{key}"] = value.clone()
        for name in RUNS:
            for kind, stops in (("straight", (2,)), ("resumed", (1, 2))):
                for updates in stops:
                    learner = run(name, Path(folder) / f"{sharding}-{name}-{kind}", rank, ranks, sharding, updates)
                for key, value in weights_of(learner).items():
                    results[f"run|{sharding}-{name}-{kind}|{key}"] = value.clone()
    save_file(results, f"{output}.{rank}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
