"""The supervised warm start: it imitates actions, observations on demand, and resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_algos.batch import collate
from sorl_algos.models import Policy, token_logprobs
from sorl_algos.warmup import plain_attention, supervised, supervised_loss
from sorl_env.trajectory import Trajectory
from tests.sorl_algos.small_game import made_up

SETTINGS: dict[str, Any] = {"batch_sequences": 4, "lr": 3e-3, "pad_id": 0, "seed": 0}


def test_the_loss_is_the_mean_over_action_tokens(make_model: Any) -> None:
    batch, policy = collate(made_up(4), 0), Policy(make_model())
    logp = token_logprobs(policy, batch).logp
    expected = -logp[batch.loss_mask].mean()
    assert supervised_loss(policy, batch).item() == pytest.approx(expected.item(), rel=1e-6)


def test_it_learns_the_actions_and_not_the_observations(make_model: Any) -> None:
    items, policy = made_up(8), Policy(make_model(hidden_size=64))
    losses = supervised(policy, items, steps=60, **SETTINGS)
    assert len(losses) == 60 and losses[0] > 5.5 and sum(losses[-5:]) / 5 < 0.5 * losses[0]
    batch = collate(items, 0)
    seen = batch.attention_mask & ~batch.loss_mask
    seen[:, 0] = False
    # log(349) = 5.85 is a uniform guess over the vocabulary; nothing taught it these tokens
    assert supervised_loss(policy, batch.replace(loss_mask=seen)).item() > 5.0


def test_a_share_of_the_observations_can_be_learnt_too(make_model: Any) -> None:
    items, policy = made_up(8), Policy(make_model(hidden_size=64))
    supervised(policy, items, steps=60, observation_share=1.0, **SETTINGS)
    batch = collate(items, 0)
    seen = batch.attention_mask & ~batch.loss_mask
    seen[:, 0] = False
    assert supervised_loss(policy, batch.replace(loss_mask=seen)).item() < 4.0


def test_equal_seeds_give_equal_losses(make_model: Any) -> None:
    def losses(**changes: Any) -> list[float]:
        return supervised(Policy(make_model()), made_up(8), steps=3, observation_share=0.5, **SETTINGS | changes)

    assert losses() == losses() and losses(seed=1) != losses()


def test_resuming_equals_the_straight_run(make_model: Any, tmp_path: Path) -> None:
    def run(steps: int, directory: Path | None) -> tuple[list[float], Policy]:
        policy = Policy(make_model())
        losses = supervised(
            policy, made_up(10), steps=steps, checkpoints=directory, save_every=2, observation_share=0.3, **SETTINGS
        )
        return losses, policy

    class Stop(Exception):
        pass

    def stop(step: int, loss: float) -> None:
        if step == 4:
            raise Stop

    expected, straight = run(7, None)
    with pytest.raises(Stop):  # killed in step 5, after the save at 4
        supervised(
            Policy(make_model()), made_up(10), steps=7, checkpoints=tmp_path, save_every=2, observation_share=0.3,
            on_step=stop, **SETTINGS,
        )  # fmt: skip
    losses, resumed = run(7, tmp_path)
    assert losses == expected
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert [path.name for path in tmp_path.iterdir()] == ["step_000007"]
    assert run(7, tmp_path)[0] == expected  # done already: nothing is run


def test_passes_can_be_made_as_they_come(make_model: Any) -> None:
    asked: list[int] = []

    def lessons(number: int) -> list[Trajectory]:
        asked.append(number)
        return made_up(8, seed=number)

    supervised(Policy(make_model()), lessons, steps=5, **SETTINGS)
    assert asked == [0, 1, 2]  # two batches of four a pass


def test_no_demonstration_is_an_error(make_model: Any) -> None:
    with pytest.raises(ValueError, match="no demonstrations to learn from"):
        supervised(Policy(make_model()), [], steps=1, **SETTINGS)


def test_the_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    from sorl_algos.warmup import _cosine_with_warmup

    shares = [_cosine_with_warmup(step, 100, 0.1) for step in range(100)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(shares) == 1.0 and shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[55] == pytest.approx(0.1 + 0.9 / 2) and 0.1 < shares[99] < 0.102


def test_attention_is_plain_for_half_precision_and_only_while_imitating(make_model: Any) -> None:
    policy = Policy(make_model(), compute_dtype=torch.bfloat16)
    settings = policy.lm.base_model.config
    usual = settings._attn_implementation
    assert usual == "sdpa"
    with plain_attention(policy):
        assert settings._attn_implementation == "eager"
    assert settings._attn_implementation == usual
    full = Policy(make_model())
    with plain_attention(full):
        assert full.lm.base_model.config._attn_implementation == usual
