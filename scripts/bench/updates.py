"""One update of ours on a fixed rollout batch, made for timing: episodes of random tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_algos.algorithms import algorithm
from sorl_algos.batch import Batch, collate
from sorl_algos.config import TrainConfig
from sorl_algos.diagnostics import update_metrics
from sorl_algos.learner import Learner, make_learner
from sorl_algos.minibatching import minibatches
from sorl_algos.models import Policy, load_language_model, score
from sorl_algos.totals import add_totals
from sorl_algos.trainer import estimate_advantages, optimiser_step
from sorl_env.trajectory import Trajectory, Turn

PAD = 0
OldLogp = Callable[[Batch], Tensor]


def episodes(
    count: int, *, group_size: int, turns: int, observation: int, action: int, vocabulary: int, seed: int = 0
) -> list[Trajectory]:
    """Episodes of random tokens. ``observation`` and ``action`` are mean lengths; they vary by half either way."""
    generator = torch.Generator().manual_seed(seed)

    def ids(mean: int) -> tuple[int, ...]:
        length = int(torch.randint(mean // 2, mean + mean // 2 + 1, (), generator=generator))
        return tuple(torch.randint(4, vocabulary, (length,), generator=generator).tolist())

    made = []
    for row in range(count):
        reward = float(torch.rand((), generator=generator) < 0.5)
        played = []
        for number in range(turns):
            said = ids(action)
            earned = reward if number == turns - 1 else 0.0
            played.append(Turn(ids(observation), said, (0.0,) * len(said), earned, "", ""))
        made.append(Trajectory(tuple(played), f"q{row}", row // group_size, 0, "answered", {}))
    return made


def learner_of(model: str, items: list[Trajectory], *, group_size: int, microbatch: int, **changes: Any) -> Learner:
    """A learner whose update is two minibatches of half of the episodes each; it hardly moves (lr 1e-9)."""
    language_model, _ = load_language_model(model)
    settings: dict[str, Any] = {
        "run_dir": Path(tempfile.gettempdir()) / "bench_update",
        "questions_per_update": len(items) // group_size,
        "group_size": group_size,
        "minibatch_sequences": len(items) // 2,
        "microbatch_sequences": microbatch,
        "lr": 1e-9,
        "critic_lr": 1e-9,
        "critic_warmup_updates": 0,
        "max_turn_tokens": 512,
        "max_total_tokens": 4096,
    }
    config = TrainConfig(**settings | changes)
    return make_learner(config, Policy(language_model, shared_critic=config.algorithm_row().needs_critic))


def update(learner: Learner, batch: Batch, old_logp: OldLogp | None = None) -> dict[str, float]:
    """Log-probabilities, advantages, losses, backward and steps of one update; returns what is logged of it.

    old_logp: made of the scored batch, in place of the policy's own, so that ratios differ from 1.
    """
    config = learner.config
    scored, entropy = score(
        batch,
        learner.policy,
        microbatch_sequences=config.microbatch_sequences,
        temperature=config.temperature,
    )
    if old_logp is not None:
        scored = scored.replace(old_logp=old_logp(scored))
    scored = estimate_advantages(scored, learner.algorithm, config)
    totals: dict[str, Tensor] = {}
    for minibatch in minibatches(scored, config, 0):
        add_totals(totals, optimiser_step(learner, minibatch, 0))
    return update_metrics(scored, entropy, totals)


def clipped_share(
    learner: Learner, batch: Batch, *, share: float, by: str, within: float = 1.0, seed: int = 0
) -> OldLogp:
    """Old log-probabilities under which the loss's clip is active on ``share`` of the action tokens.

    by: "turn" moves whole turns, "token" each token alone. within: share of the sequences that hold moved tokens (1
    scatters single tokens over nearly all of them). Moved ones have ratios of 3 or 1/3, where the clip acts.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, columns = batch.loss_mask.shape
    if by == "turn":
        lot = torch.rand(rows, 64, generator=generator)
        draw = lot.gather(1, batch.turn_ids.clamp(min=0))
    else:
        draw = torch.rand(rows, columns, generator=generator)
    draw[torch.randperm(rows, generator=generator)[round(within * rows) :]] = 2.0
    level = draw[batch.loss_mask].quantile(share)
    chosen = (draw <= level) & batch.loss_mask

    def made(scored: Batch) -> Tensor:
        assert scored.old_logp is not None
        judged = estimate_advantages(scored, learner.algorithm, learner.config)
        assert judged.advantages is not None
        sign = torch.where(judged.advantages >= 0, 1.0, -1.0)
        if by == "turn":  # one sign for the whole turn: that of its first token
            first = torch.zeros(rows, 64).scatter(1, batch.turn_ids.clamp(min=0).flip(1), sign.flip(1))
            sign = first.gather(1, batch.turn_ids.clamp(min=0))
        return scored.old_logp - torch.where(chosen, sign * 1.0986, 0.0)  # ln 3

    return made


def batch_of(items: list[Trajectory]) -> Batch:
    return collate(items, PAD)


def rows_with_clips(learner: Learner, batch: Batch, old_logp: OldLogp) -> float:
    """Share of the sequences in which the loss's clip is active on at least one token."""
    scored, _ = score(batch, learner.policy, microbatch_sequences=8)
    now = scored.old_logp
    scored = estimate_advantages(scored.replace(old_logp=old_logp(scored)), learner.algorithm, learner.config)
    assert now is not None and scored.old_logp is not None and scored.advantages is not None
    out = algorithm(learner.config.algorithm, level=learner.algorithm.level, normalisation="none").policy_loss(
        now, scored.old_logp, scored.advantages, batch.loss_mask, batch.turn_ids, clip_low=0.2, clip_high=0.2
    )
    return float((out.clip_excess != 0).any(dim=1).float().mean())
