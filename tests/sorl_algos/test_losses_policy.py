"""Policy losses: values and gradients against loops, the excess identity, Lemma 4.1, limits, invariances."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from sorl_algos.losses.policy import LossOutput, cispo, clip_fractions, clipped_surrogate, reinforce
from sorl_algos.losses.reduce import REDUCTIONS, counts_of
from sorl_algos.losses.segments import masked, segment_ids_of, segment_mean, turn_ids_from_mask
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.proofs import RandomBatch, random_batch, same

LEVELS = ("token", "turn", "sequence")
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def token_ratio_loss(ratio_and_advantage: list[tuple[float, float]], **options: float) -> list[float]:
    """Losses of single tokens with given ratios, one row."""
    ratio, advantage = torch.tensor(ratio_and_advantage, dtype=torch.float64).unbind(1)
    mask = torch.ones(1, len(ratio), dtype=torch.bool)
    logp = ratio.log().unsqueeze(0)
    clips = {"clip_low": 0.2, "clip_high": 0.2} | options
    out = clipped_surrogate(
        logp,
        torch.zeros_like(logp),
        advantage.unsqueeze(0),
        mask,
        turn_ids_from_mask(mask),
        level="token",
        **clips,
    )
    return out.per_token[0].tolist()


def gradient(scalar: Tensor, by: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(scalar, by, retain_graph=True)
    return result


def surrogate_of(batch: RandomBatch, logp: Tensor, level: str, **options: object) -> LossOutput:
    return clipped_surrogate(
        logp, batch.old_logp, batch.advantages, batch.mask, batch.turn_ids, level=level, **(CLIPS | options)
    )


# --- values and gradients against the definitions


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients_equal_the_loops(level: str, pooling: str, dual_clip: float | None, seed: int) -> None:
    batch = random_batch(seed)
    logp = batch.logp.clone().requires_grad_()
    out = surrogate_of(batch, logp, level, pooling=pooling, dual_clip=dual_clip)
    data = [x.tolist() for x in (batch.logp, batch.old_logp, batch.advantages, batch.mask)]
    settings = {"level": level, "pooling": pooling, "dual_clip": dual_clip, **CLIPS}
    kept = loops.surrogate(loops.clipped_token, *data, **settings)
    free = loops.surrogate(loops.free_token, *data, **settings)
    name = f"clipped_surrogate ({level})"
    same(f"{name}: loss = loop", out.per_token, -torch.tensor(kept, dtype=torch.float64), tolerance=1e-12)
    excess = torch.tensor(free, dtype=torch.float64) - torch.tensor(kept, dtype=torch.float64)
    same(f"{name}: excess = loop", out.clip_excess, excess, tolerance=1e-12)
    weights = batch.rewards  # arbitrary weights of the tokens' losses
    expected = loops.surrogate_gradient(loops.clipped_slope, weights.tolist(), *data, **settings)
    same(
        f"{name}: gradient = chain rule",
        gradient((out.per_token * -weights).sum(), logp),
        expected,
        tolerance=1e-12,
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", list(REDUCTIONS))
def test_gradient_equals_finite_differences(level: str, how: str) -> None:
    batch = random_batch(seed=7, rows=3, width=9)
    counts = counts_of(batch.mask, batch.turn_ids)

    def loss(logp: Tensor) -> Tensor:
        per_token = surrogate_of(batch, logp, level).per_token
        return REDUCTIONS[how](per_token, batch.mask, batch.turn_ids, counts, norm_length=16)

    def excess(logp: Tensor) -> Tensor:
        per_token = surrogate_of(batch, logp, level).clip_excess
        return REDUCTIONS[how](per_token, batch.mask, batch.turn_ids, counts, norm_length=16)

    for function in (loss, excess):
        logp = batch.logp.clone().requires_grad_()
        step = 1e-6
        numeric = torch.zeros_like(batch.logp)
        for b, t in itertools.product(range(3), range(9)):
            moved = torch.zeros_like(batch.logp)
            moved[b, t] = step
            numeric[b, t] = (function(batch.logp + moved) - function(batch.logp - moved)) / (2 * step)
        what = f"clipped_surrogate ({level}): gradient = finite differences"
        same(what, gradient(function(logp), logp), numeric, tolerance=1e-8)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", [cispo, reinforce])
def test_score_function_losses_equal_their_definition(level: str, loss: object) -> None:
    batch = random_batch(seed=3)
    logp = batch.logp.clone().requires_grad_()
    options = {"level": level} | (CLIPS if loss is cispo else {})
    # type: ignore[operator]
    out = loss(logp, batch.old_logp, batch.advantages, batch.mask, batch.turn_ids, **options)
    data = [x.tolist() for x in (batch.logp, batch.old_logp, batch.mask)]
    expected = torch.zeros_like(batch.logp)
    slope = torch.zeros_like(batch.logp)
    excess_slope = torch.zeros_like(batch.logp)
    for b, row in enumerate(loops.ratios(*data, level)):
        for t, w in enumerate(row):
            if w is None:
                continue
            weight = loops.clip(w, 0.8, 1.28) if loss is cispo else w
            slope[b, t] = -weight * batch.advantages[b, t]
            expected[b, t] = slope[b, t] * batch.logp[b, t]
            excess_slope[b, t] = (w - weight) * batch.advantages[b, t]
    name = "cispo" if loss is cispo else "reinforce"
    same(f"{name}: loss = loop", out.per_token, expected, tolerance=1e-12)
    same(f"{name}: gradient = -weight A", gradient(out.per_token.sum(), logp), slope, tolerance=1e-12)
    same(f"{name}: excess gradient", gradient(out.clip_excess.sum(), logp), excess_slope, tolerance=1e-12)


# --- identities of the method


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dual_clip", [None, 1.4])
@pytest.mark.parametrize("how", list(REDUCTIONS))
def test_clipped_gradient_is_free_gradient_minus_c(level: str, dual_clip: float | None, how: str) -> None:
    """grad(clipped surrogate) = grad(free surrogate) - C, through a small model's parameters."""
    for seed in range(3):
        batch = random_batch(seed)
        generator = torch.Generator().manual_seed(seed)
        weight = (0.3 * torch.randn(6, generator=generator, dtype=torch.float64)).requires_grad_()
        features = torch.randn(*batch.logp.shape, 6, generator=generator, dtype=torch.float64)
        # what a row's tokens share moves whole sequences out of the interval
        features += torch.randn(batch.logp.shape[0], 1, 6, generator=generator, dtype=torch.float64)
        logp = batch.old_logp + features @ weight
        out = surrogate_of(batch, logp, level, dual_clip=dual_clip)
        ids = segment_ids_of(batch.mask, batch.turn_ids, level)
        free = segment_mean(masked(logp - batch.old_logp, batch.mask), ids).exp() * batch.advantages
        counts = counts_of(batch.mask, batch.turn_ids)

        def reduced(x: Tensor, batch: RandomBatch = batch, counts: object = counts) -> Tensor:
            return REDUCTIONS[how](x, batch.mask, batch.turn_ids, counts, norm_length=16)

        clipped_gradient = gradient(-reduced(out.per_token), weight)
        bias_term = gradient(reduced(out.clip_excess), weight)
        assert bias_term.abs().max() > 1e-3  # the clip is active, or the identity would say nothing
        what = f"grad(clipped) = grad(free) - C ({level})"
        same(what, clipped_gradient, gradient(reduced(free), weight) - bias_term, tolerance=1e-13)


