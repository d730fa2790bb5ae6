"""Every row of the table of algorithms, and every preset, constructs and fits together."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from scripts.presets import PRESETS
from sorl_algos.algorithms import ALGORITHMS, ALIASES, Algorithm, algorithm
from sorl_algos.config import TrainConfig
from sorl_algos.losses.reduce import Counts

# Two episodes of two turns each: observation tokens (0) part the turns. Columns: 7 tokens.
MASK = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 1, 0, 0]], dtype=torch.bool)
TURN_IDS = torch.tensor([[-1, 0, 0, -1, 1, 1, 1], [-1, 0, -1, -1, 1, -1, -1]])
COUNTS = Counts(tokens=7, turns=4, sequences=2)


def test_the_rows_that_the_documents_name_are_there() -> None:
    named = {"ppo", "turn_ppo", "s_ppo", "so_ppo", "grpo", "s_grpo", "so_grpo", "gspo"}
    named |= {"rloo", "dr_grpo", "cispo", "reinforce"}
    assert named <= set(ALGORITHMS)
    assert set(ALIASES.values()) <= set(ALGORITHMS)


@pytest.mark.parametrize("name", [*ALGORITHMS, *ALIASES])
def test_a_row_takes_a_batch_from_rewards_to_gradient(name: str) -> None:
    row = algorithm(name)
    rewards = torch.zeros(MASK.shape)
    rewards[0, 6] = 1.0  # the first episode answered rightly, the second did not
    advantages, returns = row.estimate_advantages(
        rewards=rewards,
        values=torch.zeros(MASK.shape),
        mask=MASK,
        turn_ids=TURN_IDS,
        group_ids=torch.tensor([0, 0]),
        gamma=1.0,
        lam=0.95,
    )
    assert (returns is not None) == row.needs_critic
    old_logp = torch.full(MASK.shape, -1.0)
    logp = old_logp.clone().requires_grad_()
    out = row.policy_loss(logp, old_logp, advantages, MASK, TURN_IDS, clip_low=0.2, clip_high=0.2)
    row.reduce(out.per_token, MASK, TURN_IDS, COUNTS).backward()

    assert torch.isfinite(logp.grad).all()
    assert (logp.grad[~MASK] == 0).all()
    # The loss falls where the rewarded episode becomes more probable.
    assert (logp.grad[0][MASK[0]] < 0).all()


def test_an_unknown_row_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm 'pppo'; known: .*so_ppo"):
        algorithm("pppo")


def test_there_are_presets() -> None:
    assert "quickstart" in PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_constructs_and_can_be_changed(name: str) -> None:
    """A preset is a description and a config, as tyro's `overridable_config_cli` takes them."""
    description, config = PRESETS[name]
    assert description.strip()
    assert isinstance(config, TrainConfig)
    assert isinstance(config.algorithm_row(), Algorithm)
    # Constructing again runs every check of the config, as an override on the command line does.
    assert dataclasses.replace(config, updates=1).updates == 1
