"""Supervised warm start: the policy learns to imitate demonstrations, on their action tokens only."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from sorl_algos.batch import Batch, collate
from sorl_algos.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from sorl_algos.models import Policy, token_logprobs
from sorl_env.trajectory import Trajectory


def supervised(
    policy: Policy,
    trajectories: Sequence[Trajectory] | Callable[[int], Sequence[Trajectory]],
    *,
    steps: int,
    batch_sequences: int,
    lr: float,
    pad_id: int,
    seed: int,
    observation_share: float = 0.0,
    warmup_fraction: float = 0.05,
    max_grad_norm: float = 1.0,
    weight_decay: float = 0.0,
    autocast_dtype: torch.dtype | None = None,
    on_step: Callable[[int, float], None] | None = None,
    checkpoints: Path | None = None,
    save_every: int = 200,
) -> list[float]:
    """AdamW with linear warm-up and cosine decay to a tenth; returns the loss of each step (nats a token).

    Args:
        trajectories: what is learnt, gone through in a fresh order again and again; or a function that makes the
            trajectories of pass 0, 1, 2 ..., so that only one pass of them is held in memory.
        observation_share: share of the observation tokens, drawn anew each step, that is learnt too (0: imitation
            of the actions alone; 1: plain language modelling of the episode).
        autocast_dtype: bfloat16 halves the time where the processor has it; weights stay in fp32.
        checkpoints: a directory; every ``save_every`` steps go there, and a run found there is resumed exactly.
    """
    optimizer = torch.optim.AdamW(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        lr=lr,
        betas=(0.9, 0.98),
        weight_decay=weight_decay,
    )
    device = next(policy.parameters()).device
    losses: list[float] = []
    batches = _length_batches(trajectories, batch_sequences, seed)
    found = latest_checkpoint(checkpoints) if checkpoints is not None else None
    if found is not None:
        state = load_checkpoint(found, modules={"policy": policy}, optimizers={"policy": optimizer})
        losses = state["losses"]
        if len(losses) < steps:
            for _ in losses:
                next(batches)
    for step in range(len(losses), steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * _cosine_with_warmup(step, steps, warmup_fraction)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        batch = collate(next(batches), pad_id)
        learnt = batch.loss_mask | (
            batch.attention_mask & (torch.rand(batch.loss_mask.shape, generator=generator) < observation_share)
        )
        learnt[:, 0] = False
        with plain_attention(policy):
            loss = supervised_loss(policy, batch.replace(loss_mask=learnt).to(device), autocast_dtype)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if on_step:
            on_step(step, losses[-1])
        if checkpoints is not None and ((step + 1) % save_every == 0 or step + 1 == steps):
            save_checkpoint(
                checkpoints,
                step + 1,
                modules={"policy": policy},
                optimizers={"policy": optimizer},
                state={"losses": losses},
                keep=1,
            )
    return losses


@contextmanager
def plain_attention(policy: Policy) -> Iterator[None]:
    """On processors the fused attention's backward in half precision costs a quarter of the step at a few hundred
    tokens; plain matrix products do not. For imitation alone: in reinforcement learning old and new log-probabilities
    must come from one function to the last bit, with gradient or without."""
    half = policy.trunk.compute_dtype not in (None, torch.float32)
    if not half or policy.trunk.checkpointing or next(policy.parameters()).device.type != "cpu":
        yield
        return
    model = policy.lm.base_model
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


def supervised_loss(policy: Policy, batch: Batch, autocast_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Mean negative log-likelihood of the tokens under the loss mask, nats a token (0-d)."""
    device = batch.token_ids.device.type
    with torch.autocast(device, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        logp = token_logprobs(policy, batch).logp
    return -logp.sum() / batch.loss_mask.sum().clamp(min=1)


def _cosine_with_warmup(step: int, steps: int, warmup_fraction: float) -> float:
    warmup = max(1, round(steps * warmup_fraction))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _length_batches(
    source: Sequence[Trajectory] | Callable[[int], Sequence[Trajectory]], size: int, seed: int
) -> Iterator[list[Trajectory]]:
    """Endless shuffled batches of like length: shuffled, then sorted within stretches of 16 batches."""
    rng = random.Random(seed)
    for number in itertools.count():
        trajectories = source(number) if callable(source) else source
        if not trajectories:
            raise ValueError("no demonstrations to learn from; were all of them filtered out?")
        order = rng.sample(range(len(trajectories)), len(trajectories))
        batches = []
        for start in range(0, len(order), 16 * size):
            stretch = sorted(order[start : start + 16 * size], key=lambda row: _length(trajectories[row]))
            batches += [stretch[place : place + size] for place in range(0, len(stretch), size)]
        rng.shuffle(batches)
        for rows in batches:
            yield [trajectories[row] for row in rows]


def _length(trajectory: Trajectory) -> int:
    return sum(len(turn.observation_ids) + len(turn.action_ids) for turn in trajectory.turns)
