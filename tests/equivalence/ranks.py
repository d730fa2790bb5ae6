"""One optimiser step on this rank's part of a fixed minibatch: `python -m tests.equivalence.ranks OUTPUT`.

RANK and WORLD_SIZE say which part. Rank r writes the weights after the step, and the scaled gradient norm and factor
that it saw, to OUTPUT.r, for every setting. Everything is in float64: a difference is a mistake, not rounding.
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
from sorl_algos.learner import make_learner
from sorl_algos.models import Critic, Policy, score
from sorl_algos.tiny import tiny_language_model
from sorl_algos.trainer import estimate_advantages, optimiser_step
from tests.sorl_algos.small_game import made_up, small_config

ROWS = (
    "ppo", "turn_ppo", "s_ppo", "so_ppo", "grpo", "s_grpo", "so_grpo", "gspo", "rloo", "dr_grpo", "cispo",
    "reinforce",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ROWS},
    "own critic": {"critic": "own"},
    "gradient_norm": {"normalisation": "gradient_norm", "level": "token"},
    "gradient_ratio": {"normalisation": "gradient_ratio", "level": "token"},
    "clipped gradient norm": {"max_grad_norm": 0.05},
    "turn_mean, KL in the reward": {"reduction": "turn_mean", "kl_reward_coef": 0.1},
    "turn_gae, KL in the loss": {"advantages": "turn_gae", "kl_loss_coef": 0.1},
    "no action tokens on the second rank": {"weight_decay": 0.1},
}
EPISODES = 8


def model_of(seed: int) -> Any:
    return tiny_language_model(300, hidden_size=32, layers=2, heads=4, intermediate_size=64, seed=seed)


def step(name: str, run_dir: Path, rank: int, ranks: int) -> dict[str, Tensor]:
    """The setting's step: policy (and critic) weights, and what was reported of factor and norms."""
    rows = slice(rank * EPISODES // ranks, (rank + 1) * EPISODES // ranks)
    settings = {"max_grad_norm": 1e6} | SETTINGS[name]  # clipping the norm would hide a wrong factor
    config = small_config(run_dir, minibatch_sequences=EPISODES // ranks, questions_per_update=4, **settings)
    needs_critic = config.algorithm_row().needs_critic
    torch.manual_seed(0)
    policy = Policy(model_of(0), shared_critic=needs_critic and config.critic == "shared")
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    critic = Critic(policy.lm).double() if config.critic == "own" else None
    reference = Policy(model_of(1)).double() if config.kl_reward_coef or config.kl_loss_coef else None
    learner = make_learner(config, policy.double(), critic=critic, reference=reference)

    # Padded as one batch and cut afterwards, so that every rank sees the noise of its own rows.
    whole = collate(made_up(EPISODES, seed=5, reward=lambda row: float(row % 3)), 0)
    noise = torch.randn(whole.token_ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = 1.5 * (noise - noise[:, :1].abs()) * whole.loss_mask
    if name.startswith("no action tokens"):
        silent = torch.arange(EPISODES)[:, None] >= EPISODES // 2
        whole = whole.replace(loss_mask=whole.loss_mask & ~silent, turn_ids=whole.turn_ids.masked_fill(silent, -1))
    batch = whole.replace(rewards=whole.rewards.double(), rollout_logp=whole.rollout_logp.double()).rows(rows)
    batch, _ = score(batch, learner.policy, critic=learner.critic, reference=learner.reference, microbatch_sequences=2)
    batch = estimate_advantages(batch, learner.algorithm, config)
    assert batch.old_logp is not None and batch.advantages is not None
    noise = noise[rows, : batch.token_ids.shape[1]]
    if name.startswith("gradient"):  # most tokens clipped: above where A > 0, below where A < 0
        noise = torch.where(noise < 0.5, -2 * noise.abs() * batch.advantages.sign(), noise)
    batch = batch.replace(old_logp=batch.old_logp + noise)
    totals = optimiser_step(learner, batch, update=0)
    found = {
        f"{part}.{key}": value.detach().clone()
        for part, module in learner.modules().items()
        for key, value in module.state_dict().items()
        if "lm_head" not in key  # tied to the embeddings
    }
    return found | {key: value.detach().double() for key, value in totals.items() if key.startswith("step/")}


def main(output: str) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {}
    with TemporaryDirectory() as folder:
        for name in SETTINGS:
            for key, value in step(name, Path(folder), rank, ranks).items():
                results[f"{name}|{key}"] = value.contiguous()
    save_file(results, f"{output}.{rank}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
