"""Advantage estimators: plain functions of tensors, without gradient, that need torch and nothing else.

All (B, T) tensors are aligned with `token_ids`; `values[:, t]` is the value of the state before token t.
Rewards off the mask are ignored: a turn's reward sits on the turn's last action token. An episode that ends
has no value after it, whether it terminated or ran out of turns (the turn budget is part of the task);
`bootstrap` overrides that.
"""

from typing import Literal

import torch
from torch import Tensor

from sorl_algos.losses.kl import kl_per_token
from sorl_algos.losses.segments import at_least_float32, masked, segment_ids_of, segment_sum

GroupScale = Literal["std", "none"]
GROUP_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
    cross_observations: bool = False,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (arXiv 1506.02438) over action tokens: (advantages, returns), both (B,
    T).

    Observation tokens are stepped over: the next state of a turn's last token is the next turn's first, one
    discount further. Both results are 0 off the mask.

    bootstrap: (B,) value after the last action token; None is 0.
    cross_observations: Search-R1's legacy form, for comparisons only: every token from the first to the last
    action
        counts as a step, so credit runs through retrieved tokens and the results are not 0 on them.
    """
    on = mask.to(torch.bool)
    if cross_observations:
        on = _span(on)
    rewards, values = masked(rewards, mask), masked(values, on)
    order = torch.argsort(~on, dim=1, stable=True)  # action tokens to the front, in their order
    here = on.gather(1, order)
    reward, value = rewards.gather(1, order), values.gather(1, order)
    after = torch.nn.functional.pad(value, (0, 1))
    if bootstrap is not None:
        end = here.sum(dim=1, keepdim=True)
        after = after.scatter(1, end, at_least_float32(bootstrap).to(after.dtype).unsqueeze(1))
    delta = torch.where(here, reward + gamma * after[:, 1:] - value, 0.0)
    compact = torch.where(here, _discounted_sum(delta, gamma * lam), 0.0)
    advantages = torch.zeros_like(compact).scatter(1, order, compact)
    return advantages, advantages + values


@torch.no_grad()
def turn_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE with one step per turn, broadcast over the turn's action tokens: (advantages, returns), both (B,
    T).

    A turn's reward is the sum over its tokens; its value is the critic's at its first action token, the state
    in which the turn is chosen. gamma and lam discount per turn.
    """
    on = mask.to(torch.bool)
    ids = segment_ids_of(on, turn_ids, "turn")
    first = on & (ids != torch.nn.functional.pad(ids, (1, 0), value=-1)[:, :-1])
    turn_rewards = segment_sum(masked(rewards, on), ids)
    advantages, returns = gae(turn_rewards, values, first, gamma=gamma, lam=lam, bootstrap=bootstrap)
    return segment_sum(advantages, ids), segment_sum(returns, ids)


