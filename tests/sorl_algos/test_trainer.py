"""The loop and the optimiser step: every row trains; what must not move does not; skips, interrupts, exact resume."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_algos.algorithms import ALGORITHMS
from sorl_algos.batch import Batch, collate
from sorl_algos.checkpoint import latest_checkpoint
from sorl_algos.config import TrainConfig
from sorl_algos.learner import Learner, make_learner, set_learning_rates
from sorl_algos.metrics import read_metrics
from sorl_algos.models import Critic, Policy, score
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import SyncSource
from sorl_algos.trainer import (
    estimate_advantages,
    minibatches,
    optimiser_step,
    train,
)
from tests.sorl_algos.small_game import QUESTIONS, ReplaySource, made_up, make_env, small_config


def learner_for(config: TrainConfig, make_model: Any, seed: int = 0) -> Learner:
    model = make_model(seed)
    torch.manual_seed(seed)  # value heads draw their first layer from torch's own generator
    critic = Critic(model) if config.critic == "own" else None
    reference = Policy(make_model(seed)) if config.kl_reward_coef or config.kl_loss_coef else None
    shared = config.critic == "shared" and config.algorithm_row().needs_critic
    return make_learner(config, Policy(model, shared_critic=shared), critic=critic, reference=reference)


def weights(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.detach().clone()
        for name, module in learner.modules().items()
        for key, value in module.state_dict().items()
    }


def optimiser_state(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{name}.{number}.{key}": torch.as_tensor(value).clone()
        for name, optimizer in learner.optimizers().items()
        for number, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def ready(learner: Learner, rows: int = 4, seed: int = 0) -> Batch:
    """A scored batch with advantages."""
    batch, _ = score(
        collate(made_up(rows, seed=seed), 0),
        learner.policy,
        critic=learner.critic,
        reference=learner.reference,
        microbatch_sequences=2,
    )
    return estimate_advantages(batch, learner.algorithm, learner.config)


# --- Every row ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "critic"), [*((name, "shared") for name in [*ALGORITHMS, "st_ppo"]), ("ppo", "own"), ("so_ppo", "own")]
)
def test_every_row_of_the_table_takes_two_updates(name: str, critic: Any, make_model: Any, tmp_path: Path) -> None:
    needs = small_config(tmp_path, algorithm=name, critic="shared").algorithm_row().needs_critic
    config = small_config(tmp_path, algorithm=name, critic=critic)
    learner = learner_for(config, make_model)
    before = weights(learner)
    source = ReplaySource([made_up(8, seed=1), made_up(8, seed=2)])
    summary = train(config, learner, source, pad_id=0)
    assert summary["finished"] and summary["updates_run"] == 2 and source.published == [0, 1]
    # The zero biases of the projections get gradients too; only what nothing depends on may stay.
    moved = changed(before, weights(learner))
    assert {key for key in before if key.startswith("policy.lm")} <= moved
    assert all(value.isfinite().all() for value in weights(learner).values())
    if needs:
        head = "policy.value_head.outer.weight" if critic == "shared" else "critic.head.outer.weight"
        assert head in moved
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["update"] for line in lines] == [0, 1]
    expected = {
        "time_s", "reward_mean", "em_train", "searches_mean", "response_tokens_mean", "turns_mean",
        "valid_action_rate", "truncated_rate", "clip_fraction_token", "clip_fraction_turn",
        "clip_fraction_sequence", "approx_kl", "mismatch_kl", "entropy", "policy_loss", "grad_norm", "lr",
        "ratio_max", "ess", "time_rollout_s", "time_update_s",
    }  # fmt: skip
    expected |= {"explained_variance", "value_loss", "critic_grad_norm"} if needs else set()
    expected |= {"rho", "factor"} if config.algorithm_row().normalisation else set()
    for line in lines:
        assert expected <= line.keys() and all(isinstance(line[key], float) for key in expected)


@pytest.mark.parametrize("normalisation", ["gradient_norm", "gradient_ratio"])
def test_the_gradient_estimators_train_too(normalisation: Any, make_model: Any, tmp_path: Path) -> None:
    config = small_config(tmp_path, normalisation=normalisation, clip_low=0.01, clip_high=0.01, lr=1e-2, passes=2)
    learner = learner_for(config, make_model)
    before = weights(learner)
    train(config, learner, ReplaySource([made_up(8)]), pad_id=0)
    assert changed(before, weights(learner))
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        assert line["rho"] > 0 and 0 < line["factor"] <= 1 and line["excess_norm"] > 0


def test_the_reference_enters_reward_and_loss(make_model: Any, tmp_path: Path) -> None:
    plain = small_config(tmp_path, algorithm="grpo", critic="none")
    for changes in ({"kl_loss_coef": 1.0}, {"kl_reward_coef": 1.0}):
        results = []
        for config in (plain, small_config(tmp_path, algorithm="grpo", critic="none", **changes)):
            learner = learner_for(config, make_model)
            if learner.reference is not None:  # a reference that differs from the policy
                torch.nn.init.normal_(learner.reference.lm.model.norm.weight, generator=torch.manual_seed(1))
                assert not any(p.requires_grad for p in learner.reference.parameters())
            optimiser_step(learner, ready(learner), update=0)
            results.append(weights(learner))
        assert changed(*results)


# --- What must not move -------------------------------------------------------------------------------------


def no_action_tokens(batch: Batch) -> Batch:
    return batch.replace(loss_mask=torch.zeros_like(batch.loss_mask), turn_ids=torch.full_like(batch.turn_ids, -1))


@pytest.mark.parametrize("algorithm", ["grpo", "so_grpo", "gspo", "rloo", "cispo"])
def test_advantages_of_zero_leave_weights_momentum_and_decay_alone(
    algorithm: str, make_model: Any, tmp_path: Path
) -> None:
    config = small_config(tmp_path, algorithm=algorithm, critic="none", weight_decay=0.1)
    learner = learner_for(config, make_model)
    batch = ready(learner)
    optimiser_step(learner, batch, update=0)  # so that there is momentum
    before, momentum = weights(learner), optimiser_state(learner)
    optimiser_step(learner, batch.replace(advantages=torch.zeros_like(batch.rewards)), update=1)
    assert changed(before, weights(learner)) == set()
    assert changed(momentum, optimiser_state(learner)) == set()
    optimiser_step(learner, batch, update=2)
    assert changed(before, weights(learner)) != set()


@pytest.mark.parametrize("critic", ["shared", "own"])
def test_a_batch_without_action_tokens_leaves_all_alone(critic: Any, make_model: Any, tmp_path: Path) -> None:
    config = small_config(tmp_path, weight_decay=0.1, critic=critic)
    learner = learner_for(config, make_model)
    batch = ready(learner)
    optimiser_step(learner, batch, update=0)
    before, momentum = weights(learner), optimiser_state(learner)
    totals = optimiser_step(learner, no_action_tokens(batch), update=1)
    assert changed(before, weights(learner)) == set()
    assert changed(momentum, optimiser_state(learner)) == set()
    assert float(totals["policy_loss"]) == 0.0 and float(totals["step/grad_norm"]) == 0.0


def test_with_advantages_of_zero_the_critic_still_learns(make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(small_config(tmp_path), make_model)
    batch = ready(learner)
    optimiser_step(learner, batch, update=0)
    before = weights(learner)
    optimiser_step(learner, batch.replace(advantages=torch.zeros_like(batch.rewards)), update=1)
    moved = changed(before, weights(learner))
    assert moved and all(name.startswith("policy.value_head") for name in moved)


@pytest.mark.parametrize("critic", ["shared", "own"])
def test_critic_warm_up_leaves_the_policy_untouched(critic: Any, make_model: Any, tmp_path: Path) -> None:
    config = small_config(tmp_path, critic=critic, critic_warmup_updates=2, updates=3, weight_decay=0.1)
    learner = learner_for(config, make_model)
    before = weights(learner)
    moved = []
    train(
        config,
        learner,
        ReplaySource([made_up(8)]),
        pad_id=0,
        on_update=lambda update, metrics: moved.append(changed(before, weights(learner))),
    )
    is_critic = ("policy.value_head", "critic.")
    assert all(name.startswith(is_critic) for name in moved[0] | moved[1]) and moved[0]
    assert any(name.startswith("policy.lm") for name in moved[2])


def test_learning_rates(make_model: Any, tmp_path: Path) -> None:
    # Two updates for the critic alone, then 3 warm-up updates: shares 1/4, 2/4, 3/4, 1, 1 of 0.01.
    config = small_config(tmp_path, critic_warmup_updates=2, lr_warmup_updates=3, lr=0.01, critic_lr=0.5)
    learner = learner_for(config, make_model)
    rates = []
    for update in range(7):
        set_learning_rates(learner, update)
        policy, value = learner.policy_optimizer.param_groups
        rates.append(policy["lr"])
        assert value["lr"] == 0.5
    assert rates == pytest.approx([0, 0, 0.0025, 0.005, 0.0075, 0.01, 0.01])


# --- Gradients that are not finite --------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_is_skipped_and_recorded(make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(small_config(tmp_path), make_model)
    batch = ready(learner)
    assert batch.advantages is not None
    before = weights(learner)
    broken = batch.advantages.masked_fill(batch.loss_mask & (batch.group_ids == 1)[:, None], torch.inf)
    totals = optimiser_step(learner, batch.replace(advantages=broken), update=4)
    assert changed(before, weights(learner)) == set() and not optimiser_state(learner)
    assert {name: float(value) for name, value in totals.items()} == {"skipped_minibatches": 1.0}
    optimiser_step(learner, batch, update=5)
    assert changed(before, weights(learner))


def test_too_many_skips_end_the_run_with_a_remedy(make_model: Any, tmp_path: Path) -> None:
    config = small_config(tmp_path, updates=9, max_skipped_minibatches=3)
    learner = learner_for(config, make_model)
    before = weights(learner)
    source = ReplaySource([made_up(8, reward=lambda row: 1e30)])  # its square is past float32
    with pytest.raises(RuntimeError, match=r"4 minibatches had .* not finite .*lower --lr"):
        train(config, learner, source, pad_id=0)
    lines = [json.loads(line) for line in (tmp_path / "skipped_minibatches.jsonl").read_text().splitlines()]
    assert [(line["update"], line["skipped"]) for line in lines] == [(0, 1), (0, 2), (1, 3), (1, 4)]
    # four questions an update, two in each of its minibatches
    assert [sorted(lines[at]["question_ids"] + lines[at + 1]["question_ids"]) for at in (0, 2)] == [
        ["q0", "q1", "q2", "q3"]
    ] * 2
    assert changed(before, weights(learner)) == set()
    [line] = read_metrics(tmp_path / "metrics.jsonl")  # the first update: both minibatches skipped
    assert line["skipped_minibatches"] == 2.0


def test_dropped_episodes_are_counted_and_not_trained_on(make_model: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    items = made_up(8)
    items[0], items[5] = replace(items[0], stop="retrieval_error"), replace(items[5], stop="retrieval_error")
    config = small_config(tmp_path, updates=1)
    train(config, learner_for(config, make_model), ReplaySource([items]), pad_id=0)
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert line["dropped_episodes"] == 2.0
    kept = [item for item in items if item.stop == "answered"]
    assert line["reward_mean"] == pytest.approx(sum(item.reward for item in kept) / 6)


# --- Minibatches --------------------------------------------------------------------------------------------


def test_minibatches_are_a_function_of_seed_and_update_and_keep_groups_together(tmp_path: Path) -> None:
    batch = collate(made_up(24, group_size=4), 0)

    def order(update: int, **changes: Any) -> list[list[int]]:
        config = small_config(
            tmp_path, questions_per_update=6, group_size=4, minibatch_sequences=8, passes=2, **changes
        )
        return [
            minibatch.group_ids.tolist()
            for number in range(config.passes)
            for minibatch in minibatches(batch, config, update, number)
        ]

    first = order(0)
    assert order(0) == first and order(1) != first and order(0, seed=1) != first
    assert [len(rows) for rows in first] == [8] * 6
    for start in (0, 3):  # each pass goes over every episode once, whole groups at a time
        rows = first[start : start + 3]
        assert sorted(row for part in rows for row in part) == sorted(batch.group_ids.tolist())
        assert all(part.count(group) == 4 for part in rows for group in part)
    assert first[:3] != first[3:]


# --- Stops and resumption -----------------------------------------------------------------------------------


def played_run(
    tmp_path: Path, make_model: Any, tokenizer: Any, *, on_update: Any = None, **changes: Any
) -> tuple[dict[str, Any], Learner]:
    """A run over the small game, everything made anew, as a new process would."""
    config = small_config(tmp_path, max_turn_tokens=5, max_total_tokens=90, **changes)
    learner = learner_for(config, make_model)
    source = SyncSource(
        make_env(8),
        HFEngine(learner.raw_policy.lm, tokenizer),
        Renderer(tokenizer),
        QUESTIONS,
        questions_per_update=config.questions_per_update,
        group_size=config.group_size,
        sampling=Sampling(max_tokens=config.max_turn_tokens, temperature=config.temperature),
        seed=config.seed,
        max_total_tokens=config.max_total_tokens,
    )
    source = ReplacedRewards(source)
    summary = train(config, learner, source, pad_id=tokenizer.pad_token_id, on_update=on_update)
    return summary, learner


class ReplacedRewards:
    """Rewards the length of what was sampled: a random policy answers nothing right, and would not learn."""

    def __init__(self, inner: SyncSource) -> None:
        self.inner = inner

    def publish(self, policy: Any, version: int) -> None:
        self.inner.publish(policy, version)

    def __next__(self) -> list[Any]:
        from dataclasses import replace

        return [
            replace(item, turns=(*item.turns[:-1], replace(item.turns[-1], reward=item.turns[0].action_ids[0] / 300)))
            for item in next(self.inner)
        ]


def timeless(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if not name.startswith("time_")}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]


@pytest.fixture
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"critic_warmup_updates": 1, "lr_warmup_updates": 2},
        {"critic": "own", "kl_reward_coef": 0.01, "passes": 2},
        {"algorithm": "so_grpo", "critic": "none", "kl_loss_coef": 0.1},
    ],
    ids=["shared critic", "own critic, KL in the reward", "group, KL in the loss"],
)
def test_resuming_equals_the_straight_run_bit_for_bit(
    changes: dict[str, Any], make_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    _, straight = played_run(tmp_path / "straight", make_model, tokenizer, updates=4, **changes)
    first, _ = played_run(tmp_path / "resumed", make_model, tokenizer, updates=2, **changes)
    second, resumed = played_run(tmp_path / "resumed", make_model, tokenizer, updates=4, **changes)
    assert (first["updates_run"], second["updates_run"], second["updates_done"]) == (2, 2, 4)
    assert changed(weights(straight), weights(resumed)) == set()
    assert changed(optimiser_state(straight), optimiser_state(resumed)) == set()
    assert [group["lr"] for group in straight.policy_optimizer.param_groups] == [
        group["lr"] for group in resumed.policy_optimizer.param_groups
    ]
    assert timeless(tmp_path / "straight") == timeless(tmp_path / "resumed")
    assert len(timeless(tmp_path / "resumed")) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lets_the_update_finish_and_is_resumable(
    number: int, make_model: Any, tokenizer: Any, tmp_path: Path, handlers: None
) -> None:
    def interrupt(update: int, metrics: dict[str, float]) -> None:
        if update == 1:
            os.kill(os.getpid(), number)

    summary, _ = played_run(tmp_path / "run", make_model, tokenizer, updates=4, save_every=100, on_update=interrupt)
    assert (summary["updates_done"], summary["finished"]) == (2, False)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is not None
    # what a save that was killed half-way leaves behind is cleared away
    leftover = tmp_path / "run" / "checkpoints" / "step_000003.partial-1"
    leftover.mkdir()
    summary, resumed = played_run(tmp_path / "run", make_model, tokenizer, updates=4, save_every=100)
    assert (summary["updates_run"], summary["finished"]) == (2, True)
    assert not leftover.exists()
    _, straight = played_run(tmp_path / "straight", make_model, tokenizer, updates=4)
    assert changed(weights(straight), weights(resumed)) == set()


def test_a_second_interrupt_ends_at_once(make_model: Any, tmp_path: Path, handlers: None) -> None:
    def interrupt(update: int, metrics: dict[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    config = small_config(tmp_path, updates=3)
    with pytest.raises(KeyboardInterrupt):
        train(config, learner_for(config, make_model), ReplaySource([made_up(8)]), pad_id=0, on_update=interrupt)


def test_a_finished_run_does_nothing_and_more_updates_go_on(make_model: Any, tmp_path: Path) -> None:
    def run(updates: int) -> dict[str, Any]:
        config = small_config(tmp_path, updates=updates)
        return train(config, learner_for(config, make_model), ReplaySource([made_up(8)]), pad_id=0)

    assert run(2)["updates_run"] == 2
    again = run(2)
    assert (again["updates_run"], again["updates_done"], again["finished"]) == (0, 2, True)
    more = run(5)
    assert (more["updates_run"], more["updates_done"], more["finished"]) == (3, 5, True)
    assert [line["update"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_lines_past_the_checkpoint_are_written_again_not_twice(make_model: Any, tmp_path: Path) -> None:
    # Killed after update 2 was logged and before it was saved: the checkpoint knows of 2 updates.
    config = small_config(tmp_path, updates=2)
    train(config, learner_for(config, make_model), ReplaySource([made_up(8)]), pad_id=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "reward_mean": -7.0}\n{"update": 3, "rew')
    config = small_config(tmp_path, updates=4)
    train(config, learner_for(config, make_model), ReplaySource([made_up(8)]), pad_id=0)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["update"] for line in lines] == [0, 1, 2, 3] and lines[2]["reward_mean"] >= 0


def test_the_best_checkpoint_is_kept(make_model: Any, tmp_path: Path) -> None:
    scores = iter([0.1, 0.6, 0.6, 0.3, 0.2])
    config = small_config(tmp_path, updates=5, keep_checkpoints=1)
    summary = train(
        config,
        learner_for(config, make_model),
        ReplaySource([made_up(8)]),
        pad_id=0,
        evaluate=lambda: {"exact_match": next(scores), "f1": 0.5},
    )
    assert (summary["best_update"], summary["best_exact_match"]) == (2, 0.6)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000005"]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["eval/dev/exact_match"] for line in lines] == [0.1, 0.6, 0.6, 0.3, 0.2]
    # the best is remembered over a resumption
    config = small_config(tmp_path, updates=6, keep_checkpoints=1)
    summary = train(
        config,
        learner_for(config, make_model),
        ReplaySource([made_up(8)]),
        pad_id=0,
        evaluate=lambda: {"exact_match": 0.5},
    )
    assert summary["best_update"] == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000006"]


def test_evaluations_are_of_the_updated_policy(make_model: Any, tmp_path: Path) -> None:
    source, seen = ReplaySource([made_up(8)]), []
    config = small_config(tmp_path, updates=3, eval_every=2)

    def evaluate() -> dict[str, float]:
        seen.append(source.published[-1])
        return {"exact_match": 0.0}

    train(config, learner_for(config, make_model), source, pad_id=0, evaluate=evaluate)
    assert seen == [2, 3]  # after the second update, and at the end


def test_a_run_stops_when_asked_or_out_of_time(make_model: Any, tmp_path: Path) -> None:
    config = small_config(tmp_path / "asked", updates=5)
    asked = train(
        config,
        learner_for(config, make_model),
        ReplaySource([made_up(8)]),
        pad_id=0,
        stop_requested=iter([False, True]).__next__,
    )
    assert (asked["updates_done"], asked["finished"]) == (2, False)
    config = small_config(tmp_path / "late", updates=5, stop_after_minutes=1e-9, save_every=100)
    late = train(config, learner_for(config, make_model), ReplaySource([made_up(8)]), pad_id=0)
    assert (late["updates_done"], late["finished"]) == (1, False)
    assert latest_checkpoint(tmp_path / "late" / "checkpoints") is not None
