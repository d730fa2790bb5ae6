"""The table of algorithms: its rows, overrides over the whole grid, scopes of the normalisation, splits."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sorl_algos.algorithms import (
    ADVANTAGES,
    ALGORITHMS,
    ALIASES,
    Algorithm,
    CoefficientRatio,
    GradientNorm,
    GradientRatio,
    advantages_of,
    algorithm,
    gradient_factor,
    policy_loss,
)
from sorl_algos.losses.clip_norm import normalisation_factor
from sorl_algos.losses.reduce import Counts, counts_of
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.proofs import RandomBatch, random_batch, same

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def estimates(row: Algorithm, batch: RandomBatch) -> tuple[Tensor, Tensor | None]:
    return advantages_of(
        row,
        rewards=batch.rewards,
        values=batch.values,
        mask=batch.mask,
        turn_ids=batch.turn_ids,
        group_ids=batch.group_ids,
        gamma=0.97,
        lam=0.9,
    )


# --- the table


def test_rows_are_those_of_the_design() -> None:
    columns = {
        name: (row.advantages, row.level, None if row.normalisation is None else row.scope, row.reduction)
        for name, row in ALGORITHMS.items()
    }
    assert columns == {
        "ppo": ("gae", "token", None, "token_mean"),
        "turn_ppo": ("gae", "turn", None, "token_mean"),
        "s_ppo": ("gae", "token", "minibatch", "token_mean"),
        "so_ppo": ("gae", "turn", "minibatch", "token_mean"),
        "grpo": ("group", "token", None, "sequence_mean_token_mean"),
        "s_grpo": ("group", "token", "sequence", "sequence_mean_token_mean"),
        "so_grpo": ("group", "turn", "sequence", "token_mean"),
        "gspo": ("group", "sequence", None, "sequence_mean_token_mean"),
        "rloo": ("leave_one_out", "token", None, "sequence_mean_token_sum"),
        "dr_grpo": ("group_unscaled", "token", None, "sequence_mean_token_sum_norm"),
        "cispo": ("group", "token", None, "token_mean"),
        "reinforce": ("reward_to_go", "token", None, "sequence_mean_token_sum"),
    }
    assert ALIASES == {"st_ppo": "so_ppo"} and algorithm("st_ppo") == algorithm("so_ppo")
    assert algorithm("s_ppo").normalisation == CoefficientRatio(threshold=3.0, level="token", scope="minibatch")
    assert [name for name, row in ALGORITHMS.items() if row.needs_critic] == [
        "ppo",
        "turn_ppo",
        "s_ppo",
        "so_ppo",
    ]
    grouped = ["grpo", "s_grpo", "so_grpo", "gspo", "rloo", "dr_grpo", "cispo"]
    assert [name for name, row in ALGORITHMS.items() if row.group_based] == grouped


@pytest.mark.parametrize(
    ("level", "normalisation", "advantages"),
    [
        *itertools.product(
            ("token", "turn", "sequence"),
            ("none", "coefficient_ratio", "gradient_norm", "gradient_ratio"),
            ("gae", "turn_gae", "group", "leave_one_out"),
        )
    ],
)
def test_the_whole_grid_is_reachable_and_runs(level: str, normalisation: str, advantages: str) -> None:
    batch = random_batch(seed=0)
    for name in ALGORITHMS:
        row = algorithm(name, level=level, normalisation=normalisation, advantages=advantages)
        assert (row.level, row.advantages) == (level, advantages)
    row = algorithm("so_ppo", level=level, normalisation=normalisation, advantages=advantages)
    estimated, targets = estimates(row, batch)
    assert (targets is not None) == row.needs_critic
    logp = batch.logp.clone().requires_grad_()
    out = policy_loss(row, logp, batch.old_logp, estimated, batch.mask, batch.turn_ids, **CLIPS)
    loss = row.reduce(out.per_token, batch.mask, batch.turn_ids, counts_of(batch.mask, batch.turn_ids))
    (gradient,) = torch.autograd.grad(loss, logp)
    assert gradient.isfinite().all() and gradient[~batch.mask].eq(0).all() and gradient.abs().sum() > 0


def test_overrides_of_the_normalisation() -> None:
    row = algorithm("so_ppo", threshold=5.0, scope="microbatch", trigger_level="turn")
    assert row.normalisation == CoefficientRatio(5.0, "turn", "microbatch")
    row = algorithm("ppo", normalisation="gradient_ratio", threshold=2.0)
    assert row.normalisation == GradientRatio(threshold=2.0)
    assert algorithm("s_ppo", normalisation="none").normalisation is None
    assert algorithm("s_ppo", normalisation=None).normalisation is None
    assert algorithm("s_ppo", normalisation=GradientNorm(2.0)).normalisation == GradientNorm(2.0)
    assert algorithm("grpo", loss="cispo", pooling="sum").loss == "cispo"


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("pppo", {}, r"unknown algorithm 'pppo'; known: cispo, dr_grpo, .*, so_ppo, st_ppo, turn_ppo"),
        ("ppo", {"clip": 0.2}, r"'ppo' has no column 'clip'; known: advantages, level, .*, trigger_level"),
        ("ppo", {"level": "word"}, r"unknown level 'word'; known: token, turn, sequence"),
        ("ppo", {"advantages": "best"}, r"unknown advantages 'best'; known: gae, turn_gae, group"),
        ("ppo", {"reduction": "mean"}, r"unknown reduction 'mean'; known: token_mean, turn_mean"),
        ("ppo", {"normalisation": "batch"}, r"unknown normalisation 'batch'; known: none, coefficient_ratio"),
        ("ppo", {"threshold": 2.0}, r"threshold of the normalisation given, but there is no normalisation"),
        ("so_ppo", {"threshold": 0.0}, r"threshold of a normalisation must be positive, got 0.0"),
        ("so_ppo", {"scope": "rank"}, r"unknown scope 'rank'; known: minibatch, microbatch, sequence"),
        ("ppo", {"normalisation": "gradient_norm", "scope": "sequence"}, r"use scope 'microbatch' with"),
        ("ppo", {"normalisation": "gradient_norm", "trigger_level": "turn"}, r"trigger_level belongs to"),
        ("ppo", {"loss": "hinge"}, r"unknown loss 'hinge'; known: clipped, cispo, reinforce"),
        ("ppo", {"pooling": "max"}, r"unknown pooling 'max'; known: mean, sum"),
        ("ppo", {"dual_clip": 0.5}, r"dual_clip must be above 1, got 0.5"),
        ("cispo", {"dual_clip": 3.0}, r"loss 'cispo' has no use for it"),
        ("dr_grpo", {"norm_length": 0}, r"norm_length must be a positive number of tokens, got 0"),
    ],
)
def test_wrong_names_and_values_say_what_is_known(name: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithm(name, **overrides)


# --- advantages by name


def test_advantages_by_name_equal_the_loops() -> None:
    batch = random_batch(seed=4)
    data = [x.tolist() for x in (batch.rewards, batch.values, batch.mask)]
    expected = {
        "gae": loops.gae(*data, 0.97, 0.9)[0],
        "turn_gae": loops.turn_gae(*data, 0.97, 0.9)[0],
        "search_r1_legacy": loops.legacy_gae(*data, 0.97, 0.9)[0],
        "reward_to_go": loops.gae(data[0], [[0.0] * 14] * 5, data[2], 0.97, 1.0)[0],
    }
    mask = batch.mask.tolist()
    # row 0 has no action token and so is no member of its group
    played = [b for b, row in enumerate(mask) if any(row)]
    returns = [sum(batch.rewards[b, t].item() for t in loops.action_columns(mask[b])) for b in played]
    ids = [batch.group_ids.tolist()[b] for b in played]
    for name, per_row in {
        "group": loops.group_advantages(returns, ids, "std"),
        "group_unscaled": loops.group_advantages(returns, ids, "none"),
        "leave_one_out": loops.leave_one_out(returns, ids),
    }.items():
        by_row = dict(zip(played, per_row, strict=True))
        expected[name] = [[by_row[b] if on else 0.0 for on in mask[b]] for b in range(5)]
    assert set(expected) == set(ADVANTAGES)
    for name, numbers in expected.items():
        got, _ = estimates(algorithm("ppo", advantages=name), batch)
        same(f"advantages by name ({name}) = loop", got, numbers, tolerance=1e-12)


def test_an_episode_without_actions_does_not_move_its_group() -> None:
    # Returns 1 and 0 in one group, and an empty episode: +-0.5 for the two, not a mean of three.
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    got, targets = algorithm("dr_grpo").estimate_advantages(
        rewards=rewards,
        values=None,
        mask=mask,
        turn_ids=mask - 1,
        group_ids=torch.zeros(3, dtype=torch.long),
        gamma=1.0,
        lam=1.0,
    )
    assert got.tolist() == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]] and targets is None


def test_missing_inputs_are_named() -> None:
    batch = random_batch(0)
    fields = {
        "rewards": batch.rewards,
        "mask": batch.mask,
        "turn_ids": batch.turn_ids,
        "gamma": 1.0,
        "lam": 1.0,
    }
    with pytest.raises(ValueError, match="advantages 'gae' need the critic's values"):
        algorithm("ppo").estimate_advantages(values=None, group_ids=None, **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="advantages 'group' compare the episodes of a group, and group_ids is None"):
        algorithm("grpo").estimate_advantages(values=None, group_ids=None, **fields)  # type: ignore[arg-type]


# --- normalisation: scopes, splits, and the gradient estimators


def accumulated(row: Algorithm, batch: RandomBatch, parts: list[Tensor], counts: Counts) -> tuple[Tensor, Tensor]:
    """Gradient of one optimiser step over micro-batches, as a trainer takes it, and its clip sums."""
    logp = batch.logp.clone().requires_grad_()
    sums = torch.zeros(4, dtype=torch.float64)
    for part in parts:
        tensors = [logp[part], *(x[part] for x in batch.five[1:])]
        out = row.policy_loss(*tensors, **CLIPS)
        row.reduce(out.per_token, batch.mask[part], batch.turn_ids[part], counts).backward()
        if isinstance(row.normalisation, CoefficientRatio) and not row.scales_loss:
            sums += row.trigger_sums(*tensors, **CLIPS)
    assert logp.grad is not None
    if row.scope == "minibatch" and isinstance(row.normalisation, CoefficientRatio):
        factor, _ = normalisation_factor(sums, row.normalisation.threshold)
        return logp.grad * factor, sums
    return logp.grad, sums


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("trigger_level", ["token", "turn", "sequence"])
def test_an_update_does_not_depend_on_the_split(name: str, trigger_level: str) -> None:
    row = algorithm(name)
    if row.normalisation is not None:
        row = algorithm(name, threshold=0.5, trigger_level=trigger_level)
    for seed in range(3):
        batch = random_batch(seed, rows=8)
        counts = counts_of(batch.mask, batch.turn_ids)
        whole, sums = accumulated(row, batch, [torch.arange(8)], counts)
        for order in (torch.arange(8), torch.tensor([5, 0, 7, 2, 6, 1, 3, 4])):
            for size in (1, 3):
                got, _ = accumulated(row, batch, list(order.split(size)), counts)
                same("1 x 8 = 8 x 1 micro-batches, any order", got, whole, tolerance=1e-13)
        if row.scope == "minibatch":
            assert sums[1] > 0 and sums[3] > 0  # clipped and unclipped tokens took part


def test_microbatch_scope_depends_on_the_split() -> None:
    row = algorithm("s_ppo", scope="microbatch", threshold=1.0)
    batch = random_batch(seed=0, rows=8)
    counts = counts_of(batch.mask, batch.turn_ids)
    whole, _ = accumulated(row, batch, [torch.arange(8)], counts)
    split, _ = accumulated(row, batch, list(torch.arange(8).split(1)), counts)
    assert (whole - split).abs().max() > 1e-2 * whole.abs().max()


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_sequence_scope_multiplies_each_row_by_its_factor(level: str) -> None:
    batch = random_batch(seed=2)
    row = algorithm("so_grpo", threshold=1.0, trigger_level=level)
    out = row.policy_loss(*batch.five, **CLIPS)
    plain = replace(row, normalisation=None).policy_loss(*batch.five, **CLIPS)
    data = [x.tolist() for x in (batch.logp, batch.old_logp, batch.mask)]
    factors, rhos = [], []
    for ratios, advantages in zip(loops.ratios(*data, level), batch.advantages.tolist(), strict=True):
        factor, rho = loops.normalisation(loops.clip_sums([ratios], [advantages], 0.2, 0.28), 1.0)
        factors.append([factor])
        rhos.append(rho)
    scale = torch.tensor(factors, dtype=torch.float64)
    assert scale.min() < 1.0
    same(
        "scope sequence: loss = factor of the row x loss",
        out.per_token,
        plain.per_token * scale,
        tolerance=1e-13,
    )
    same("scope sequence: excess likewise", out.clip_excess, plain.clip_excess * scale, tolerance=1e-13)
    assert out.metrics["factors"].item() == 4  # row 0 has no action token
    assert out.metrics["sum_factor"].item() == pytest.approx(scale[1:].sum().item())
    assert out.metrics["max_rho"].item() == pytest.approx(max(rhos))


def test_no_normalisation_leaves_the_loss_alone_and_has_no_trigger() -> None:
    batch = random_batch(seed=1)
    plain = algorithm("ppo").policy_loss(*batch.five, **CLIPS)
    minibatch = algorithm("s_ppo").policy_loss(*batch.five, **CLIPS)
    assert torch.equal(plain.per_token, minibatch.per_token)  # the trainer scales the gradient instead
    with pytest.raises(ValueError, match="only coefficient_ratio and effective_sample_size"):
        algorithm("ppo").trigger_sums(*batch.five, **CLIPS)


def test_gradient_estimators_by_hand() -> None:
    # ||C|| = 4, ||clipped gradient|| = 2: rho 4 against floor 1; rho 2 against threshold 1.
    four, two, zero = (torch.tensor(x, dtype=torch.float64) for x in (4.0, 2.0, 0.0))
    factor, rho = gradient_factor(GradientNorm(), four, two)
    assert (factor.item(), rho.item()) == (0.25, 4.0)
    factor, rho = gradient_factor(GradientRatio(), four, two)
    assert (factor.item(), rho.item()) == (0.5, 2.0)
    assert gradient_factor(GradientNorm(threshold=5.0), four, two)[0].item() == 1.0
    for normalisation in (GradientNorm(), GradientRatio()):
        factor, rho = gradient_factor(normalisation, zero, zero)  # nothing clipped
        assert (factor.item(), rho.item()) == (1.0, 0.0)
    small = torch.tensor(0.25, dtype=torch.float64)
    assert gradient_factor(GradientNorm(threshold=0.1), small, two)[0].item() == 1.0  # never above 1


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_rows_and_batches_without_action_tokens(name: str) -> None:
    batch = random_batch(seed=3)
    row = algorithm(name)
    empty = replace(batch, mask=torch.zeros_like(batch.mask), turn_ids=torch.full_like(batch.turn_ids, -1))
    estimated, _ = estimates(row, empty)
    assert estimated.eq(0).all()
    logp = batch.logp.clone().requires_grad_()
    out = row.policy_loss(logp, batch.old_logp, estimated, empty.mask, empty.turn_ids, **CLIPS)
    loss = row.reduce(out.per_token, empty.mask, empty.turn_ids, counts_of(empty.mask, empty.turn_ids))
    (gradient,) = torch.autograd.grad(loss, logp)
    assert loss.item() == 0.0 and gradient.eq(0).all()
