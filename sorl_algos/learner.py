"""What learns: modules, their optimisers and learning rates, and how they are placed on one rank or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sorl_algos.algorithms import Algorithm
from sorl_algos.config import TrainConfig
from sorl_algos.distributed import world_size
from sorl_algos.models import BaseReference, TokenScores
from sorl_algos.schedules import rate_share
from sorl_algos.sharding import shard


@dataclass
class Learner:
    """What learns: modules, their optimisers, and the accelerator that places them.

    ``sharded``: each rank holds its share of the weights (FSDP2); else it holds all of them, and several ranks run
    data-parallel. ``policy_parameters`` are what the policy loss moves, ``value_parameters`` what the value loss moves.
    """

    config: TrainConfig
    algorithm: Algorithm
    accelerator: Accelerator
    policy: nn.Module
    policy_optimizer: torch.optim.Optimizer
    policy_parameters: list[nn.Parameter]
    value_parameters: list[nn.Parameter]
    critic: nn.Module | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    reference: Callable[..., TokenScores] | None = None
    sharded: bool = False
    kl_scale: float = 1.0
    """Steers the coefficients of the KL to the reference."""

    @property
    def raw_policy(self) -> Any:
        return self.accelerator.unwrap_model(self.policy)

    def modules(self) -> dict[str, nn.Module]:
        critic = {} if self.critic is None else {"critic": self.accelerator.unwrap_model(self.critic)}
        return {"policy": self.raw_policy, **critic}

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        critic = {} if self.critic_optimizer is None else {"critic": self.critic_optimizer}
        return {"policy": self.policy_optimizer, **critic}

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around the backward of one of several micro-batches: gradients are summed over ranks at the last one.

        Where weights are split, at each: no rank has room for whole gradients.
        """
        return nullcontext() if last or self.sharded else self.accelerator.no_sync(self.policy)


    @contextmanager
    def scaled_rate(self, factor: Tensor | None) -> Iterator[None]:
        """Within, the policy's own learning rate is multiplied by a 0-d factor; the critic's is not. None: as it is."""
        groups = [group for group in self.policy_optimizer.param_groups if group.get("name") != "value"]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate if factor is None else rate * float(factor)
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def make_learner(
    config: TrainConfig,
    policy: Any,
    *,
    critic: nn.Module | None = None,
    reference: Any = None,
) -> Learner:
    """Optimisers and placement. The value head of a shared critic has its own learning rate.

    A policy with adapters is its own reference. The modules must start out the same on every rank.

    Raises:
        ValueError: the settings do not divide among the ranks.
    """
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    _check_split(config)
    sharded = world_size() > 1 and sharding_of(config) == "fsdp2"
    if sharded:
        dtype = policy.trunk.compute_dtype
        shard(policy, device=accelerator.device, compute_dtype=dtype)
        if critic is not None:
            shard(critic, device=accelerator.device, compute_dtype=dtype)
    policy_parameters, value_parameters = policy.policy_parameters(), policy.value_parameters()
    groups: list[dict[str, Any]] = [{"params": policy_parameters, "lr": config.lr, "name": "policy"}]
    if value_parameters:
        groups.append({"params": value_parameters, "lr": config.critic_lr, "name": "value"})
    adam: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": config.weight_decay}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **adam)
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, weight_decay=config.weight_decay)
    critic_optimizer = None
    if critic is not None:
        value_parameters = value_parameters + list(critic.parameters())
        critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=config.critic_lr, **adam)
    if not sharded:
        policy, optimizer = accelerator.prepare(policy, optimizer)
        if critic is not None:
            critic, critic_optimizer = accelerator.prepare(critic, critic_optimizer)
    if reference is not None:
        reference = reference.requires_grad_(False)
        if sharded:
            shard(reference, device=accelerator.device, compute_dtype=reference.trunk.compute_dtype)
        else:
            reference = reference.to(accelerator.device)
    elif config.needs_reference and accelerator.unwrap_model(policy).adapters is not None:
        reference = BaseReference(policy)
    return Learner(
        config, config.algorithm_row(), accelerator, policy, optimizer, policy_parameters, value_parameters,
        critic, critic_optimizer, reference, sharded,
    )  # fmt: skip


def sharding_of(config: TrainConfig) -> str:
    """ "ddp" or "fsdp2": the setting, or what `accelerate launch` was told."""
    if config.sharding != "auto":
        return config.sharding
    return "fsdp2" if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" else "ddp"


def _check_split(config: TrainConfig) -> None:
    ranks = world_size()
    if config.questions_per_update % ranks:
        raise ValueError(
            f"questions_per_update ({config.questions_per_update}) cannot be shared by {ranks} ranks; choose a multiple"
        )


def set_learning_rates(learner: Learner, update: int) -> None:
    """The policy's rate follows the schedule from the first update in which it moves; the critic's is constant."""
    config = learner.config
    alone = config.critic_warmup_updates if learner.algorithm.needs_critic else 0
    share = rate_share(
        update - alone,
        schedule=config.lr_schedule,
        warmup_updates=config.lr_warmup_updates,
        total_updates=config.updates - alone,
        final_share=config.lr_final_share,
    )
    for group in learner.policy_optimizer.param_groups:
        group["lr"] = config.critic_lr if group.get("name") == "value" else config.lr * share