def test_lemma_4_1_against_finite_differences() -> None:
    """Nothing clipped, turn level: token t of turn k gets w_k mean_{j in k} A_j on its log-probability."""
    batch = random_batch(seed=11, spread=0.05)
    wide = {"clip_low": 0.99, "clip_high": 50.0}
    data = [x.tolist() for x in (batch.logp, batch.old_logp, batch.mask)]
    coefficient = torch.zeros_like(batch.logp)
    for b, row in enumerate(batch.mask.tolist()):
        ratios = loops.ratios(*data, "turn")[b]
        for turn in loops.turns_of(row):
            mean = sum(batch.advantages[b, t].item() for t in turn) / len(turn)
            for t in turn:
                coefficient[b, t] = ratios[t] * mean  # type: ignore[operator]

    def total(logp: Tensor) -> Tensor:
        return -surrogate_of(batch, logp, "turn", **wide).per_token.sum()

    numeric = torch.zeros_like(batch.logp)
    step = 1e-6
    for b, t in itertools.product(*map(range, batch.logp.shape)):
        moved = torch.zeros_like(batch.logp)
        moved[b, t] = step
        numeric[b, t] = (total(batch.logp + moved) - total(batch.logp - moved)) / (2 * step)
    same("Lemma 4.1 coefficients = finite differences", numeric, coefficient, tolerance=1e-7)
    logp = batch.logp.clone().requires_grad_()
    same("Lemma 4.1 coefficients = gradient", gradient(total(logp), logp), coefficient, tolerance=1e-13)


