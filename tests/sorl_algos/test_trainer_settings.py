"""Settings of a run that act inside the loop: KL, early stop, critic, skips, what is kept, and the whole grid."""

from __future__ import annotations

import json
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sorl_algos.algorithms import ALGORITHMS
from sorl_algos.batch import Batch, collate
from sorl_algos.learner import Learner, make_learner
from sorl_algos.losses.reduce import counts_of
from sorl_algos.metrics import read_metrics
from sorl_algos.models import Critic, Policy, score
from sorl_algos.normalisation import ClipNormaliser
from sorl_algos.off_policy import correct
from sorl_algos.trainer import estimate_advantages, micro_loss, optimiser_step, train
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.small_game import ReplaySource, made_up, small_config


def learner_of(tmp_path: Path, make_model: Any, **changes: Any) -> Learner:
    """With a reference of other weights where the settings need one."""
    config = small_config(tmp_path, **changes)
    torch.manual_seed(0)
    needs = config.algorithm_row().needs_critic
    reference = Policy(make_model(1)) if config.needs_reference else None
    critic = Critic(make_model()) if needs and config.critic == "own" else None
    policy = Policy(make_model(), shared_critic=needs and config.critic == "shared")
    return make_learner(config, policy, critic=critic, reference=reference)


def ready(learner: Learner, rows: int = 8) -> Batch:
    batch, _ = score(
        collate(made_up(rows, seed=4), 0),
        learner.policy,
        critic=learner.critic,
        reference=learner.reference,
        microbatch_sequences=8,
    )
    return estimate_advantages(batch, learner.algorithm, learner.config, kl_scale=learner.kl_scale)


def loss_of(learner: Learner, batch: Batch) -> float:
    normaliser = ClipNormaliser(learner.algorithm, learner.policy_parameters, clip_low=0.2, clip_high=0.2)
    counts = counts_of(batch.loss_mask, batch.turn_ids)
    return float(micro_loss(learner, batch, counts, normaliser, only_critic=False)[0].detach())


def mean_kl(batch: Batch, estimator: str) -> float:
    """The loop's estimate, mean over action tokens."""
    assert batch.old_logp is not None and batch.ref_logp is not None
    pairs = [
        (float(batch.old_logp[row, column]), float(batch.ref_logp[row, column]))
        for row, column in batch.loss_mask.nonzero().tolist()
    ]
    return sum(loops.kl(logp, ref, estimator) for logp, ref in pairs) / len(pairs)


# KL


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_by_each_estimator(estimator: Any, make_model: Any, tmp_path: Path) -> None:
    """On the sampling policy it adds coefficient x scale x the mean estimate to the loss."""
    plain = learner_of(tmp_path, make_model, algorithm="ppo")
    learner = learner_of(
        tmp_path, make_model, algorithm="ppo", kl_loss_coef=0.5, kl_loss_estimator=estimator
    )
    learner.kl_scale = 3.0
    batch = ready(learner)
    want = 0.5 * 3.0 * mean_kl(batch, estimator)
    assert abs(want) > 1e-4
    assert loss_of(learner, batch) - loss_of(plain, batch) == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_by_each_estimator(estimator: Any, make_model: Any, tmp_path: Path) -> None:
    """The advantage of an episode's first action token (gamma = lam = 1, values 0) is its reward less the KL's sum."""
    learner = learner_of(
        tmp_path, make_model, algorithm="ppo", kl_reward_coef=0.5, kl_reward_estimator=estimator,
        whiten_advantages=False,
    )  # fmt: skip
    learner.kl_scale = 2.0
    batch = ready(learner)
    assert batch.advantages is not None and batch.old_logp is not None and batch.ref_logp is not None
    for row in range(len(batch)):
        columns = batch.loss_mask[row].nonzero().flatten().tolist()
        penalties = [loops.kl(float(batch.old_logp[row, c]), float(batch.ref_logp[row, c]), estimator) for c in columns]
        want = float(batch.rewards[row].sum()) - 0.5 * 2.0 * sum(penalties)
        assert float(batch.advantages[row, columns[0]]) == pytest.approx(want, abs=1e-4)


