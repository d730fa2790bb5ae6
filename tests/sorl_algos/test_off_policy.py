"""Corrections as a stage of training: nothing where engine and trainer agree, the loop's weights where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_algos.algorithms import ALGORITHMS, CoefficientRatio, algorithm
from sorl_algos.batch import Batch, collate
from sorl_algos.learner import Learner, make_learner
from sorl_algos.losses.reduce import counts_of
from sorl_algos.models import Policy, score
from sorl_algos.normalisation import ClipNormaliser
from sorl_algos.off_policy import correct
from sorl_algos.trainer import estimate_advantages, micro_loss, optimiser_step
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.proofs import random_batch, same
from tests.sorl_algos.small_game import made_up, small_config

CORRECTIONS: list[dict[str, Any]] = [
    {"correction": "truncated_is", "correction_high": 1.2},
    {"correction": "decoupled", "correction_high": float("inf")},
    {"correction": "icepop", "correction_low": 0.8, "correction_high": 1.25, "rejected_leave_denominator": False},
    {"correction": "icepop", "correction_low": 0.8, "correction_high": 1.25, "rejected_leave_denominator": True},
    {"correction": "rejection", "correction_low": 0.8, "correction_high": 1.25, "rejected_leave_denominator": True},
]
NAMES = ["truncated_is", "decoupled", "icepop", "icepop, denominator too", "rejection, denominator too"]


def off_policy(learner: Learner, spread: float) -> Batch:
    """Eight scored episodes; the engine's log-probabilities are ``spread`` apart from the trainer's."""
    batch = collate(made_up(8, seed=3, reward=lambda row: float(row % 3)), 0)
    batch, _ = score(batch, learner.policy, microbatch_sequences=4)
    assert batch.old_logp is not None
    noise = torch.randn(batch.token_ids.shape, generator=torch.Generator().manual_seed(2))
    batch = batch.replace(rollout_logp=batch.old_logp + spread * noise * batch.loss_mask)
    return estimate_advantages(batch, learner.algorithm, learner.config)


def learner_of(tmp_path: Path, make_model: Any, **changes: Any) -> Learner:
    config = small_config(tmp_path, questions_per_update=4, minibatch_sequences=8, **changes)
    torch.manual_seed(0)
    return make_learner(config, Policy(make_model(), shared_critic=config.algorithm_row().needs_critic))


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("settings", CORRECTIONS, ids=NAMES)
def test_an_engine_that_agrees_is_not_corrected(
    settings: dict[str, Any], level: Any, make_model: Any, tmp_path: Path
) -> None:
    """Weights of exactly 1 on action tokens, and with the normalisation on a step that is the same bit for bit."""
    found = []
    for changes in ({}, settings | {"correction_level": level}):
        learner = learner_of(tmp_path, make_model, threshold=0.01, clip_low=0.01, clip_high=0.01, **changes)
        batch, report = correct(off_policy(learner, spread=0.0), learner.config)
        if changes:
            assert batch.weights is not None and torch.equal(batch.weights, batch.loss_mask.float())
            assert batch.counted_mask is not None and torch.equal(batch.counted_mask, batch.loss_mask)
            numbers = {name: float(value) for name, value in report.items()}
            assert numbers == {
                "correction_rejected": 0.0, "correction_truncated": 0.0, "correction_max_ratio": 1.0,
                "correction_ess": pytest.approx(1.0),
            }  # fmt: skip
        else:
            assert report == {} and batch.weights is None
        assert batch.old_logp is not None
        moved = batch.replace(old_logp=batch.old_logp - 0.3 * batch.loss_mask)  # so that the clip acts
        totals = optimiser_step(learner, moved, update=0)
        assert float(totals["step/factor"]) < 1
        found.append({name: value.clone() for name, value in learner.raw_policy.state_dict().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("settings", CORRECTIONS, ids=NAMES)
def test_weights_and_counted_tokens_equal_the_loop(
    settings: dict[str, Any], level: Any, make_model: Any, tmp_path: Path
) -> None:
    learner = learner_of(tmp_path, make_model, correction_level=level, **settings)
    batch, report = correct(off_policy(learner, spread=0.4), learner.config)
    assert batch.old_logp is not None and batch.weights is not None and batch.counted_mask is not None
    low, high = settings.get("correction_low", 0.0), settings["correction_high"]
    ratios = loops.ratios(
        batch.old_logp.double().tolist(), batch.rollout_logp.double().tolist(), batch.loss_mask.tolist(), level
    )
    rejected = truncated = tokens = 0
    for row, own in enumerate(ratios):
        for column, ratio in enumerate(own):
            weight, counted = 0.0, False
            if ratio is not None:
                inside = low <= ratio <= high
                kept = inside or settings["correction"] in ("truncated_is", "decoupled")
                weight = min(ratio, high) if settings["correction"] != "rejection" else 1.0
                weight = weight if kept else 0.0
                counted = kept or not settings.get("rejected_leave_denominator", False)
                tokens += 1
                rejected += not kept
                truncated += kept and weight < ratio - 1e-6
            assert float(batch.weights[row, column]) == pytest.approx(weight, abs=2e-5)
            assert bool(batch.counted_mask[row, column]) == counted
    assert float(report["correction_rejected"]) == pytest.approx(rejected / tokens)
    if settings["correction"] == "truncated_is":
        assert float(report["correction_truncated"]) == pytest.approx(truncated / tokens)
        assert truncated > 0
    largest = max(ratio for own in ratios for ratio in own if ratio is not None)
    assert float(report["correction_max_ratio"]) == pytest.approx(largest, rel=1e-5)
    assert 0 < float(report["correction_ess"]) <= 1


@pytest.mark.parametrize("name", [*ALGORITHMS, "dual clip"])
def test_weights_multiply_loss_and_excess_of_each_token(name: str) -> None:
    row = algorithm("ppo", dual_clip=1.5) if name == "dual clip" else algorithm(name, normalisation="none")
    batch = random_batch(3, spread=1.0)
    weights = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.where(batch.mask & (weights > 0.3), weights, 0.0)
    plain = row.policy_loss(*batch.five, clip_low=0.2, clip_high=0.2)
    weighted = row.policy_loss(*batch.five, clip_low=0.2, clip_high=0.2, weights=weights)
    same("weighted loss = weight x loss", weighted.per_token, weights * plain.per_token, tolerance=1e-14)
    same("weighted excess = weight x excess", weighted.clip_excess, weights * plain.clip_excess, tolerance=1e-14)
    assert torch.equal(weighted.ratio, plain.ratio)


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_the_normalisation_sees_weighted_coefficients_of_kept_tokens(level: Any) -> None:
    """Its sums are those of the loop over weight x ratio x advantage, without the tokens of weight 0."""
    batch = random_batch(5, spread=1.0)
    weights = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = torch.where(batch.mask & (weights > 0.4), weights, 0.0)
    row = algorithm("so_ppo", trigger_level=level)
    got = row.trigger_sums(*batch.five, clip_low=0.2, clip_high=0.2, weights=weights)
    ratios = loops.ratios(batch.logp.tolist(), batch.old_logp.tolist(), batch.mask.tolist(), level)
    kept = [
        [None if weights[i, j] == 0 else ratio for j, ratio in enumerate(own)] for i, own in enumerate(ratios)
    ]
    want = loops.clip_sums(kept, (weights * batch.advantages).tolist(), 0.2, 0.2)
    same("weighted clip_sums = loop", got, torch.tensor(want, dtype=torch.float64), tolerance=1e-12)
    # one factor a sequence: what a factor multiplies is the weighted loss
    each = algorithm("so_ppo", trigger_level=level, scope="sequence", threshold=0.5)
    assert isinstance(each.normalisation, CoefficientRatio)
    out = each.policy_loss(*batch.five, clip_low=0.2, clip_high=0.2, weights=weights)
    plain = algorithm("turn_ppo").policy_loss(*batch.five, clip_low=0.2, clip_high=0.2, weights=weights)
    for index, own in enumerate(kept):
        sums = loops.clip_sums([own], [(weights * batch.advantages)[index].tolist()], 0.2, 0.2)
        factor, _ = loops.normalisation(sums, 0.5)
        same("factor of a row, weighted", out.per_token[index], factor * plain.per_token[index], tolerance=1e-12)


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("reduction", ["token_mean", "turn_mean", "sequence_mean_token_mean"])
def test_rejected_tokens_and_the_denominators_of_a_step(
    leave: bool, reduction: str, make_model: Any, tmp_path: Path
) -> None:
    """The policy loss of a step is the loop's weighted mean; the critic's goes over all action tokens either way."""
    learner = learner_of(
        tmp_path, make_model, algorithm="turn_ppo", reduction=reduction, correction="rejection",
        correction_low=0.9, correction_high=1.1, rejected_leave_denominator=leave,
    )  # fmt: skip
    batch, _ = correct(off_policy(learner, spread=0.2), learner.config)
    assert batch.weights is not None and batch.advantages is not None and batch.counted_mask is not None
    assert 0 < int((batch.weights > 0).sum()) < int(batch.loss_mask.sum())
    counted = batch.counted_mask
    counts, kept_counts = counts_of(batch.loss_mask, batch.turn_ids), counts_of(counted, batch.turn_ids)
    normaliser = ClipNormaliser(learner.algorithm, learner.policy_parameters, clip_low=0.2, clip_high=0.2)
    _, sums = micro_loss(learner, batch, counts, normaliser, only_critic=False, kept_counts=kept_counts)
    # on-policy: the loss of a token is -A, its weight in the mean that of the loop over the counted tokens
    share = torch.tensor(loops.reduction_weights(counted.tolist(), reduction))
    if reduction == "turn_mean":  # a turn of which tokens were rejected is still one turn
        share = _turn_shares(batch, counted)
    want = -(share * batch.weights * batch.advantages).sum()
    assert float(sums["policy_loss"]) == pytest.approx(float(want), abs=1e-5)
    plain = batch.replace(weights=None, counted_mask=None)
    _, without = micro_loss(learner, plain, counts, normaliser, only_critic=False)
    assert float(sums["value_loss"]) == float(without["value_loss"])


def _turn_shares(batch: Batch, counted: Tensor) -> Tensor:
    turns = [
        (row, number)
        for row in range(len(batch))
        for number in range(int(batch.turn_ids.max()) + 1)
        if bool((counted[row] & (batch.turn_ids[row] == number)).any())
    ]
    share = torch.zeros(counted.shape)
    for row, number in turns:
        mine = counted[row] & (batch.turn_ids[row] == number)
        share[row, mine] = 1.0 / (int(mine.sum()) * len(turns))
    return share
