"""The fixed tensors and settings of the comparison."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CLIP_LOW, CLIP_HIGH, DUAL_CLIP, VALUE_CLIP = 0.2, 0.28, 3.0, 0.2
GAMMA, LAM, NORM_LENGTH, BETA = 0.97, 0.9, 16, 0.04
SETTINGS = {
    "clip_low": CLIP_LOW,
    "clip_high": CLIP_HIGH,
    "dual_clip": DUAL_CLIP,
    "value_clip": VALUE_CLIP,
    "gamma": GAMMA,
    "lam": LAM,
    "norm_length": NORM_LENGTH,
    "beta": BETA,
}


def fixed_tensors() -> dict[str, Tensor]:
    """Four rows of twelve columns: two or three turns, observations between, ratios on both sides of a clip."""
    generator = torch.Generator().manual_seed(20)

    def normal() -> Tensor:
        return torch.randn(4, 12, generator=generator, dtype=torch.float64)

    mask = torch.tensor(
        [
            [1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0],
            [1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1],
            [1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0],
        ],
        dtype=torch.float64,
    )
    old_logp = -normal().abs() - 0.1
    rewards = normal() * mask
    rewards[0] = rewards[2].roll(4)  # a second group with unlike returns
    logp, advantages = old_logp + normal(), normal()
    logp[1, 0], advantages[1, 0] = old_logp[1, 0] + 1.8, -1.0  # ratio 6 of a bad action: past the dual clip
    return {
        "mask": mask,
        "old_logp": old_logp,
        "logp": logp,
        "ref_logp": old_logp + 0.3 * normal(),
        "advantages": advantages,
        "sequence_advantages": normal()[:, :1].expand(4, 12).contiguous(),
        "rewards": rewards * mask,
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "group_ids": torch.tensor([0, 0, 0, 5], dtype=torch.float64),
    }


def with_gradient(loss_of: Callable[[Tensor], Tensor], at: Tensor) -> dict[str, Any]:
    """Loss at a leaf and its gradient there."""
    leaf = at.clone().requires_grad_()
    loss = loss_of(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"loss": loss.item(), "gradient": gradient.tolist()}
