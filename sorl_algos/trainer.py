"""The training loop, read from top to bottom: publish, collect, collate, score, estimate advantages, update, log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sorl_algos.advantages import rewards_with_kl, whiten, whiten_sums
from sorl_algos.alarm import AlarmLog
from sorl_algos.algorithms import Algorithm
from sorl_algos.batch import Batch, collate
from sorl_algos.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from sorl_algos.config import TrainConfig
from sorl_algos.diagnostics import rollout_metrics, update_metrics, update_sums
from sorl_algos.distributed import (
    actions_of_all_ranks,
    agreed_maximum,
    all_sum,
    any_rank,
    global_counts,
    rank,
    world_size,
)
from sorl_algos.interrupts import interrupt_after_update
from sorl_algos.learner import Learner, set_learning_rates
from sorl_algos.losses.kl import adapted_coefficient, k1, kl_per_token
from sorl_algos.losses.policy import LossOutput
from sorl_algos.losses.reduce import Counts
from sorl_algos.losses.value import value_loss
from sorl_algos.metrics import MetricsLog
from sorl_algos.minibatching import microbatches, minibatches
from sorl_algos.models import score, token_logprobs
from sorl_algos.normalisation import ClipNormaliser
from sorl_algos.off_policy import correct
from sorl_algos.rollout.collect import usable
from sorl_algos.rollout.source import TrajectorySource
from sorl_algos.sharding import clip_gradients
from sorl_algos.skips import SkipLog
from sorl_algos.totals import add_totals, totals_over_ranks
from sorl_env.trajectory import Trajectory

Evaluate = Callable[[], dict[str, float]]


def train(
    config: TrainConfig,
    learner: Learner,
    source: TrajectorySource,
    *,
    pad_id: int,
    evaluate: Evaluate | None = None,
    on_update: Callable[[int, dict[str, float]], None] | None = None,
    stop_requested: Callable[[], bool] | None = None,
    source_metrics: Callable[[], dict[str, float]] | None = None,
) -> dict[str, Any]:
    """Trains until ``config.updates`` are done, resuming from the newest checkpoint of ``config.run_dir``.

    Every rank calls it with a source of its own questions; rank 0 writes the files.

    Args:
        source: gives the rollout batches.
        evaluate: scores of the current policy, logged every ``config.eval_every`` updates; its ``exact_match``
            decides which checkpoint is kept as the best.
        on_update: progress callback with the update's number and metrics.
        stop_requested: asked after each update; True saves and ends the run. Ctrl-C does the same.
        source_metrics: what the source has to say of its last batch, for the log.

    Returns:
        ``updates_done``, ``updates_run`` (by this call), ``finished``, ``best_update`` and ``best_exact_match``.

    Raises:
        RuntimeError: more than ``config.max_skipped_minibatches`` minibatches had a gradient that was not finite.
    """
    checkpoints = config.run_dir / "checkpoints"
    device, main_rank = learner.accelerator.device, rank() == 0
    state: dict[str, Any] = {
        "updates_done": 0, "seconds": 0.0, "best_update": None, "best_exact_match": -1.0, "saved_update": None,
        "before_collapse_update": None, "kl_scale": 1.0,
    }  # fmt: skip
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is not None:
        state |= load_checkpoint(checkpoint, modules=learner.modules(), optimizers=learner.optimizers())
    start, began, seconds_before = state["updates_done"], time.monotonic(), state["seconds"]
    learner.kl_scale = state["kl_scale"]
    log = MetricsLog(config.run_dir, keep_updates=start, write=main_rank)
    alarm = AlarmLog(config.run_dir, config.on_alarm, state, keep_updates=start, write=main_rank)
    skips = SkipLog(config.run_dir, config.max_skipped_minibatches, state, keep_updates=start)

    with interrupt_after_update() as interrupted:
        for update in range(start, config.updates):
            clock = time.monotonic()
            source.publish(learner.raw_policy, version=update)
            trajectories = next(source)
            kept = usable(trajectories)
            batch = collate_usable(trajectories, kept, pad_id, device)
            time_rollout = time.monotonic() - clock

            batch, entropy = score(
                batch,
                learner.policy,
                reference=learner.reference,
                critic=learner.critic,
                microbatch_sequences=config.microbatch_sequences,
                microbatch_tokens=config.microbatch_tokens,
                temperature=config.temperature,
            )
            scored = batch.old_logp  # the trainer's own, whatever the ratio is taken to
            if config.old_logprobs == "engine":
                batch = batch.replace(old_logp=batch.rollout_logp)
            batch = estimate_advantages(batch, learner.algorithm, config, kl_scale=learner.kl_scale)
            batch, correction = correct(batch, config)
            set_learning_rates(learner, update)
            totals: dict[str, Tensor] = {}
            for number in range(config.passes):
                sums: dict[str, Tensor] = {}
                for minibatch in minibatches(batch, config, update, number):
                    step = optimiser_step(learner, minibatch, update)
                    add_totals(sums, step)
                    if "skipped_minibatches" in step:
                        skips.record(update, minibatch, kept)
                sums = totals_over_ranks(sums)
                add_totals(totals, sums)
                if went_too_far(sums, config.max_pass_kl):
                    break
            metrics = {
                **rollout_metrics(trajectories, kept, device),
                **update_metrics(*actions_of_all_ranks(batch.replace(old_logp=scored), entropy), totals),
                **{name: float(value) for name, value in correction.items()},
                "lr": learner.policy_optimizer.param_groups[0]["lr"],
                **(source_metrics() if source_metrics is not None else {}),
                "time_rollout_s": time_rollout,
                "time_update_s": time.monotonic() - clock - time_rollout,
            }
            if config.max_pass_kl is not None:
                metrics["passes"] = number + 1
            if config.kl_target is not None:
                learner.kl_scale = steer_kl(learner.kl_scale, batch.replace(old_logp=scored), config)
                metrics["kl_scale"] = state["kl_scale"] = learner.kl_scale
            done = update + 1
            if evaluate is not None and (done % config.eval_every == 0 or done == config.updates):
                source.publish(learner.raw_policy, version=done)
                scores = evaluate()
                metrics |= {f"eval/dev/{name}": value for name, value in scores.items()}
                if scores["exact_match"] > state["best_exact_match"]:
                    state |= {"best_update": done, "best_exact_match": scores["exact_match"]}
            stopped = alarm.watch(update, metrics)  # adds "alarm" to the metrics
            if alarm.alarm_update == done:  # the first alarm of the run
                state["before_collapse_update"] = state["saved_update"]
            state |= {"updates_done": done, "seconds": seconds_before + time.monotonic() - began}
            state |= alarm.state() | skips.state()
            log.write(update, {"time_s": state["seconds"], **metrics})
            if on_update is not None:
                on_update(update, metrics)

            late = config.stop_after_minutes is not None and state["seconds"] > 60 * config.stop_after_minutes
            ending = bool(interrupted) or late or stopped or (stop_requested is not None and stop_requested())
            ending = any_rank(ending, device)
            if ending or done % config.save_every == 0 or done == config.updates or state["best_update"] == done:
                state["saved_update"] = done
                save_checkpoint(
                    checkpoints,
                    done,
                    modules=learner.modules(),
                    optimizers=learner.optimizers(),
                    state=state,
                    keep=config.keep_checkpoints,
                )
            if ending:
                break
    log.close()
    done = state["updates_done"]
    return {**state, "updates_run": done - start, "finished": done >= config.updates}


def collate_usable(
    trajectories: list[Trajectory], kept: list[Trajectory], pad_id: int, device: torch.device
) -> Batch:
    """The batch of what is fit for training. A rank that lost all of its episodes takes part with a silent one.

    Raises:
        ValueError: no rank has an episode left.
    """
    if not agreed_maximum(len(kept), device):
        raise ValueError(
            f"all {len(trajectories)} episodes of an update were dropped because searching failed; "
            "look at the retrieval server's log, then start the same command again"
        )
    batch = collate(kept or trajectories[:1], pad_id).to(device)
    return batch if kept else batch.silent()


def estimate_advantages(
    batch: Batch, algorithm: Algorithm, config: TrainConfig, *, kl_scale: float = 1.0
) -> Batch:
    """Fills advantages (whitened over the rollout batch's action tokens, all ranks) and the critic's targets."""
    rewards = batch.rewards
    if config.kl_reward_coef and batch.ref_logp is not None and batch.old_logp is not None:
        rewards = rewards_with_kl(
            rewards,
            batch.old_logp,
            batch.ref_logp,
            batch.loss_mask,
            coefficient=config.kl_reward_coef * kl_scale,
            estimator=config.kl_reward_estimator,
        )
    advantages, returns = algorithm.estimate_advantages(
        rewards=rewards,
        values=batch.values,
        mask=batch.loss_mask,
        turn_ids=batch.turn_ids,
        group_ids=batch.group_ids,
        gamma=config.gamma,
        lam=config.lam,
    )
    raw = advantages
    if config.whiten_advantages and algorithm.needs_critic:
        advantages = whiten(advantages, batch.loss_mask, sums=all_sum(whiten_sums(advantages, batch.loss_mask)))
    return batch.replace(advantages=advantages, raw_advantages=raw, returns=returns)


def optimiser_step(learner: Learner, minibatch: Batch, update: int) -> dict[str, Tensor]:
    """Backward over the micro-batches, normalisation, gradient clipping, one step. Returns sums for the log.

    A minibatch whose loss or gradient is not finite changes nothing; its sums are ``skipped_minibatches`` alone.
    """
    config, accelerator = learner.config, learner.accelerator
    counts = global_counts(minibatch)  # before any loss
    kept_counts = None
    if minibatch.counted_mask is not None:
        kept_counts = global_counts(minibatch.replace(loss_mask=minibatch.counted_mask))
    normaliser = ClipNormaliser(
        learner.algorithm,
        learner.policy_parameters,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        measure=config.excess_norm_every > 0 and update % config.excess_norm_every == 0,
        of_step=config.factor_on == "step",
    )
    only_critic = learner.algorithm.needs_critic and update < config.critic_warmup_updates
    totals: dict[str, Tensor] = {}
    total_loss = torch.zeros((), device=minibatch.token_ids.device)
    micros = microbatches(minibatch, config)
    for number, micro in enumerate(micros):
        last = number == len(micros) - 1
        with learner.accumulating(last=last):
            loss, sums = micro_loss(
                learner, micro, counts, normaliser, only_critic=only_critic, kept_counts=kept_counts
            )
            total_loss = total_loss + loss.detach()
            accelerator.backward(loss * world_size())  # data parallelism averages; the loss is a global sum
        add_totals(totals, sums)
    report = normaliser.scale_gradients()
    gradient_norm = clip_gradients(learner.policy_parameters, config.max_grad_norm)
    value_norm = clip_gradients(learner.value_parameters, config.max_grad_norm)
    report |= {"grad_norm": gradient_norm, "critic_grad_norm": value_norm}
    if bool(torch.isfinite(gradient_norm) & torch.isfinite(value_norm) & torch.isfinite(all_sum(total_loss))):
        # Only the critic learns, advantages of zero, or no action token: neither momentum nor decay may move weights.
        for parameters, norm in ((learner.policy_parameters, gradient_norm), (learner.value_parameters, value_norm)):
            if not norm > 0:
                for parameter in parameters:
                    parameter.grad = None
        with learner.scaled_rate(report.get("factor") if config.factor_on == "step" else None):
            learner.policy_optimizer.step()
        if learner.critic_optimizer is not None:
            learner.critic_optimizer.step()
        totals["steps"] = torch.ones(())
    else:
        report, totals = {}, {"skipped_minibatches": torch.ones(())}
    for optimizer in learner.optimizers().values():
        optimizer.zero_grad(set_to_none=True)
    return totals | {f"step/{name}": value.detach() for name, value in report.items()}


def micro_loss(
    learner: Learner,
    micro: Batch,
    counts: Counts,
    normaliser: ClipNormaliser,
    *,
    only_critic: bool,
    kept_counts: Counts | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch (its share of the minibatch's, 0-d) and sums for the log.

    counts: of all action tokens of the minibatch; kept_counts: of those that a correction leaves in the policy loss.
    """
    config, algorithm = learner.config, learner.algorithm
    assert micro.old_logp is not None and micro.advantages is not None
    scores = token_logprobs(learner.policy, micro, temperature=config.temperature)
    loss, sums = scores.logp.sum() * 0.0, {}
    if not only_critic:
        out, loss, excess = policy_terms(learner, scores.logp, micro, kept_counts or counts)

        def excess_again(rows: Batch) -> Tensor:
            # not through the wrapper of data parallelism: which ranks come here differs, and its forward meets others
            logp = token_logprobs(learner.raw_policy, rows, temperature=config.temperature).logp
            return policy_terms(learner, logp, rows, kept_counts or counts)[2]

        sums = {**out.metrics}
        # a factor of the micro-batch inside the loss would be another one for some of its rows
        again = None if algorithm.scales_loss and algorithm.scope == "microbatch" else excess_again
        if (own := normaliser.gather(out, scores.logp, micro, loss, excess, again)) is not None:
            loss = loss * own[0]
            sums |= {"sum_factor": own[0], "factors": torch.ones_like(own[0]), "max_rho": own[1]}
        sums["policy_loss"] = loss.detach()
        sums |= update_sums(
            scores.logp.detach(), micro, out, clip_low=config.clip_low, clip_high=config.clip_high
        )
        if config.kl_loss_coef and micro.ref_logp is not None:
            kl = kl_per_token(scores.logp, micro.ref_logp, micro.loss_mask, estimator=config.kl_loss_estimator)
            kl = algorithm.reduce(kl, micro.loss_mask, micro.turn_ids, counts)
            loss = loss + config.kl_loss_coef * learner.kl_scale * kl
    if micro.returns is not None and micro.values is not None:
        values = scores.values
        if learner.critic is not None:
            values = learner.critic(micro.token_ids, micro.attention_mask, micro.loss_mask)
        assert values is not None
        errors = value_loss(values, micro.values, micro.returns, micro.loss_mask, clip_range=config.value_clip)
        critic_loss = errors.sum() / torch.as_tensor(counts.tokens).clamp(min=1)
        sums["value_loss"] = critic_loss.detach()
        loss = loss + critic_loss
    return loss, sums


def policy_terms(
    learner: Learner, logp: Tensor, micro: Batch, counts: Counts
) -> tuple[LossOutput, Tensor, Tensor]:
    """The policy's per-token loss, and the reduced loss and clip excess (0-d) over ``counts``."""
    algorithm = learner.algorithm
    assert micro.old_logp is not None and micro.advantages is not None
    out = algorithm.policy_loss(
        logp,
        micro.old_logp,
        micro.advantages,
        micro.loss_mask,
        micro.turn_ids,
        clip_low=learner.config.clip_low,
        clip_high=learner.config.clip_high,
        weights=micro.weights,
    )
    counted = micro.loss_mask if micro.counted_mask is None else micro.counted_mask
    loss, excess = (
        algorithm.reduce(term, counted, micro.turn_ids, counts) for term in (out.per_token, out.clip_excess)
    )
    return out, loss, excess


def went_too_far(sums: dict[str, Tensor], max_pass_kl: float | None) -> bool:
    """Whether the mean KL between the policy before the update and in this pass is above the limit."""
    if max_pass_kl is None or "sum_kl" not in sums:
        return False
    return bool(sums["sum_kl"] > max_pass_kl * sums["tokens"])


def steer_kl(scale: float, batch: Batch, config: TrainConfig) -> float:
    """The next scale of the KL's coefficients, from the KL of the rollout batch over all ranks."""
    assert config.kl_target is not None and batch.old_logp is not None and batch.ref_logp is not None
    kl = k1(batch.old_logp, batch.ref_logp, batch.loss_mask)
    total, tokens = all_sum(torch.stack([kl.sum(), batch.loss_mask.sum().to(kl.dtype)])).tolist()
    return adapted_coefficient(
        scale,
        total / max(tokens, 1.0),
        target=config.kl_target,
        horizon=config.kl_horizon_episodes,
        seen=config.episodes_per_update,
    )
