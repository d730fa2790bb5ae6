"""Cutting a rollout batch: whole groups in minibatches whatever was dropped; token budgets; the result is the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_algos.batch import Batch, collate
from sorl_algos.learner import make_learner
from sorl_algos.losses.reduce import counts_of
from sorl_algos.minibatching import microbatches, minibatches
from sorl_algos.models import Policy, score
from sorl_algos.normalisation import ClipNormaliser
from sorl_algos.totals import add_totals
from sorl_algos.trainer import estimate_advantages, micro_loss, optimiser_step
from tests.sorl_algos.proofs import same
from tests.sorl_algos.small_game import made_up, small_config


def places_of(batch: Batch) -> torch.Tensor:
    assert batch.places is not None
    return batch.places


def cut(kept: list[int], *, group_size: int = 4, minibatch_sequences: int = 8, **changes: Any) -> list[list[int]]:
    """Groups of each minibatch's rows, of 24 episodes of which those in ``kept`` were not dropped."""
    items = made_up(24, group_size=group_size)
    config = small_config(
        Path("unused"), questions_per_update=24 // group_size, group_size=group_size,
        minibatch_sequences=minibatch_sequences, **changes,
    )  # fmt: skip
    batch = collate([items[row] for row in kept], 0)
    cuts = list(minibatches(batch, config, update=3))
    places = [place for piece in cuts for place in places_of(piece)[piece.loss_mask.any(1)].tolist()]
    assert sorted(places) == list(range(len(kept)))  # every episode once
    return [piece.group_ids[piece.loss_mask.any(1)].tolist() for piece in cuts]


@given(st.sets(st.integers(0, 23), min_size=1))
def test_groups_never_straddle_minibatches_and_their_number_is_fixed(kept: set[int]) -> None:
    cuts = cut(sorted(kept))
    assert len(cuts) == 3
    groups = [set(rows) for rows in cuts]
    assert sum(len(found) for found in groups) == len(set().union(*groups))
    sizes = [len(found) for found in groups]
    assert max(sizes) - min(sizes) <= 1


def test_episodes_without_groups_are_shared_out_evenly() -> None:
    # 22 of 24 episodes in 4 minibatches of 6: 5 or 6 each
    sizes = [len(rows) for rows in cut(list(range(22)), group_size=1, minibatch_sequences=6, algorithm="ppo")]
    assert sorted(sizes) == [5, 5, 6, 6]
    # a minibatch that is no multiple of the group (an algorithm with a critic) is cut by episodes
    assert [len(rows) for rows in cut(list(range(24)), group_size=4, minibatch_sequences=6)] == [6] * 4


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 120))
def test_token_budgets(seed: int, sequences: int, tokens: int) -> None:
    batch = collate(made_up(9, seed=seed, group_size=1), 0)
    pieces = batch.pieces(sequences, tokens)
    assert sorted(row for index, _ in pieces for row in index.tolist()) == list(range(9))
    lengths = [int(length) for _, piece in pieces for length in piece.lengths()]
    assert lengths == sorted(lengths)
    for index, piece in pieces:
        assert len(index) == len(piece) <= sequences
        assert piece.token_ids.numel() <= tokens or len(piece) == 1
        assert piece.token_ids.shape[1] == int(piece.lengths().max())
        assert torch.equal(places_of(piece), index)
    if tokens >= int(batch.lengths().max()):  # no piece could have taken the first row of the next
        for (_, piece), (_, after) in pairwise(pieces):
            assert len(piece) == sequences or (len(piece) + 1) * int(after.lengths()[0]) > tokens


def test_a_silent_batch_has_tokens_and_no_actions() -> None:
    batch = collate(made_up(4), 0)
    silent = batch.replace(counted_mask=batch.loss_mask).silent()
    assert silent.counted_mask is not None and not (silent.loss_mask | silent.counted_mask).any()
    assert (silent.turn_ids == -1).all() and torch.equal(silent.token_ids, batch.token_ids)
    assert batch.silent().counted_mask is None


def scored(config: Any, make_model: Any) -> tuple[Any, Batch]:
    torch.manual_seed(0)
    learner = make_learner(config, Policy(make_model(), shared_critic=config.algorithm_row().needs_critic).double())
    batch = collate(made_up(8, seed=3, reward=lambda row: float(row % 3)), 0)
    batch = batch.replace(rewards=batch.rewards.double(), rollout_logp=batch.rollout_logp.double())
    sizes = {"microbatch_sequences": config.microbatch_sequences, "microbatch_tokens": config.microbatch_tokens}
    batch, _ = score(batch, learner.policy, **sizes)
    batch = estimate_advantages(batch, learner.algorithm, config)
    noise = torch.randn(batch.token_ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert batch.old_logp is not None
    return learner, batch.replace(old_logp=batch.old_logp + 0.8 * (noise - noise[:, :1].abs()) * batch.loss_mask)


@pytest.mark.parametrize("algorithm", ["so_ppo", "s_grpo"])
def test_a_token_budget_changes_nothing_but_the_split(algorithm: str, make_model: Any, tmp_path: Path) -> None:
    """Scores, factor, norm and weights after a step with the normalisation at work."""
    found: list[dict[str, torch.Tensor]] = []
    splits = []
    for changes in ({"microbatch_sequences": 8}, {"microbatch_sequences": 3}, {"microbatch_tokens": 60}):
        config = small_config(
            tmp_path, algorithm=algorithm, minibatch_sequences=8, threshold=0.2, max_grad_norm=1e6,
            max_turn_tokens=8, max_total_tokens=60, **changes,
        )  # fmt: skip
        learner, batch = scored(config, make_model)
        splits.append([len(micro) for micro in microbatches(batch, config)])
        totals = optimiser_step(learner, batch, update=0)
        assert batch.old_logp is not None
        found.append(
            {name: value.detach() for name, value in learner.raw_policy.state_dict().items()}
            | {name: totals[name] for name in totals if name.startswith("step/")}
            | {"old_logp": batch.old_logp}
        )
    assert splits[0] == [8] and splits[1] != splits[2] and len(splits[2]) > 2
    for other in found[1:]:
        for name, value in found[0].items():
            same("token budget: scores and weights after a step", other[name], value, tolerance=1e-7)


def test_silent_microbatches_add_nothing(make_model: Any, tmp_path: Path) -> None:
    """What a rank runs that is out of micro-batches before the others: no gradient, no factor, no count."""
    config = small_config(tmp_path, minibatch_sequences=8, normalisation="gradient_norm")
    learner, batch = scored(config, make_model)
    counts = counts_of(batch.loss_mask, batch.turn_ids)
    found = []
    for micros in ([batch], [batch.rows(slice(0, 1)).silent(), batch]):
        learner.raw_policy.zero_grad()
        normaliser = ClipNormaliser(learner.algorithm, learner.policy_parameters, clip_low=0.2, clip_high=0.2)
        totals: dict[str, torch.Tensor] = {}
        for micro in micros:
            loss, sums = micro_loss(learner, micro, counts, normaliser, only_critic=False)
            loss.backward()
            add_totals(totals, sums)
        report = normaliser.scale_gradients()
        gradients = [parameter.grad.clone() for parameter in learner.raw_policy.parameters()]
        found.append((gradients, totals | report))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    assert found[0][1].keys() == found[1][1].keys()
    assert [name for name, value in found[0][1].items() if not torch.equal(value, found[1][1][name])] == []
