"""Instruments of a run: what is logged of rollouts and updates, in the glossary's words.

A name that ends in ``_turn/2`` is the quantity on turn index 2 (the third turn) of the episodes; turns from index
`TURN_SLOTS` - 1 on share the last. Nothing here waits for the device but the one transfer at the end of an update.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sorl_algos.batch import Batch
from sorl_algos.distributed import all_sum
from sorl_algos.losses.corrections import effective_sample_size, mismatch_by_turn
from sorl_algos.losses.policy import LossOutput, clip_fractions
from sorl_algos.losses.segments import RATIO_LEVELS, masked, token_log_ratio
from sorl_algos.losses.value import explained_variance
from sorl_env.trajectory import Trajectory

TURN_SLOTS = 8
NGRAM = 4
LOOP_TOKENS = 12
"""A turn of at least this many tokens loops when more than half of its n-grams have occurred in it before."""
_TAG = re.compile(r"<(/?)(think|search|answer|information|tool_call|tool_response)>")
_WRITTEN_BY_ENVIRONMENT = ("information", "tool_response")


# Rollouts


def rollout_metrics(
    trajectories: Sequence[Trajectory], kept: Sequence[Trajectory], device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Means over the episodes of a rollout batch (those kept for training), and how many were dropped, of all ranks.

    Rates of validity, tags and loops are shares of all turns; ``tag_fault_rate`` counts turns with any fault of
    `tag_faults` or without a valid action. ``device``: where ranks meet.
    """
    turns = [(min(number, TURN_SLOTS - 1), turn) for item in kept for number, turn in enumerate(item.turns)]
    kinds = [note["action_kind"] for item in kept for note in item.info["turns"]]
    valid = [kind in ("search", "answer") for kind in kinds]
    faults = [tag_faults(turn.action_text) for _, turn in turns]
    repeated = [repetition(turn.action_ids) for _, turn in turns]
    loops = [
        share > 0.5 and len(turn.action_ids) >= LOOP_TOKENS for share, (_, turn) in zip(repeated, turns, strict=True)
    ]
    wrong = [bool(found) or not good for found, good in zip(faults, valid, strict=True)]
    lengths = [len(turn.action_ids) for _, turn in turns]
    of_episodes = {
        "reward_mean": sum(turn.reward for _, turn in turns),
        "em_train": sum(item.info["scores"].get("exact_match", 0.0) for item in kept),
        "searches_mean": sum(item.info["searches"] for item in kept),
        "turns_mean": len(turns),
        "response_tokens_mean": sum(lengths),
        "truncated_rate": sum(item.stop != "answered" for item in kept),
    }
    of_turns = {
        "valid_action_rate": sum(valid),
        "tag_fault_rate": sum(wrong),
        "tag_unbalanced_rate": sum("unbalanced" in found for found in faults),
        "tag_repeated_rate": sum("repeated" in found for found in faults),
        "tag_forged_rate": sum("forged" in found for found in faults),
        "loop_rate": sum(loops),
        "repetition_mean": sum(repeated),
        "cut_rate": sum(turn.truncated for _, turn in turns),
    }
    plain = {
        "dropped_episodes": len(trajectories) - len(kept),
        "tokens": sum(len(turn.action_ids) + len(turn.observation_ids) for _, turn in turns),
    }
    by_turn: dict[str, Sequence[float]] = {
        "response_tokens": lengths, "valid_action_rate": valid, "tag_fault_rate": wrong
    }  # fmt: skip
    slots = [[0.0] * TURN_SLOTS for _ in range(1 + len(by_turn))]
    for place, (slot, _) in enumerate(turns):
        for row, value in zip(slots, (1, *(of[place] for of in by_turn.values())), strict=True):
            row[slot] += value
    single = [len(kept), len(turns), *of_episodes.values(), *of_turns.values(), *plain.values()]
    sums = torch.tensor([*single, *chain(*slots)], dtype=torch.float64, device=device)
    episodes, count, *rest = all_sum(sums).tolist()
    names = [*of_episodes, *of_turns, *plain]
    divisors = [max(episodes, 1)] * len(of_episodes) + [max(count, 1)] * len(of_turns) + [1] * len(plain)
    found = {name: value / over for name, value, over in zip(names, rest, divisors, strict=False)}
    there, *columns = (rest[start : start + TURN_SLOTS] for start in range(len(names), len(rest), TURN_SLOTS))
    for name, column in zip(by_turn, columns, strict=True):
        found |= {f"{name}_turn/{slot}": value / there[slot] for slot, value in enumerate(column) if there[slot]}
    return found