def test_the_adaptive_kl_follows_its_equation_and_goes_with_the_checkpoint(make_model: Any, tmp_path: Path) -> None:
    """scale x (1 + clip(KL / target - 1, -0.2, 0.2) x episodes / horizon), 8 episodes an update."""
    settings: dict[str, Any] = {
        "algorithm": "grpo", "critic": "none", "kl_loss_coef": 0.1, "kl_target": 0.05, "kl_horizon_episodes": 16
    }  # fmt: skip
    for updates in (2, 4):
        learner = learner_of(tmp_path, make_model, updates=updates, **settings)
        train(learner.config, learner, ReplaySource([made_up(8, seed=1), made_up(8, seed=2)]), pad_id=0)
    scale = 1.0
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert len(lines) == 4
    for line in lines:
        scale *= 1 + max(-0.2, min(0.2, line["ref_kl"] / 0.05 - 1)) * 8 / 16
        assert line["kl_scale"] == pytest.approx(scale, rel=1e-5)
    assert learner.kl_scale == pytest.approx(scale, rel=1e-5) and scale != 1.0


def test_the_adaptive_kl_cannot_turn_its_sign(tmp_path: Path) -> None:
    """8 episodes an update: over a horizon of 1 the factor could be 1 - 0.2 x 8, a reward for leaving the reference."""
    with pytest.raises(ValueError, match="kl_horizon_episodes"):
        small_config(tmp_path, kl_loss_coef=0.1, kl_target=0.05, kl_horizon_episodes=1)


def test_the_mismatch_is_reported_when_the_ratio_is_taken_to_the_engine(make_model: Any, tmp_path: Path) -> None:
    """`made_up` episodes carry log-probabilities that no model gave: the same mismatch is seen either way."""
    seen = []
    for old_logprobs in ("trainer", "engine"):
        place = tmp_path / old_logprobs
        learner = learner_of(place, make_model, updates=1, old_logprobs=old_logprobs)
        train(learner.config, learner, ReplaySource([made_up(8, seed=1)]), pad_id=0)
        seen.append(read_metrics(place / "metrics.jsonl")[0])
    assert seen[0]["mismatch_kl"] == seen[1]["mismatch_kl"] > 0.01
    assert seen[0]["mismatch_ratio_max_turn/0"] == seen[1]["mismatch_ratio_max_turn/0"]


def test_passes_end_early_by_kl(make_model: Any, tmp_path: Path) -> None:
    """A limit below any KL allows one pass, one above it all; in between it depends on the pass."""
    seen = {}
    for limit in (1e-12, 1e9):
        learner = learner_of(tmp_path / str(limit), make_model, updates=1, passes=3, lr=1e-2, max_pass_kl=limit)
        train(learner.config, learner, ReplaySource([made_up(8)]), pad_id=0)
        [line] = read_metrics(tmp_path / str(limit) / "metrics.jsonl")
        seen[limit] = line["passes"]
    assert seen == {1e-12: 1.0, 1e9: 3.0}


def test_value_clipping_bounds_the_critics_move(make_model: Any, tmp_path: Path) -> None:
    """Values moved up by 1 where the return is 0.2 above the old value: clipped to old + 0.1, errors 0.8 and 0.1."""
    found = {}
    for value_clip in (None, 0.1):
        learner = learner_of(tmp_path, make_model, algorithm="ppo", value_clip=value_clip)
        batch = ready(learner)
        assert batch.values is not None
        batch = batch.replace(values=batch.values - 1.0, returns=batch.values - 0.8)
        normaliser = ClipNormaliser(learner.algorithm, learner.policy_parameters, clip_low=0.2, clip_high=0.2)
        counts = counts_of(batch.loss_mask, batch.turn_ids)
        _, sums = micro_loss(learner, batch, counts, normaliser, only_critic=True)
        found[value_clip] = float(sums["value_loss"])
    # the larger error counts: 0.5 x 0.8^2 both times
    assert found == {None: pytest.approx(0.32), 0.1: pytest.approx(0.32)}
    learner = learner_of(tmp_path, make_model, algorithm="ppo", value_clip=0.1)
    batch = ready(learner)
    assert batch.values is not None
    batch = batch.replace(values=batch.values - 1.0, returns=batch.values + 0.0)  # the move was right: held back
    normaliser = ClipNormaliser(learner.algorithm, learner.policy_parameters, clip_low=0.2, clip_high=0.2)
    _, sums = micro_loss(learner, batch, counts, normaliser, only_critic=True)
    assert float(sums["value_loss"]) == pytest.approx(0.5 * 0.9**2, rel=1e-5)