def both(batch: RandomBatch, mask: Tensor, first: str, second: str) -> list[tuple[Tensor, Tensor]]:
    """Loss, excess and gradient of two levels on the same tensors under `mask`."""
    results = []
    for level in (first, second):
        logp = batch.logp.clone().requires_grad_()
        ids = turn_ids_from_mask(mask)
        out = clipped_surrogate(logp, batch.old_logp, batch.advantages, mask, ids, level=level, **CLIPS)
        results.append((out.per_token, out.clip_excess, gradient(out.per_token.sum(), logp)))
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_one_turn_is_the_sequence_level(seed: int) -> None:
    batch = random_batch(seed)
    mask = torch.zeros_like(batch.mask)
    mask[:, 3:11] = True
    for turn, sequence in both(batch, mask, "turn", "sequence"):
        same("one turn = sequence level", turn, sequence, tolerance=0.0)


@pytest.mark.parametrize("seed", range(3))
def test_one_token_turns_are_the_token_level(seed: int) -> None:
    batch = random_batch(seed)
    mask = torch.zeros_like(batch.mask)
    mask[:, 1::2] = True
    for turn, token in both(batch, mask, "turn", "token"):
        same("one-token turns = token level", turn, token, tolerance=0.0)


def test_on_policy_all_levels_agree_when_the_advantage_is_constant_per_sequence() -> None:
    batch = random_batch(seed=5)
    advantages = batch.advantages[:, :1].expand_as(batch.advantages)
    counts = counts_of(batch.mask, batch.turn_ids)
    gradients = []
    for level in LEVELS:
        logp = batch.old_logp.clone().requires_grad_()
        out = clipped_surrogate(logp, batch.old_logp, advantages, batch.mask, batch.turn_ids, level=level, **CLIPS)
        assert out.ratio.eq(1.0).all() and out.clip_excess.eq(0.0).all()
        loss = REDUCTIONS["token_mean"](out.per_token, batch.mask, batch.turn_ids, counts)
        gradients.append(gradient(loss, logp))
    for other in gradients[1:]:
        same("ratios all 1: levels agree", other, gradients[0], tolerance=1e-15)


@pytest.mark.parametrize("level", LEVELS)
def test_zero_advantage_gives_zero_gradient(level: str) -> None:
    batch = random_batch(seed=2)
    logp = batch.logp.clone().requires_grad_()
    out = clipped_surrogate(
        logp, batch.old_logp, torch.zeros_like(logp), batch.mask, batch.turn_ids, level=level, **CLIPS
    )
    assert gradient(out.per_token.sum() + out.clip_excess.sum(), logp).eq(0.0).all()
    assert out.per_token.eq(0.0).all()


