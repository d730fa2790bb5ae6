"""Learning-rate schedules by hand, and what the learner makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_algos.learner import make_learner, set_learning_rates
from sorl_algos.models import Policy
from sorl_algos.schedules import rate_share
from tests.sorl_algos.small_game import small_config


def shares(schedule: Any, moves: int, **settings: Any) -> list[float]:
    given = {"warmup_updates": 0, "total_updates": 4} | settings
    return [rate_share(moved, schedule=schedule, **given) for moved in range(moves)]


def test_constant_linear_and_cosine_by_hand() -> None:
    assert shares("constant", 6) == [1.0] * 6
    assert shares("linear", 6) == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])  # past the end it stays
    # 0.5 (1 + cos(pi p)) at p = 0, 1/4, 1/2, 3/4, 1
    assert shares("cosine", 5) == pytest.approx([1, 0.8535533906, 0.5, 0.1464466094, 0], abs=1e-9)


def test_warm_up_and_what_is_left_at_the_end() -> None:
    # 1/3 and 2/3, then from 1 to 0.2 over the 4 updates that are left: 1, 0.8, 0.6, 0.4
    got = shares("linear", 6, warmup_updates=2, total_updates=6, final_share=0.2)
    assert got == pytest.approx([1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4])
    assert rate_share(-1, schedule="cosine", warmup_updates=0, total_updates=4) == 0.0
    assert shares("cosine", 3, warmup_updates=5, total_updates=3) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_the_policy_follows_it_from_its_first_move_and_the_critic_does_not(make_model: Any, tmp_path: Path) -> None:
    config = small_config(
        tmp_path, lr=0.01, critic_lr=0.5, critic_warmup_updates=2, updates=6, lr_schedule="linear", lr_final_share=0.5
    )
    learner = make_learner(config, Policy(make_model(), shared_critic=True))
    rates = []
    for update in range(6):
        set_learning_rates(learner, update)
        policy, value = learner.policy_optimizer.param_groups
        rates.append(policy["lr"])
        assert value["lr"] == 0.5
    assert rates == pytest.approx([0, 0, 0.01, 0.00875, 0.0075, 0.00625])