@torch.no_grad()
def reward_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each action token on: (B, T), 0 off the mask."""
    return gae(rewards, torch.zeros_like(at_least_float32(rewards)), mask, gamma=gamma, lam=1.0)[0]


@torch.no_grad()
def group_advantages(returns: Tensor, group_ids: Tensor, *, scale: GroupScale) -> Tensor:
    """Return minus the group's mean: (B,). scale="std": GRPO (arXiv 2402.03300); "none": Dr. GRPO
    (2503.20783).

    returns: (B,) one per episode; group_ids: (B,) whole numbers, in any order. "std" divides by the sample
    standard deviation + 1e-6. A group whose returns are all equal gets exactly 0, and so does a group of one:
    with nothing to compare, nothing is learnt from it (ask for at least 2 episodes per question).
    """
    if scale not in ("std", "none"):
        raise ValueError(f"unknown group scale {scale!r}; known: std, none")
    returns = at_least_float32(returns)
    total, size, group = _group_sums(returns, group_ids)
    centred = returns - (total / size)[group]
    # equal returns can still differ from their rounded mean; a tiny deviation would blow that noise up
    lowest = _group_extreme(returns, group, total, "amin")
    highest = _group_extreme(returns, group, total, "amax")
    centred = torch.where((lowest == highest)[group], 0.0, centred)
    if scale == "none":
        return centred
    squares = torch.zeros_like(total).index_add(0, group, centred.square())
    deviation = (squares / (size - 1).clamp(min=1)).sqrt()
    return centred / (deviation[group] + GROUP_EPSILON)


@torch.no_grad()
def leave_one_out(returns: Tensor, group_ids: Tensor) -> Tensor:
    """Return minus the mean of the other returns of the group (RLOO, arXiv 2402.14740): (B,).

    A group of one has no baseline and gets 0, as in `group_advantages`.
    """
    centred = group_advantages(returns, group_ids, scale="none")
    _, size, group = _group_sums(centred, group_ids)
    return centred * (size / (size - 1).clamp(min=1))[group]


@torch.no_grad()
def whiten_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares over action tokens: (3,) float64, additive over ranks; see `whiten`."""
    x = masked(x, mask).double()
    return torch.stack([mask.to(torch.bool).sum().double(), x.sum(), x.square().sum()])


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, sums: Tensor | None = None) -> Tensor:
    """Shift and scale to mean 0 and sample variance 1 over action tokens: (B, T), 0 off the mask.

    sums: `whiten_sums` of the whole batch over all ranks; None takes those of `x`. A single token, or equal
    tokens, become 0.
    """
    x = masked(x, mask)
    count, total, squares = (whiten_sums(x, mask) if sums is None else sums).unbind()
    mean = total / count.clamp(min=1.0)
    variance = ((squares - mean * total) / (count - 1.0).clamp(min=1.0)).clamp(min=0.0)
    whitened = (x.double() - mean) / (variance + WHITEN_EPSILON).sqrt()
    return masked(whitened.to(x.dtype), mask)


@torch.no_grad()
def last_action_index(mask: Tensor) -> Tensor:
    """Column of each row's last action token: (B,) long, -1 for a row without any."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask.to(torch.bool), columns, -1).amax(dim=1)


@torch.no_grad()
def place_outcome_reward(outcome: Tensor, mask: Tensor) -> Tensor:
    """Put each row's outcome (B,) on its last action token: (B, T); a row without action tokens stays 0."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = columns == last_action_index(mask).unsqueeze(1)
    return torch.where(last, at_least_float32(outcome).unsqueeze(1), 0.0)


@torch.no_grad()
def spread(per_sequence: Tensor, mask: Tensor) -> Tensor:
    """Give each action token its row's number: (B,) to (B, T), 0 off the mask."""
    return masked(per_sequence.unsqueeze(1).expand(mask.shape), mask)


@torch.no_grad()
def rewards_with_kl(
    rewards: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, *, coefficient: float, estimator: str = "k1"
) -> Tensor:
    """KL in the reward: rewards - coefficient KL on every action token, 0 off the mask.

    logp is the sampling policy's (old_logp): the penalty is a reward, constant during the update. estimator:
    "k1" (logp - ref_logp, whose mean gradient is right in a reward), "k2" or "k3".
    """
    return masked(rewards, mask) - coefficient * kl_per_token(logp, ref_logp, mask, estimator=estimator)


def _span(on: Tensor) -> Tensor:
    """True from the first to the last action token of each row, observations between them included."""
    started = on.long().cumsum(dim=1) > 0
    unfinished = on.flip(1).long().cumsum(dim=1).flip(1) > 0
    return started & unfinished


def _discounted_sum(x: Tensor, decay: float) -> Tensor:
    """sum over j >= 0 of decay^j x[:, t + j], by doubling: log2(T) tensor operations instead of T."""
    step = 1
    while step < x.shape[1]:
        x = x + decay**step * torch.nn.functional.pad(x[:, step:], (0, step))
        step *= 2
    return x


def _group_sums(returns: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum and size of each group, and the group's position for each row."""
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    total = returns.new_zeros(size.shape[0]).index_add(0, group, returns)
    return total, size.to(returns.dtype), group


def _group_extreme(returns: Tensor, group: Tensor, like: Tensor, how: str) -> Tensor:
    return torch.zeros_like(like).scatter_reduce(0, group, returns, how, include_self=False)