# --- invariances


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", [clipped_surrogate, cispo, reinforce])
def test_padding_and_row_order_do_not_matter(level: str, loss: object) -> None:
    batch = random_batch(seed=4)
    order = torch.tensor([3, 0, 4, 2, 1])
    options = {"level": level} | ({} if loss is reinforce else CLIPS)

    def run(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        logp = tensors[0].clone().requires_grad_()
        out = loss(logp, *tensors[1:], **options)  # type: ignore[operator]
        return out.per_token, gradient(out.per_token.sum(), logp)

    tensors = [*batch.five]
    value, slope = run(tensors)
    pads = [0.0, 0.0, 9.0, False, -1]
    wide = [torch.nn.functional.pad(x, (2, 3), value=p) for x, p in zip(tensors, pads, strict=True)]
    wide_value, wide_slope = run(wide)
    same("padding on both sides changes nothing", wide_value[:, 2:-3], value, tolerance=1e-15)
    same("padding on both sides changes nothing", wide_slope[:, 2:-3], slope, tolerance=1e-15)
    assert wide_slope[:, :2].eq(0).all() and wide_slope[:, -3:].eq(0).all()
    moved_value, moved_slope = run([x[order] for x in tensors])
    same("row order changes nothing", moved_value, value[order], tolerance=0.0)
    same("row order changes nothing", moved_slope, slope[order], tolerance=0.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", [clipped_surrogate, cispo, reinforce])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_lies_under_the_mask_never_leaks(level: str, loss: object, poison: float) -> None:
    batch = random_batch(seed=6)
    options = {"level": level} | ({} if loss is reinforce else CLIPS)
    clean = loss(*batch.five, **options)  # type: ignore[operator]
    logp, old_logp, advantages, mask, ids = batch.five
    logp, old_logp, advantages = (torch.where(mask, x, poison) for x in (logp, old_logp, advantages))
    logp.requires_grad_()
    out = loss(logp, old_logp, advantages, mask, ids, **options)  # type: ignore[operator]
    assert torch.equal(out.per_token, clean.per_token)
    assert torch.equal(out.clip_excess, clean.clip_excess)
    slope = gradient(out.per_token.sum() + out.clip_excess.sum(), logp)
    assert slope.isfinite().all() and slope[~mask].eq(0).all()
    for name, value in out.metrics.items():
        assert torch.equal(value, clean.metrics[name]), name


def test_overflow_under_the_mask_in_float32() -> None:
    # exp(-2 + 91) is inf in float32 and 0 * inf is NaN. The one action token has ratio 1: loss -1.
    logp = torch.tensor([[-2.0, -1.0]], requires_grad=True)
    old_logp = torch.tensor([[-91.0, -1.0]])
    mask = torch.tensor([[0, 1]])
    out = clipped_surrogate(
        logp,
        old_logp,
        torch.ones(1, 2),
        mask,
        turn_ids_from_mask(mask),
        level="token",
        clip_low=0.2,
        clip_high=0.2,
    )
    loss = REDUCTIONS["token_mean"](out.per_token, mask, turn_ids_from_mask(mask), counts_of(mask, mask - 1))
    assert loss.item() == -1.0
    assert gradient(loss, logp).tolist() == [[0.0, -1.0]]


def test_batch_without_action_tokens_stays_attached_with_zero_gradient() -> None:
    batch = random_batch(seed=1)
    empty = torch.zeros_like(batch.mask)
    ids = turn_ids_from_mask(empty)
    for level in LEVELS:
        logp = batch.logp.clone().requires_grad_()
        out = clipped_surrogate(logp, batch.old_logp, batch.advantages, empty, ids, level=level, **CLIPS)
        assert out.per_token.requires_grad
        assert gradient(out.per_token.sum(), logp).eq(0.0).all()
        assert all(value.eq(0) for value in out.metrics.values())


def test_old_logp_and_advantages_are_constants() -> None:
    batch = random_batch(seed=0)
    old_logp, advantages = batch.old_logp.clone().requires_grad_(), batch.advantages.clone().requires_grad_()
    for loss in (clipped_surrogate, cispo, reinforce):
        clips = {} if loss is reinforce else CLIPS
        out = loss(batch.logp, old_logp, advantages, batch.mask, batch.turn_ids, level="turn", **clips)
        assert not out.per_token.requires_grad and not out.clip_excess.requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_float32_follows_float64(level: str) -> None:
    batch = random_batch(seed=9)
    exact = clipped_surrogate(*batch.five, level=level, **CLIPS)
    logp, old_logp, advantages, mask, ids = batch.five
    single = clipped_surrogate(logp.float(), old_logp.float(), advantages.float(), mask, ids, level=level, **CLIPS)
    assert single.per_token.dtype == torch.float32
    same("float32 against float64", single.per_token, exact.per_token, tolerance=1e-5)


# --- the clip by hand


def test_clip_binds_only_where_it_lowers_the_objective() -> None:
    # max(-A r, -A clip(r)): r=0.5, A=1: -0.5; r=1.5, A=1: -1.2; r=0.5, A=-1: 0.8; r=1.5, A=-1: 1.5.
    losses = token_ratio_loss([(0.5, 1.0), (1.5, 1.0), (0.5, -1.0), (1.5, -1.0)])
    assert losses == pytest.approx([-0.5, -1.2, 0.8, 1.5], abs=1e-12)


def test_asymmetric_clip_moves_one_bound() -> None:
    # Upper bound 1.28: 1.5 -> 1.28 held, 1.25 free; lower bound 0.8 for A < 0: 0.7 -> 0.8 held, 0.9 free.
    losses = token_ratio_loss([(1.5, 1.0), (1.25, 1.0), (0.7, -1.0), (0.9, -1.0), (1.5, -1.0)], clip_high=0.28)
    assert losses == pytest.approx([-1.28, -1.25, 0.8, 0.9, 1.5], abs=1e-12)


def test_dual_clip_bounds_bad_actions_only() -> None:
    # A=+1, r=0.1: -0.1 untouched (a bound for all would say -3). A=-1: r=10 -> 3, r=2 -> 2. A=+1, r=5: -1.2.
    losses = token_ratio_loss([(0.1, 1.0), (10.0, -1.0), (2.0, -1.0), (5.0, 1.0)], dual_clip=3.0)
    assert losses == pytest.approx([-0.1, 3.0, 2.0, -1.2], abs=1e-12)


def test_dual_clip_must_exceed_one() -> None:
    with pytest.raises(ValueError, match=r"dual_clip must be above 1 .* got 1.0"):
        token_ratio_loss([(1.0, 1.0)], dual_clip=1.0)


def test_a_ratio_on_the_bound_keeps_its_gradient() -> None:
    # w = exp(0) = 1 and a clip of 0: the ratio sits on both bounds, and on-policy training must not stall.
    logp = torch.zeros(1, 1, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    out = clipped_surrogate(
        logp,
        torch.zeros(1, 1),
        torch.ones(1, 1),
        mask,
        mask.long() - 1,
        level="token",
        clip_low=0.0,
        clip_high=0.0,
    )
    assert gradient(out.per_token.sum(), logp).item() == -1.0


# --- metrics


@pytest.mark.parametrize("level", LEVELS)
def test_metrics_are_sums_that_add_up_over_microbatches(level: str) -> None:
    batch = random_batch(seed=8)
    whole = clipped_surrogate(*batch.five, level=level, dual_clip=1.4, **CLIPS).metrics
    parts = [
        clipped_surrogate(*(x[i : i + 1] for x in batch.five), level=level, dual_clip=1.4, **CLIPS).metrics
        for i in range(5)
    ]
    for name, value in whole.items():
        assert value.ndim == 0 and not value.requires_grad
        values = [part[name] for part in parts]
        together = max(values) if name.startswith("max_") else sum(values)
        torch.testing.assert_close(together, value, rtol=1e-13, atol=1e-13)


def test_metrics_by_hand() -> None:
    # Token ratios 2, 0.5, 1.1, 0.7 with A = 1, -1, 1, 1 and clips 0.2: 2 is held above, 0.5 below; 0.7 with
    # A > 0 lies outside but keeps its gradient. Sum of ratios 4.3, of squares 4 + 0.25 + 1.21 + 0.49 = 5.95.
    ratio = torch.tensor([[2.0, 0.5, 1.1, 0.7]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    ids = turn_ids_from_mask(mask)
    old = torch.zeros_like(ratio)
    out = clipped_surrogate(ratio.log(), old, advantages, mask, ids, level="token", clip_low=0.2, clip_high=0.2)
    got = {name: value.item() for name, value in out.metrics.items()}
    counts = (got["tokens"], got["clipped_tokens"], got["clipped_tokens_high"], got["clipped_tokens_low"])
    assert counts == (4, 2, 1, 1)
    assert got["sum_ratio"] == pytest.approx(4.3)
    assert got["sum_ratio_squared"] == pytest.approx(5.95)
    assert got["max_ratio"] == pytest.approx(2.0)
    k1 = -math.log(2.0 * 0.5 * 1.1 * 0.7)
    assert got["sum_kl_k1"] == pytest.approx(k1)
    assert got["sum_kl"] == pytest.approx(4.3 - 4 + k1)  # sum of (r - 1 - log r)
    two_sided = clip_fractions(ratio.log(), old, mask, ids, clip_low=0.2, clip_high=0.2)
    active = clip_fractions(ratio.log(), old, mask, ids, clip_low=0.2, clip_high=0.2, advantages=advantages)
    assert (two_sided["clipped_token_high"].item(), two_sided["clipped_token_low"].item()) == (1, 2)
    assert (active["clipped_token_high"].item(), active["clipped_token_low"].item()) == (1, 1)
    # one turn with mean log-ratio ln(0.77) / 4, ratio 0.937: inside, at both coarser levels
    assert two_sided["clipped_turn"].item() == two_sided["clipped_sequence"].item() == 0


@pytest.mark.parametrize("seed", range(3))
def test_clip_counts_of_the_three_levels_equal_the_loops(seed: int) -> None:
    batch = random_batch(seed)
    counts = clip_fractions(batch.logp, batch.old_logp, batch.mask, batch.turn_ids, **CLIPS)
    data = [x.tolist() for x in (batch.logp, batch.old_logp, batch.mask)]
    assert counts["tokens"].item() == int(batch.mask.sum())
    for level in LEVELS:
        ratios = [w for row in loops.ratios(*data, level) for w in row if w is not None]
        assert counts[f"clipped_{level}_high"].item() == sum(w > 1.28 for w in ratios)
        assert counts[f"clipped_{level}_low"].item() == sum(w < 0.8 for w in ratios)
        assert counts[f"clipped_{level}"].item() == sum(w > 1.28 or w < 0.8 for w in ratios)