def tag_faults(text: str) -> frozenset[str]:
    """What is wrong with the tags of one turn's action text; empty for a healthy turn.

    "unbalanced": a tag is closed that is not open, opened inside another, or never closed (inside ``<think>`` only its
    own closing tag counts: the rest is thought). "repeated": more than one complete ``<search>``, ``<answer>`` or
    ``<tool_call>`` element. "forged": a tag that only the environment may write. A turn without any tag has none of
    these: whether it holds an action is the environment's to say.
    """
    found: set[str] = set()
    opened: str | None = None
    elements = 0
    for tag in _TAG.finditer(text):
        slash, name = tag.groups()
        if opened == "think" and (name, slash) != ("think", "/"):
            continue
        if name in _WRITTEN_BY_ENVIRONMENT:
            found.add("forged")
        if not slash:
            if opened is not None:
                found.add("unbalanced")
            opened = name
        elif opened != name:
            found.add("unbalanced")
            opened = None
        else:
            elements += name != "think" and name not in _WRITTEN_BY_ENVIRONMENT
            opened = None
    if opened is not None:
        found.add("unbalanced")
    if elements > 1:
        found.add("repeated")
    return frozenset(found)


def repetition(ids: Sequence[int], size: int = NGRAM) -> float:
    """Share of the n-grams that occurred earlier in the turn: 0 if all differ (or too short), towards 1 in a loop."""
    grams = list(zip(*(ids[start:] for start in range(size)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


# Updates


@torch.no_grad()
def update_sums(
    logp: Tensor, micro: Batch, out: LossOutput, *, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Counts of a micro-batch for the log: sums over its tokens, that add up over micro-batches.

    The clip at all three ratio levels (0-d), whatever the algorithm's own; and by turn index, `(TURN_SLOTS,)` each:
    tokens, tokens from which the loss's own clip took something, ratio of the loss's level, its square, and KL.
    ``max_`` names combine by maximum.
    """
    assert micro.old_logp is not None
    on = micro.loss_mask
    counts = clip_fractions(
        logp,
        micro.old_logp,
        on,
        micro.turn_ids,
        clip_low=clip_low,
        clip_high=clip_high,
        advantages=micro.advantages,
    )
    log_ratio = token_log_ratio(logp, micro.old_logp, on)
    ratio = masked(out.ratio, on)
    rows = torch.stack(
        [
            on.to(ratio.dtype),
            (out.clip_excess != 0).to(ratio.dtype),
            ratio,
            ratio.square(),
            torch.expm1(log_ratio) - log_ratio,
        ]
    )
    slots = _slots(micro)
    sums = rows.new_zeros(len(rows), TURN_SLOTS + 1).index_add_(1, slots, rows.flatten(1))[:, :TURN_SLOTS]
    names = ("turn_tokens", "turn_clipped", "turn_ratio", "turn_ratio_squared", "turn_kl")
    largest = ratio.new_zeros(TURN_SLOTS + 1).scatter_reduce(0, slots, ratio.flatten(), "amax")[:TURN_SLOTS]
    return {
        **{name: value for name, value in counts.items() if name != "tokens"},
        **dict(zip(names, sums.unbind(), strict=True)),
        "max_turn_ratio": largest,
    }


@torch.no_grad()
def update_metrics(batch: Batch, entropy: Tensor, totals: dict[str, Tensor]) -> dict[str, float]:
    """Turns the sums of an update's optimiser steps into the logged quantities.

    Fractions are over action tokens of all steps; ``factor``, ``rho`` and norms are means over the steps.
    """
    assert batch.old_logp is not None
    on = batch.loss_mask
    tokens = on.sum().clamp(min=1)
    mismatch = masked(batch.old_logp - batch.rollout_logp, on)
    logged: dict[str, Any] = {
        "entropy": masked(entropy, on).sum() / tokens,
        # tokens were sampled by the engine: KL(engine || trainer), k3
        "mismatch_kl": masked(torch.expm1(mismatch) - mismatch, on).sum() / tokens,
    }
    if batch.ref_logp is not None:
        logged["ref_kl"] = masked(batch.old_logp - batch.ref_logp, on).sum() / tokens
    if batch.values is not None and batch.returns is not None:
        logged["explained_variance"] = explained_variance(batch.values, batch.returns, on)
    if batch.advantages is not None:
        logged["advantage_abs_mean"] = masked(batch.advantages.abs(), on).sum() / tokens
        logged["advantage_variance"] = _variance(
            batch.advantages if batch.raw_advantages is None else batch.raw_advantages, on
        )
    steps = totals.get("steps", torch.ones(()))
    if "skipped_minibatches" in totals:
        logged["skipped_minibatches"] = totals["skipped_minibatches"]
    if "tokens" in totals:
        seen = totals["tokens"].clamp(min=1)
        for level in RATIO_LEVELS:
            for suffix in ("", "_high", "_low"):
                logged[f"clip_fraction_{level}{suffix}"] = totals[f"clipped_{level}{suffix}"] / seen
        squares = totals["sum_ratio_squared"]
        logged |= {
            "clip_fraction": totals["clipped_tokens"] / seen,
            "approx_kl": totals["sum_kl"] / seen,
            "ratio_mean": totals["sum_ratio"] / seen,
            "ratio_max": totals["max_ratio"],
            # Kish: (sum w)^2 / (n sum w^2), 1 when all ratios are equal
            "ess": totals["sum_ratio"].square() / (seen * squares.clamp(min=1e-12)),
            "policy_loss": totals["policy_loss"] / steps,
        }
        if "factors" in totals:
            logged["factor"] = totals["sum_factor"] / totals["factors"].clamp(min=1)
            logged["rho"] = totals["max_rho"]
    if "value_loss" in totals:
        logged["value_loss"] = totals["value_loss"] / steps
    for name, value in totals.items():
        if name.startswith("step/"):
            logged[name.removeprefix("step/")] = value / steps
    return _to_host(logged, _rollout_turns(batch, entropy) | _update_turns(totals))


def _slots(batch: Batch) -> Tensor:
    """Turn slot of each token, flat: ``(B * T,)`` long; what is no action token has the spare slot `TURN_SLOTS`."""
    return torch.where(batch.loss_mask, batch.turn_ids.clamp(max=TURN_SLOTS - 1), TURN_SLOTS).flatten()


def _variance(x: Tensor, on: Tensor) -> Tensor:
    """Variance over action tokens, 0-d; 0 without any."""
    count = on.sum().clamp(min=1)
    x = masked(x, on)
    return masked(x - x.sum() / count, on).square().sum() / count


def _rollout_turns(batch: Batch, entropy: Tensor) -> dict[str, Tensor]:
    """What the rollout batch tells of each turn index: ``(TURN_SLOTS,)`` each, NaN where there is no such turn."""
    assert batch.old_logp is not None
    slots = _slots(batch)
    found = mismatch_by_turn(batch.old_logp, batch.rollout_logp, batch.loss_mask, batch.turn_ids, turns=TURN_SLOTS)
    there = torch.where(found["tokens"] > 0, found["tokens"], torch.nan)

    def mean(x: Tensor) -> Tensor:
        values = masked(x, batch.loss_mask).flatten()
        return values.new_zeros(TURN_SLOTS + 1).index_add_(0, slots, values)[:TURN_SLOTS] / there

    sums = found["sum_weight"], found["sum_weight_squared"], there
    turns = {
        "entropy_turn": mean(entropy),
        "mismatch_kl_turn": found["sum_mismatch_kl"] / there,
        "mismatch_ratio_max_turn": found["max_ratio"] + 0.0 * there,
        "mismatch_ess_turn": effective_sample_size(*sums),
    }
    if batch.advantages is not None:
        turns["advantage_turn"] = mean(batch.advantages)
    return turns


def _update_turns(totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the optimiser steps tell of each turn index: ``(TURN_SLOTS,)`` each, NaN where there is no such turn."""
    if "turn_tokens" not in totals:
        return {}
    there = torch.where(totals["turn_tokens"] > 0, totals["turn_tokens"], torch.nan)
    return {
        "clip_fraction_turn": totals["turn_clipped"] / there,
        "ratio_mean_turn": totals["turn_ratio"] / there,
        "ratio_max_turn": totals["max_turn_ratio"] + 0.0 * there,
        "approx_kl_turn": totals["turn_kl"] / there,
        "ess_turn": effective_sample_size(totals["turn_ratio"], totals["turn_ratio_squared"], there),
    }


def _to_host(single: dict[str, Any], by_turn: dict[str, Tensor]) -> dict[str, float]:
    """All numbers of an update in one transfer to the host; turn indices that never occurred are left out."""
    tensors = list(by_turn.values())
    device = tensors[0].device
    flat = [torch.as_tensor(value, dtype=torch.float32).to(device) for value in single.values()]
    values = torch.cat([torch.stack(flat), *(tensor.float() for tensor in tensors)]).tolist()
    logged = dict(zip(single, values, strict=False))
    for place, name in enumerate(by_turn):
        start = len(single) + place * TURN_SLOTS
        numbers = values[start : start + TURN_SLOTS]
        logged |= {f"{name}/{slot}": number for slot, number in enumerate(numbers) if number == number}
    return logged
