"""The factor of an optimiser step: independent of the split; C against a backward of its own; scopes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_algos.batch import Batch, collate
from sorl_algos.learner import Learner, make_learner
from sorl_algos.losses.clip_norm import clip_sums, normalisation_factor
from sorl_algos.losses.reduce import counts_of
from sorl_algos.losses.segments import level_ratio
from sorl_algos.models import Policy, score, token_logprobs
from sorl_algos.normalisation import ClipNormaliser
from sorl_algos.trainer import estimate_advantages, micro_loss, optimiser_step, policy_terms
from tests.sorl_algos.proofs import same
from tests.sorl_algos.small_game import made_up, small_config

ROWS = [
    "ppo",
    "turn_ppo",
    "s_ppo",
    "so_ppo",
    "grpo",
    "s_grpo",
    "so_grpo",
    "gspo",
    "rloo",
    "dr_grpo",
    "cispo",
    "reinforce",
]


def learner_for(tmp_path: Path, make_model: Any, **changes: Any) -> Learner:
    """In float64, so that a difference is a mistake and not rounding."""
    config = small_config(tmp_path, questions_per_update=4, minibatch_sequences=8, **changes)
    torch.manual_seed(0)
    policy = Policy(make_model(), shared_critic=config.algorithm_row().needs_critic)
    if policy.value_head is not None:
        torch.nn.init.normal_(policy.value_head.outer.weight)
    return make_learner(config, policy.double())


def off_policy(learner: Learner, spread: float = 1.5) -> Batch:
    """Eight scored episodes with advantages, whose old log-probabilities are moved so that the clip is active."""
    batch = collate(made_up(8, seed=3, reward=lambda row: float(row % 3)), 0)
    batch = batch.replace(rewards=batch.rewards.double(), rollout_logp=batch.rollout_logp.double())
    batch, _ = score(batch, learner.policy, microbatch_sequences=8)
    batch = estimate_advantages(batch, learner.algorithm, learner.config)
    noise = torch.randn(batch.token_ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert batch.old_logp is not None
    noise = noise - noise[:, :1].abs()  # with a drift that a row's tokens share, so that turns are clipped too
    return batch.replace(old_logp=batch.old_logp + spread * noise * batch.loss_mask)


def gradients(learner: Learner, batch: Batch, micros: list[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Scaled policy gradients and the report, with the minibatch cut into the given pieces."""
    config = learner.config
    parameters = [p for p in learner.raw_policy.lm.parameters() if p.requires_grad]
    learner.raw_policy.zero_grad(set_to_none=True)
    normaliser = ClipNormaliser(learner.algorithm, parameters, clip_low=config.clip_low, clip_high=config.clip_high)
    counts = counts_of(batch.loss_mask, batch.turn_ids)
    for micro in micros:
        loss, _ = micro_loss(learner, micro, counts, normaliser, only_critic=False)
        loss.backward()
    report = normaliser.scale_gradients()
    return [p.grad.clone() for p in parameters if p.grad is not None], report


