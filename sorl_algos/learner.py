"""What learns: modules, their optimisers and learning rates, and the accelerator that places them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from sorl_algos.algorithms import Algorithm
from sorl_algos.config import TrainConfig


@dataclass
class Learner:
    """What learns: modules, their optimisers, and the accelerator that places them."""

    config: TrainConfig
    algorithm: Algorithm
    accelerator: Accelerator
    policy: nn.Module
    policy_optimizer: torch.optim.Optimizer
    critic: nn.Module | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    reference: nn.Module | None = None
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def raw_policy(self) -> Any:
        return self.accelerator.unwrap_model(self.policy)

    def modules(self) -> dict[str, nn.Module]:
        critic = {} if self.critic is None else {"critic": self.accelerator.unwrap_model(self.critic)}
        return {"policy": self.raw_policy, **critic}

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        critic = {} if self.critic_optimizer is None else {"critic": self.critic_optimizer}
        return {"policy": self.policy_optimizer, **critic}


def make_learner(
    config: TrainConfig,
    policy: Any,
    *,
    critic: nn.Module | None = None,
    reference: nn.Module | None = None,
) -> Learner:
    """Optimisers and placement. The value head of a shared critic has its own learning rate."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    groups = [{"params": [p for p in policy.lm.parameters() if p.requires_grad], "lr": config.lr, "name": "policy"}]
    if policy.value_head is not None:
        groups.append({"params": list(policy.value_head.parameters()), "lr": config.critic_lr, "name": "value"})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=config.weight_decay)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    critic_optimizer = None
    if critic is not None:
        critic_optimizer = torch.optim.AdamW(
            critic.parameters(), lr=config.critic_lr, betas=(0.9, 0.99), weight_decay=config.weight_decay
        )
        critic, critic_optimizer = accelerator.prepare(critic, critic_optimizer)
    if reference is not None:
        reference = reference.to(accelerator.device).requires_grad_(False)
    return Learner(
        config, config.algorithm_row(), accelerator, policy, optimizer, critic, critic_optimizer, reference
    )


def set_learning_rates(learner: Learner, update: int) -> None:
    """Linear warm-up of the policy's rate over the first updates in which it moves, then constant."""
    config = learner.config
    moving = update - (config.critic_warmup_updates if learner.algorithm.needs_critic else 0)
    share = min(1.0, (moving + 1) / (config.lr_warmup_updates + 1))
    for group in learner.policy_optimizer.param_groups:
        group["lr"] = config.critic_lr if group.get("name") == "value" else config.lr * max(share, 0.0)
