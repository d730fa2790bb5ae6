"""What the cost figures rest on: the same tokens on both sides, the clipped share, rounds that take turns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.bench.timing import interleaved, ratio
from scripts.bench.trl_updates import trl_tensors
from scripts.bench.updates import batch_of, clipped_share, episodes, update
from sorl_algos.learner import make_learner
from sorl_algos.models import Policy
from tests.sorl_algos.small_game import small_config


def test_both_sides_get_the_same_tokens() -> None:
    items = episodes(8, group_size=4, turns=3, observation=10, action=6, vocabulary=300)
    ours, theirs = batch_of(items), trl_tensors(items)
    mask = torch.cat([theirs["prompt_mask"], theirs["completion_mask"]], dim=1).bool()
    ids = torch.cat([theirs["prompt_ids"], theirs["completion_ids"]], dim=1)
    for row in range(8):
        assert ids[row][mask[row]].tolist() == ours.token_ids[row][ours.attention_mask[row]].tolist()
    sampled = theirs["completion_ids"][(theirs["tool_mask"] * theirs["completion_mask"]).bool()]
    assert sampled.tolist() == ours.token_ids[ours.loss_mask].tolist()
    assert theirs["prompt_mask"][:, -1].all(), "prompts are padded on the left"


@pytest.mark.parametrize(("by", "within"), [("token", 1.0), ("token", 0.5), ("turn", 1.0)])
def test_the_asked_share_of_the_tokens_is_clipped(by: str, within: float, make_model: object, tmp_path: Path) -> None:
    # such a rate leaves the policy where it was, so both minibatches see the ratios that were made; lengths differ by
    # half either way and turns move as a whole, hence the tolerance
    items = episodes(16, group_size=2, turns=3, observation=4, action=8, vocabulary=300)
    settings = {"questions_per_update": 8, "minibatch_sequences": 8, "lr": 1e-12, "critic_lr": 1e-12}
    config = small_config(tmp_path, algorithm="ppo", level=by, **settings)
    learner = make_learner(config, Policy(make_model(0), shared_critic=True))  # type: ignore[operator]
    batch = batch_of(items)
    found = update(learner, batch, clipped_share(learner, batch, share=0.1, by=by, within=within))
    assert found["clip_fraction"] == pytest.approx(0.1, abs=0.04)


def test_every_task_leads_a_round_in_turn() -> None:
    order: list[str] = []
    found = interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 3)
    assert order == list("ab" "ab" "ba" "ab")  # one uncounted round before the three
    assert all(len(times.cpu) == len(times.wall) == 3 for times in found.values())


def test_ratio_of_each_round() -> None:
    # rounds of 2, 2, 3 and 1: median 2, whatever slowed a whole round
    assert ratio([2.0, 20.0, 6.0, 5.0], [1.0, 10.0, 2.0, 5.0]).median == 2.0