@pytest.mark.parametrize("changes", [
    *({"algorithm": name} for name in ROWS),
    {"algorithm": "so_ppo", "normalisation": "gradient_norm", "threshold": 1.0},
    {"algorithm": "so_ppo", "normalisation": "gradient_ratio", "threshold": 1.0},
    {"algorithm": "so_ppo", "normalisation": "effective_sample_size"},
    {"algorithm": "s_grpo", "scope": "minibatch"},
    {"algorithm": "so_ppo", "threshold": 0.2, "reduction": "turn_mean", "advantages": "turn_gae"},
], ids=lambda changes: "-".join(str(value) for value in changes.values()))  # fmt: skip
def test_eight_microbatches_of_one_equal_one_of_eight(changes: dict[str, Any], make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(tmp_path, make_model, **changes)
    batch = off_policy(learner)
    whole, report = gradients(learner, batch, [batch])
    singles = list(batch.microbatches(1))
    for split in (singles, singles[::-1], [*batch.microbatches(3)]):
        pieces, own = gradients(learner, batch, split)
        assert own.keys() == report.keys()
        for got, want in zip(pieces, whole, strict=True):
            same(f"1 x 8 = 8 x 1 microbatches: {changes['algorithm']}", got, want, tolerance=1e-9)
        for name in report:
            same("1 x 8 = 8 x 1: factor and rho", own[name], report[name], tolerance=1e-7)
    assert any(gradient.any() for gradient in whole)
    assert all(float(report["factor"]) < 1 for _ in report.items())  # where there is one, it bites


def test_microbatch_scope_depends_on_the_split(make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(tmp_path, make_model, scope="microbatch", threshold=0.5)
    batch = off_policy(learner)
    whole, _ = gradients(learner, batch, [batch])
    pieces, _ = gradients(learner, batch, list(batch.microbatches(1)))
    assert max(float((a - b).abs().max()) for a, b in zip(whole, pieces, strict=True)) > 1e-4


@pytest.mark.parametrize("level", ["token", "turn"])
def test_the_factor_is_that_of_the_whole_minibatch(level: Any, make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(tmp_path, make_model, trigger_level=level, threshold=0.5)
    batch = off_policy(learner)
    scaled, report = gradients(learner, batch, list(batch.microbatches(2)))
    assert batch.old_logp is not None and batch.advantages is not None
    logp = token_logprobs(learner.policy, batch).logp.detach()
    ratio = level_ratio(logp, batch.old_logp, batch.loss_mask, batch.turn_ids, level)
    sums = clip_sums(ratio, batch.advantages, batch.loss_mask, clip_low=0.2, clip_high=0.2)
    factor, rho = normalisation_factor(sums, 0.5)
    same("factor of the minibatch", report["factor"], factor, tolerance=1e-9)
    same("rho of the minibatch", report["rho"], rho, tolerance=1e-9)
    assert float(factor) < 1
    plain = learner_for(tmp_path, make_model, normalisation="none")
    unscaled, nothing = gradients(plain, batch, [batch])
    assert nothing == {}
    for got, want in zip(scaled, unscaled, strict=True):
        same("scaled gradient = factor x gradient", got, factor * want, tolerance=1e-9)


def separate_c(learner: Learner, batch: Batch) -> list[Tensor]:
    """C by its definition: gradient of the free surrogate minus that of the clipped one, whole minibatch at once."""
    assert batch.old_logp is not None and batch.advantages is not None
    row, config = learner.algorithm, learner.config
    parameters = list(learner.raw_policy.lm.parameters())
    counts = counts_of(batch.loss_mask, batch.turn_ids)
    logp = token_logprobs(learner.policy, batch).logp
    ratio = level_ratio(logp, batch.old_logp, batch.loss_mask, batch.turn_ids, row.level)
    free = ratio * batch.advantages
    held = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages
    excess = torch.where(batch.loss_mask, free - torch.minimum(free, held), 0.0)
    return list(torch.autograd.grad(row.reduce(excess, batch.loss_mask, batch.turn_ids, counts), parameters))


@pytest.mark.parametrize("algorithm", ["so_ppo", "s_ppo", "gspo"])
@pytest.mark.parametrize("name", ["gradient_norm", "gradient_ratio"])
def test_c_is_the_gradient_of_the_excess_parameter_by_parameter(
    name: str, algorithm: str, make_model: Any, tmp_path: Path
) -> None:
    learner = learner_for(tmp_path, make_model, algorithm=algorithm, normalisation=name)
    batch = off_policy(learner)
    parameters = list(learner.raw_policy.lm.parameters())
    normaliser = ClipNormaliser(learner.algorithm, parameters, clip_low=0.2, clip_high=0.2)
    counts = counts_of(batch.loss_mask, batch.turn_ids)
    for micro in batch.microbatches(3):
        loss, _ = micro_loss(learner, micro, counts, normaliser, only_critic=False)
        loss.backward()
    expected = separate_c(learner, batch)
    assert normaliser._excess is not None
    for got, want in zip(normaliser._excess, expected, strict=True):
        same("C of the trainer = separate backward", got, want, tolerance=1e-9)
    clipped_norm = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum().sqrt()
    report = normaliser.scale_gradients()
    norm = torch.stack([gradient.square().sum() for gradient in expected]).sum().sqrt()
    assert float(norm) > 0
    same("C norm", report["excess_norm"], norm, tolerance=1e-6)
    rho = norm if name == "gradient_norm" else norm / clipped_norm
    same("rho of a gradient estimator", report["rho"], rho, tolerance=1e-5)
    assert 0 < float(report["factor"]) <= 1


@pytest.mark.parametrize("name", ["coefficient_ratio", "gradient_norm", "gradient_ratio"])
def test_the_factor_is_one_when_nothing_is_clipped_and_never_above(name: str, make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(tmp_path, make_model, normalisation=name, threshold=1e-6)
    calm = off_policy(learner, spread=0.0)
    _, report = gradients(learner, calm, list(calm.microbatches(2)))
    assert float(report["factor"]) == 1.0 and float(report["rho"]) == 0.0
    for spread in (0.3, 1.0, 3.0):
        wild = off_policy(learner, spread=spread)
        _, report = gradients(learner, wild, list(wild.microbatches(2)))
        assert 0 < float(report["factor"]) <= 1.0 and float(report["rho"]) > 0
        same("factor = min(1, 1 / rho)", report["factor"] * report["rho"].clamp(min=1), torch.ones(()), tolerance=1e-6)


def test_only_the_policy_is_scaled(make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(tmp_path, make_model, threshold=0.1)
    batch = off_policy(learner)
    head = learner.raw_policy.value_head
    gradients(learner, batch, [batch])
    scaled = head.outer.weight.grad.clone()
    plain = learner_for(tmp_path, make_model, normalisation="none")
    gradients(plain, batch, [batch])
    same("the critic's gradient is not scaled", scaled, plain.raw_policy.value_head.outer.weight.grad, tolerance=1e-9)


@pytest.mark.parametrize("name", ["gradient_norm", "gradient_ratio"])
def test_gradient_estimators_at_microbatch_scope(name: str, make_model: Any, tmp_path: Path) -> None:
    """One microbatch is the minibatch; several have a factor each, which depends on the split."""
    micro = learner_for(tmp_path, make_model, normalisation=name, scope="microbatch")
    mini = learner_for(tmp_path, make_model, normalisation=name)
    batch = off_policy(mini)
    alone, nothing = gradients(micro, batch, [batch])
    whole, report = gradients(mini, batch, [batch])
    assert nothing == {} and float(report["factor"]) < 1
    for got, want in zip(alone, whole, strict=True):
        same("one microbatch = the minibatch", got, want, tolerance=1e-6)
    pieces, _ = gradients(micro, batch, list(batch.microbatches(1)))
    assert max(float((a - b).abs().max()) for a, b in zip(pieces, whole, strict=True)) > 1e-6
    # the factors are logged as those inside a loss are: their sum, their number, the largest rho
    counts = counts_of(batch.loss_mask, batch.turn_ids)
    normaliser = ClipNormaliser(micro.algorithm, list(micro.raw_policy.lm.parameters()), clip_low=0.2, clip_high=0.2)
    _, sums = micro_loss(micro, batch, counts, normaliser, only_critic=False)
    assert float(sums["factors"]) == 1 and float(sums["sum_factor"]) == pytest.approx(float(report["factor"]), rel=1e-5)
    assert float(sums["max_rho"]) == pytest.approx(float(report["rho"]), rel=1e-5)


def test_rows_with_clipped_tokens_alone_give_the_same_excess_gradient(tmp_path: Path, make_model: Any) -> None:
    """Of eight rows two are clipped, so their excess is taken by a forward of their own: the same norm of C."""
    learner = learner_for(tmp_path, make_model, algorithm="ppo", normalisation="gradient_norm")
    calm = off_policy(learner, spread=0.0)
    moved = off_policy(learner).old_logp
    assert calm.old_logp is not None and moved is not None
    old_logp = calm.old_logp.clone()
    old_logp[[2, 5]] = moved[[2, 5]]
    batch = calm.replace(old_logp=old_logp)
    counts = counts_of(batch.loss_mask, batch.turn_ids)

    def norm(among: int) -> Tensor:
        normaliser = ClipNormaliser(learner.algorithm, learner.policy_parameters, clip_low=0.2, clip_high=0.2)
        sizes: list[int] = []

        def terms(rows: Batch) -> tuple[Tensor, Any]:
            logp = token_logprobs(learner.policy, rows).logp
            return logp, policy_terms(learner, logp, rows, counts)

        def again(rows: Batch) -> Tensor:
            sizes.append(len(rows))
            return terms(rows)[1][2]

        for start in range(0, 8, among):
            micro = batch.rows(slice(start, start + among))
            logp, (out, loss, excess) = terms(micro)
            normaliser.gather(out, logp, micro, loss, excess, again)
        assert sizes == ([2] if among == 8 else []), "alone in its micro-batch a row takes the second backward"
        return normaliser.scale_gradients()["excess_norm"]

    whole, ones = norm(8), norm(1)
    assert ones > 0
    same("normalisation: C from the clipped rows = C from all rows", whole, ones, tolerance=1e-12)


def test_the_norm_of_the_clipping_bias_can_be_measured_for_any_algorithm(tmp_path: Path, make_model: Any) -> None:
    norms = []
    for settings in ({"normalisation": "gradient_norm"}, {}):
        learner = learner_for(tmp_path, make_model, algorithm="ppo", **settings)
        batch = off_policy(learner)
        counts = counts_of(batch.loss_mask, batch.turn_ids)
        normaliser = ClipNormaliser(
            learner.algorithm, learner.policy_parameters, clip_low=0.2, clip_high=0.2, measure=not settings
        )
        micro_loss(learner, batch, counts, normaliser, only_critic=False)
        report = normaliser.scale_gradients()
        assert ("factor" in report) == bool(settings), "measuring changes nothing"
        norms.append(report["excess_norm"])
    assert norms[0] > 0 and torch.equal(norms[0], norms[1])


def test_the_measured_norm_takes_one_factor_for_the_microbatch(tmp_path: Path, make_model: Any) -> None:
    """Three of eight rows are clipped: a forward of these alone would scale their excess by a factor of their own."""
    norms = []
    for scope in ("microbatch", "minibatch"):
        learner = learner_for(tmp_path, make_model, algorithm="s_ppo", scope=scope, threshold=1e-3)
        calm, moved = off_policy(learner, spread=0.0), off_policy(learner).old_logp
        assert calm.old_logp is not None and moved is not None
        old_logp = calm.old_logp.clone()
        old_logp[[2, 5, 6]] = moved[[2, 5, 6]]
        batch = calm.replace(old_logp=old_logp)
        counts = counts_of(batch.loss_mask, batch.turn_ids)
        normaliser = ClipNormaliser(
            learner.algorithm, learner.policy_parameters, clip_low=0.2, clip_high=0.2, measure=True
        )
        micro_loss(learner, batch, counts, normaliser, only_critic=False)
        norms.append(normaliser.scale_gradients())
    inside, after = (report["excess_norm"] for report in norms)
    factor = norms[1]["factor"]
    assert 0 < factor < 1
    same("norm of C, microbatch scope = factor x norm of C", inside / (factor * after), torch.ones(()), tolerance=1e-5)


def moved(learner: Learner, batch: Batch) -> tuple[list[Tensor], float]:
    """By how much one optimiser step moved each policy parameter, and its factor; the rate stays as it was."""
    before = [parameter.detach().clone() for parameter in learner.policy_parameters]
    rates = [group["lr"] for group in learner.policy_optimizer.param_groups]
    report = optimiser_step(learner, batch, update=99)
    assert [group["lr"] for group in learner.policy_optimizer.param_groups] == rates
    after = [parameter.detach() for parameter in learner.policy_parameters]
    return [new - old for new, old in zip(after, before, strict=True)], float(report["step/factor"])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_factor_on_the_step_is_what_adam_cannot_take_back(optimizer: str, make_model: Any, tmp_path: Path) -> None:
    """Plain SGD cannot tell the two apart; Adam's first step has the size of its rate, whatever the gradient's."""
    steps = {}
    for where in ("gradient", "step"):
        changes = {"threshold": 0.2, "factor_on": where, "optimizer": optimizer, "max_grad_norm": 1e9}
        learner = learner_for(tmp_path, make_model, **changes)
        steps[where], factor = moved(learner, off_policy(learner))
        assert factor < 0.9
    on_gradient, on_step = (torch.cat([part.flatten() for part in steps[name]]) for name in ("gradient", "step"))
    share = float(on_step.abs().sum() / on_gradient.abs().sum())
    assert share == pytest.approx(1.0 if optimizer == "sgd" else factor, rel=1e-3)