def test_the_gradient_norm_is_cut_after_the_normalisation(make_model: Any, tmp_path: Path) -> None:
    """The norm that is logged and cut is factor x the norm without a normalisation; then the step is a cut one."""
    norms, moved = {}, {}
    for normalisation in ("none", "coefficient_ratio"):
        for limit in (1e9, 1e-3):
            learner = learner_of(
                tmp_path, make_model, algorithm="turn_ppo", normalisation=normalisation, max_grad_norm=limit,
                optimizer="sgd", lr=1.0,
            )  # fmt: skip
            batch = ready(learner)
            assert batch.old_logp is not None and batch.advantages is not None
            noise = torch.randn(batch.old_logp.shape, generator=torch.Generator().manual_seed(1))
            batch = batch.replace(old_logp=batch.old_logp + 2.0 * noise * batch.loss_mask)
            before = [parameter.detach().clone() for parameter in learner.policy_parameters]
            totals = optimiser_step(learner, batch, update=0)
            norms[normalisation, limit] = float(totals["step/grad_norm"])
            steps = [new.detach() - old for old, new in zip(before, learner.policy_parameters, strict=True)]
            moved[normalisation, limit] = float(torch.stack([step.square().sum() for step in steps]).sum().sqrt())
            factor = float(totals.get("step/factor", torch.ones(())))
    assert 0 < factor < 0.9
    for limit in (1e9, 1e-3):
        assert norms["coefficient_ratio", limit] == pytest.approx(factor * norms["none", limit], rel=1e-4)
    assert moved["coefficient_ratio", 1e9] == pytest.approx(factor * moved["none", 1e9], rel=1e-4)
    for normalisation in ("none", "coefficient_ratio"):
        assert moved[normalisation, 1e-3] == pytest.approx(1e-3, rel=1e-3)  # both are cut to the same length


# What is skipped, dropped and kept


def bad(seed: int) -> list[Any]:
    return made_up(8, seed=seed, reward=lambda row: 1e30)  # its square is past float32


def test_the_count_of_skips_survives_a_resumption(make_model: Any, tmp_path: Path) -> None:
    source = ReplaySource([bad(0), made_up(8, seed=1), bad(2)])  # two minibatches each

    def go_on(updates: int) -> dict[str, Any]:
        learner = learner_of(tmp_path, make_model, updates=updates, max_skipped_minibatches=3)
        return train(learner.config, learner, source, pad_id=0)

    assert go_on(2)["skipped_minibatches"] == 2
    with (tmp_path / "skipped_minibatches.jsonl").open("a") as file:  # of an update that was never saved
        file.write('{"update": 2, "rank": 0, "question_ids": ["q0"], "skipped": 3}\n')
    with pytest.raises(RuntimeError, match="4 minibatches had a loss or gradient that was not finite"):
        go_on(3)
    lines = [json.loads(line) for line in (tmp_path / "skipped_minibatches.jsonl").read_text().splitlines()]
    assert [(line["update"], line["skipped"]) for line in lines] == [(0, 1), (0, 2), (2, 3), (2, 4)]
    with pytest.raises(RuntimeError, match="4 minibatches"):  # a restart does not wipe the slate clean
        go_on(3)


def test_a_loss_that_is_not_finite_is_skipped_too(make_model: Any, tmp_path: Path) -> None:
    """An infinite KL term without slope: every gradient is finite, the loss is not."""
    learner = learner_of(tmp_path, make_model, algorithm="ppo", value_clip=0.1)
    batch = ready(learner, rows=4)
    assert batch.values is not None
    before = [parameter.detach().clone() for parameter in learner.raw_policy.parameters()]
    # the clipped value is the worse one everywhere, its error overflows, and it has no slope
    huge = torch.full_like(batch.values, 3e38)
    totals = optimiser_step(learner, batch.replace(values=-huge, returns=huge), update=0)
    assert "skipped_minibatches" in totals
    assert all(torch.equal(old, new) for old, new in zip(before, learner.raw_policy.parameters(), strict=True))


def test_the_best_checkpoint_before_a_collapse_is_kept(make_model: Any, tmp_path: Path) -> None:
    """Skips in three updates running raise the alarm; what was saved last before that stays, whatever comes later."""
    batches = [made_up(8, seed=seed) for seed in range(4)] + [bad(seed) for seed in range(5)]
    learner = learner_of(
        tmp_path, make_model, updates=9, save_every=1, keep_checkpoints=1, max_skipped_minibatches=99
    )
    summary = train(learner.config, learner, ReplaySource(batches), pad_id=0)
    alarms = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    first = alarms[0]["update"]
    assert 4 <= first < 8 and summary["alarm_update"] == first + 1
    assert summary["before_collapse_update"] == first  # saved after every update, so `first` updates were done
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [f"step_{first:06d}", "step_000009"]


