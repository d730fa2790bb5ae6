"""The training loop, read from top to bottom: publish, collect, collate, score, estimate advantages, update, log."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sorl_algos.advantages import rewards_with_kl, whiten, whiten_sums
from sorl_algos.alarm import AlarmLog
from sorl_algos.algorithms import Algorithm
from sorl_algos.batch import Batch, collate
from sorl_algos.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from sorl_algos.config import TrainConfig
from sorl_algos.diagnostics import rollout_metrics, update_metrics, update_sums
from sorl_algos.distributed import all_sum, global_counts, world_size
from sorl_algos.learner import Learner, set_learning_rates
from sorl_algos.losses.kl import k3
from sorl_algos.losses.reduce import Counts
from sorl_algos.losses.value import value_loss
from sorl_algos.metrics import MetricsLog
from sorl_algos.models import score, token_logprobs
from sorl_algos.normalisation import ClipNormaliser
from sorl_algos.rollout.collect import usable
from sorl_algos.rollout.source import TrajectorySource

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
) -> dict[str, Any]:
    """Trains until ``config.updates`` are done, resuming from the newest checkpoint of ``config.run_dir``.

    Args:
        source: gives the rollout batches.
        evaluate: scores of the current policy, logged every ``config.eval_every`` updates; its ``exact_match``
            decides which checkpoint is kept as the best.
        on_update: progress callback with the update's number and metrics.
        stop_requested: asked after each update; True saves and ends the run. Ctrl-C does the same.

    Returns:
        ``updates_done``, ``updates_run`` (by this call), ``finished``, ``best_update`` and ``best_exact_match``.

    Raises:
        RuntimeError: more than ``config.max_skipped_minibatches`` minibatches had a gradient that was not finite.
    """
    checkpoints = config.run_dir / "checkpoints"
    state: dict[str, Any] = {"updates_done": 0, "best_update": None, "best_exact_match": -1.0, "seconds": 0.0}
    checkpoint = latest_checkpoint(checkpoints)
    if checkpoint is not None:
        state |= load_checkpoint(checkpoint, modules=learner.modules(), optimizers=learner.optimizers())
    start, began, seconds_before = state["updates_done"], time.monotonic(), state["seconds"]
    log = MetricsLog(config.run_dir, keep_updates=start)
    alarm = AlarmLog(config.run_dir, config.on_alarm, state, keep_updates=start)

    with _interrupt_after_update() as interrupted:
        for update in range(start, config.updates):
            clock = time.monotonic()
            source.publish(learner.raw_policy, version=update)
            trajectories = next(source)
            kept = usable(trajectories)
            batch = collate(kept, pad_id).to(learner.accelerator.device)
            time_rollout = time.monotonic() - clock

            batch, entropy = score(
                batch,
                learner.policy,
                reference=learner.reference,
                critic=learner.critic,
                microbatch_sequences=config.microbatch_sequences,
                temperature=config.temperature,
            )
            batch = estimate_advantages(batch, learner.algorithm, config)
            set_learning_rates(learner, update)
            totals: dict[str, Tensor] = {}
            for minibatch in minibatches(batch, config, update):
                _add(totals, optimiser_step(learner, minibatch, update))

            metrics = {
                **rollout_metrics(trajectories, kept),
                **update_metrics(batch, entropy, totals),
                "lr": learner.policy_optimizer.param_groups[0]["lr"],
                "time_rollout_s": time_rollout,
                "time_update_s": time.monotonic() - clock - time_rollout,
            }
            done = update + 1
            if evaluate is not None and (done % config.eval_every == 0 or done == config.updates):
                source.publish(learner.raw_policy, version=done)
                scores = evaluate()
                metrics |= {f"eval/dev/{name}": value for name, value in scores.items()}
                if scores["exact_match"] > state["best_exact_match"]:
                    state |= {"best_update": done, "best_exact_match": scores["exact_match"]}
            stopped = alarm.watch(update, metrics)  # adds "alarm" to the metrics
            state |= {"updates_done": done, "seconds": seconds_before + time.monotonic() - began, **alarm.state()}
            log.write(update, {"time_s": state["seconds"], **metrics})
            if on_update is not None:
                on_update(update, metrics)

            late = config.stop_after_minutes is not None and state["seconds"] > 60 * config.stop_after_minutes
            ending = bool(interrupted) or late or stopped or (stop_requested is not None and stop_requested())
            if ending or done % config.save_every == 0 or done == config.updates or state["best_update"] == done:
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


def estimate_advantages(batch: Batch, algorithm: Algorithm, config: TrainConfig) -> Batch:
    """Fills advantages (whitened over the rollout batch's action tokens, all ranks) and the critic's targets."""
    rewards = batch.rewards
    if config.kl_reward_coef and batch.ref_logp is not None and batch.old_logp is not None:
        rewards = rewards_with_kl(
            rewards, batch.old_logp, batch.ref_logp, batch.loss_mask, coefficient=config.kl_reward_coef
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
    if config.whiten_advantages and algorithm.needs_critic:
        advantages = whiten(advantages, batch.loss_mask, sums=all_sum(whiten_sums(advantages, batch.loss_mask)))
    return batch.replace(advantages=advantages, returns=returns)


def minibatches(batch: Batch, config: TrainConfig, update: int) -> Iterator[Batch]:
    """Each pass over the rollout batch in a fresh order, whole groups together; a function of (seed, update)."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + update)
    groups = batch.group_ids.cpu()
    for _ in range(config.passes):
        shuffled = torch.randperm(int(groups.max()) + 1, generator=generator)
        order = torch.argsort(shuffled[groups], stable=True)
        for start in range(0, len(batch), config.minibatch_sequences):
            yield batch.rows(order[start : start + config.minibatch_sequences].to(batch.token_ids.device))


def optimiser_step(learner: Learner, minibatch: Batch, update: int) -> dict[str, Tensor]:
    """Backward over the micro-batches, normalisation, gradient clipping, one step. Returns sums for the log."""
    config, accelerator = learner.config, learner.accelerator
    policy = learner.raw_policy
    policy_parameters = [p for p in policy.lm.parameters() if p.requires_grad]
    counts = global_counts(minibatch)  # before any loss
    normaliser = ClipNormaliser(
        learner.algorithm, policy_parameters, clip_low=config.clip_low, clip_high=config.clip_high
    )
    only_critic = learner.algorithm.needs_critic and update < config.critic_warmup_updates
    totals: dict[str, Tensor] = {}
    micros = list(minibatch.microbatches(config.microbatch_sequences))
    for number, micro in enumerate(micros):
        last = number == len(micros) - 1
        with nullcontext() if last else accelerator.no_sync(learner.policy):
            loss, sums = micro_loss(learner, micro, counts, normaliser, only_critic=only_critic)
            accelerator.backward(loss * world_size())  # data parallelism averages; the loss is a global sum
        _add(totals, sums)
    report = normaliser.scale_gradients()
    gradient_norm = nn.utils.clip_grad_norm_(policy_parameters, config.max_grad_norm)
    value_parameters = [] if policy.value_head is None else list(policy.value_head.parameters())
    if learner.critic is not None:
        value_parameters += list(learner.critic.parameters())
    value_norm = nn.utils.clip_grad_norm_(value_parameters, config.max_grad_norm)
    report |= {"grad_norm": gradient_norm, "critic_grad_norm": value_norm}
    if bool(torch.isfinite(gradient_norm) & torch.isfinite(value_norm)):
        # Only the critic learns, advantages of zero, or no action token: neither momentum nor decay may move weights.
        for parameters, norm in ((policy_parameters, gradient_norm), (value_parameters, value_norm)):
            if not norm > 0:
                for parameter in parameters:
                    parameter.grad = None
        learner.policy_optimizer.step()
        if learner.critic_optimizer is not None:
            learner.critic_optimizer.step()
        totals["steps"] = torch.ones(())
    else:
        _record_skip(learner, update, minibatch)
        report, totals = {}, {"skipped_minibatches": torch.ones(())}
    for optimizer in learner.optimizers().values():
        optimizer.zero_grad(set_to_none=True)
    return totals | {f"step/{name}": value.detach() for name, value in report.items()}


def micro_loss(
    learner: Learner, micro: Batch, counts: Counts, normaliser: ClipNormaliser, *, only_critic: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one micro-batch (its share of the minibatch's, 0-d) and sums for the log."""
    config, algorithm = learner.config, learner.algorithm
    assert micro.old_logp is not None and micro.advantages is not None
    scores = token_logprobs(learner.policy, micro, temperature=config.temperature)
    loss, sums = scores.logp.sum() * 0.0, {}
    if not only_critic:
        out = algorithm.policy_loss(
            scores.logp,
            micro.old_logp,
            micro.advantages,
            micro.loss_mask,
            micro.turn_ids,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        loss = algorithm.reduce(out.per_token, micro.loss_mask, micro.turn_ids, counts)
        excess = algorithm.reduce(out.clip_excess, micro.loss_mask, micro.turn_ids, counts)
        sums = {**out.metrics}
        if (own := normaliser.gather(out, scores.logp, micro, loss, excess)) is not None:
            loss = loss * own[0]
            sums |= {"sum_factor": own[0], "factors": torch.ones_like(own[0]), "max_rho": own[1]}
        sums["policy_loss"] = loss.detach()
        sums |= update_sums(
            scores.logp.detach(), micro, clip_low=config.clip_low, clip_high=config.clip_high
        )
        if config.kl_loss_coef and micro.ref_logp is not None:
            kl = k3(scores.logp, micro.ref_logp, micro.loss_mask)
            loss = loss + config.kl_loss_coef * algorithm.reduce(kl, micro.loss_mask, micro.turn_ids, counts)
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


def _add(totals: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    for name, value in new.items():
        if name not in totals:
            totals[name] = value
        elif name.startswith("max_"):
            totals[name] = torch.maximum(totals[name], value)
        else:
            totals[name] = totals[name] + value


def _record_skip(learner: Learner, update: int, minibatch: Batch) -> None:
    learner.skipped.append({"update": update, "groups": minibatch.group_ids.tolist()})
    path = learner.config.run_dir / "skipped_minibatches.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(learner.skipped[-1]) + "\n")
    if len(learner.skipped) > learner.config.max_skipped_minibatches:
        raise RuntimeError(
            f"{len(learner.skipped)} minibatches had a loss or gradient that was not finite (see {path}); "
            "lower --lr or --max-grad-norm, and look at ratio_max in the metrics"
        )


@contextmanager
def _interrupt_after_update() -> Iterator[list[int]]:
    """The first Ctrl-C (or SIGTERM) lets the update finish and be saved; a second one ends at once."""
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us handles signals
        before = {}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