def test_without_an_alarm_nothing_is_kept_for_it(make_model: Any, tmp_path: Path) -> None:
    learner = learner_of(tmp_path, make_model, updates=3, keep_checkpoints=1)
    summary = train(learner.config, learner, ReplaySource([made_up(8)]), pad_id=0)
    assert summary["before_collapse_update"] is None
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


def test_an_update_without_a_usable_episode_ends_the_run_with_a_remedy(make_model: Any, tmp_path: Path) -> None:
    items = [replace(item, stop="retrieval_error") for item in made_up(8)]
    learner = learner_of(tmp_path, make_model)
    with pytest.raises(ValueError, match=r"all 8 episodes of an update were dropped .* retrieval server's log"):
        train(learner.config, learner, ReplaySource([items]), pad_id=0)


@pytest.mark.parametrize("correction", ["icepop", "rejection", "truncated_is", "decoupled"])
def test_a_run_with_a_correction_logs_it(correction: Any, make_model: Any, tmp_path: Path) -> None:
    """The made-up engine reports log-probabilities that have nothing to do with the model: all is far off."""
    learner = learner_of(
        tmp_path, make_model, updates=1, correction=correction, correction_level="turn", rejected_leave_denominator=True
    )
    train(learner.config, learner, ReplaySource([made_up(8)]), pad_id=0)
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    dropping = correction in ("icepop", "rejection")
    assert (line["correction_rejected"] > 0.5) == dropping and 0 <= line["correction_ess"] <= 1
    assert "correction_max_ratio" in line and "correction_truncated" in line


# The grid


@pytest.mark.parametrize("advantages", ["gae", "turn_gae", "group", "leave_one_out"])
@pytest.mark.parametrize("normalisation", ["none", "coefficient_ratio", "gradient_norm", "gradient_ratio"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_the_whole_grid_takes_a_step(
    level: Any, normalisation: Any, advantages: Any, make_model: Any, tmp_path: Path
) -> None:
    learner = learner_of(
        tmp_path, make_model, level=level, normalisation=normalisation, advantages=advantages,
        clip_low=0.01, clip_high=0.01,
    )  # fmt: skip
    row = learner.algorithm
    assert (row.level, row.advantages, row.normalisation is None) == (level, advantages, normalisation == "none")
    batch = ready(learner, rows=4)
    assert batch.old_logp is not None
    before = [parameter.detach().clone() for parameter in learner.policy_parameters]
    totals = optimiser_step(learner, batch.replace(old_logp=batch.old_logp - 0.1 * batch.loss_mask), update=0)
    assert "skipped_minibatches" not in totals and ("step/factor" in totals) == (normalisation != "none")
    moved = [not torch.equal(old, new) for old, new in zip(before, learner.policy_parameters, strict=True)]
    assert sum(moved) > len(moved) / 2


# No waiting for the device


class NoTransfer(TorchDispatchMode):
    """Refuses what fetches a number from the device (`.item()`, `float()`, `bool()`, `if tensor`).

    transformers looks once a forward whether the attention mask is all true: that is its own affair.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fetches = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        if fetches and not any("masking_utils" in frame.filename for frame in traceback.extract_stack()):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def test_the_watch_does_see_a_transfer() -> None:
    for fetch in (Tensor.item, float, bool):
        with NoTransfer(), pytest.raises(AssertionError, match="waits for the device"):
            fetch(torch.ones(()))


@pytest.mark.parametrize("critic", ["shared", "own"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_loss_path_does_not_wait_for_the_device(
    name: str, critic: Any, make_model: Any, tmp_path: Path
) -> None:
    """Forward, loss, sums for the log and backward of a micro-batch, with a correction and KL in the loss."""
    learner = learner_of(
        tmp_path, make_model, algorithm=name, critic=critic, kl_loss_coef=0.1, correction="icepop",
        rejected_leave_denominator=True,
    )  # fmt: skip
    batch, _ = correct(ready(learner, rows=4), learner.config)
    assert batch.counted_mask is not None
    counts, kept = counts_of(batch.loss_mask, batch.turn_ids), counts_of(batch.counted_mask, batch.turn_ids)
    normaliser = ClipNormaliser(learner.algorithm, learner.policy_parameters, clip_low=0.2, clip_high=0.2)
    with NoTransfer():
        loss, sums = micro_loss(learner, batch, counts, normaliser, only_critic=False, kept_counts=kept)
        loss.backward()
        report = normaliser.scale_gradients()
    assert sums and all(isinstance(value, Tensor) for value in (sums | report).values())
