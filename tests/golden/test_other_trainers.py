"""Our losses and advantages against verl's and TRL's on the same tensors, and where we differ on purpose.

`trainers.json` was written by scripts/compare_trainers.py in environments that hold those trainers; the
numbers are theirs. verl adds 1e-8 to lengths and counts, hence tolerances of 1e-7.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_algos.advantages import gae, whiten
from sorl_algos.algorithms import Algorithm, algorithm
from sorl_algos.losses.kl import k3, kl_per_token
from sorl_algos.losses.reduce import Counts, counts_of, token_mean
from sorl_algos.losses.segments import turn_ids_from_mask
from sorl_algos.losses.value import value_loss
from tests.sorl_algos.proofs import same

RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("trainers.json").read_text("utf-8"))
SET: dict[str, float] = RECORD["settings"]
X = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in RECORD["tensors"].items()}
MASK = X["mask"].bool()
IDS = turn_ids_from_mask(MASK)
COUNTS = counts_of(MASK, IDS)
KINDS = ("advantages", "sequence_advantages")


def loss_and_gradient(row: Algorithm, kind: str, kl: float = 0.0, **clips: float) -> tuple[Tensor, Tensor]:
    logp = X["logp"].clone().requires_grad_()
    clips = {"clip_low": SET["clip_low"], "clip_high": SET["clip_high"]} | clips
    out = row.policy_loss(logp, X["old_logp"], X[kind], MASK, IDS, **clips)
    per_token = out.per_token + kl * k3(logp, X["ref_logp"], MASK)
    loss = row.reduce(per_token, MASK, IDS, COUNTS)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss, gradient


def difference(row: Algorithm, kind: str, theirs: dict[str, Any]) -> tuple[float, float]:
    loss, gradient = loss_and_gradient(row, kind)
    worst = (gradient - torch.tensor(theirs["gradient"], dtype=torch.float64)).abs().max()
    return abs(loss.item() - theirs["loss"]), worst.item()


def agree(trainer: str, name: str, row: Algorithm, kind: str, kl: float = 0.0, **clips: float) -> None:
    theirs = RECORD[trainer]["results"][f"{name} | {kind}"]
    loss, gradient = loss_and_gradient(row, kind, kl, **clips)
    what = f"{trainer} {RECORD[trainer]['version']}: {name}"
    same(what, loss, torch.tensor(theirs["loss"], dtype=torch.float64), tolerance=1e-7)
    same(what, gradient, theirs["gradient"], tolerance=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_verl_policy_losses(kind: str) -> None:
    # verl always applies its dual clip (here c = 3)
    row = algorithm("ppo", dual_clip=SET["dual_clip"])
    agree("verl", "vanilla", row, kind)
    mean_of_means = algorithm("grpo", dual_clip=SET["dual_clip"])
    agree("verl", "vanilla, sequence mean of token mean", mean_of_means, kind)
    sums = algorithm("rloo", dual_clip=SET["dual_clip"])
    agree("verl", "vanilla, sequence mean of token sum", sums, kind)
    agree("verl", "cispo", algorithm("cispo"), kind)


def test_difference_verl_dual_clip_is_on_by_default() -> None:
    theirs = RECORD["verl"]["results"]["vanilla | advantages"]
    loss, gradient = difference(algorithm("ppo"), "advantages", theirs)
    assert loss > 1e-2 and gradient > 1e-2
    # and nowhere but on tokens with A < 0 and a ratio above 3
    _, ours = loss_and_gradient(algorithm("ppo"), "advantages")
    ratio = (X["logp"] - X["old_logp"]).exp()
    reached = MASK & (X["advantages"] < 0) & (ratio > SET["dual_clip"])
    apart = (ours - torch.tensor(theirs["gradient"], dtype=torch.float64)).abs() > 1e-9
    assert reached.any() and torch.equal(apart, reached)


def test_gspo_agrees_for_one_advantage_per_sequence() -> None:
    agree("verl", "gspo", algorithm("gspo"), "sequence_advantages")
    agree("trl", "grpo at sequence level", algorithm("gspo"), "sequence_advantages")
    agree("trl", "grpo at sequence level", algorithm("gspo"), "advantages")


def test_difference_verl_gspo_stops_the_gradient_through_the_other_tokens() -> None:
    # Same value; with an advantage per token, token t gets w A_t there and w mean(A) here (and in TRL).
    theirs = RECORD["verl"]["results"]["gspo | advantages"]
    loss, gradient = difference(algorithm("gspo"), "advantages", theirs)
    assert loss < 1e-7 and gradient > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_trl_policy_losses(kind: str) -> None:
    agree("trl", "grpo at token level", algorithm("grpo"), kind)
    agree("trl", "grpo at token level with kl", algorithm("grpo"), kind, kl=SET["beta"])
    agree("trl", "dapo at token level", algorithm("ppo"), kind)
    agree("trl", "dr_grpo at token level", algorithm("dr_grpo", norm_length=SET["norm_length"]), kind)
    # TRL reads its upper setting as the bound of the ratio itself (0.28, where ours is 1 + 0.28), without a
    # lower one
    agree(
        "trl",
        "cispo at token level",
        algorithm("cispo"),
        kind,
        clip_low=1.0,
        clip_high=SET["clip_high"] - 1.0,
    )


def test_verl_gae_and_whitening() -> None:
    theirs = RECORD["verl"]["results"]["gae, whitened"]
    advantages, returns = gae(X["rewards"], X["values"], MASK, gamma=SET["gamma"], lam=SET["lam"])
    what = f"verl {RECORD['verl']['version']}: gae"
    same(what, whiten(advantages, MASK), theirs["advantages"], tolerance=1e-8)
    same(what, returns, theirs["returns"], tolerance=1e-12)


@pytest.mark.parametrize("name", ["group", "group_unscaled", "leave_one_out"])
def test_verl_group_advantages(name: str) -> None:
    theirs = RECORD["verl"]["results"][name.replace("_u", ", u")]["advantages"]
    ours, _ = algorithm("grpo", advantages=name).estimate_advantages(
        rewards=X["rewards"],
        values=None,
        mask=MASK,
        turn_ids=IDS,
        group_ids=X["group_ids"].long(),
        gamma=1.0,
        lam=1.0,
    )
    same(f"verl {RECORD['verl']['version']}: {name}", ours[:3], theirs[:3], tolerance=1e-7)
    # A group of one: verl gives the return itself (mean 0, standard deviation 1), we give 0.
    alone = X["rewards"][3].sum().item()
    assert theirs[3][0] == pytest.approx(alone, rel=1e-5) and abs(alone) > 0.1
    assert ours[3].eq(0.0).all()


def test_verl_value_loss_and_kl() -> None:
    theirs = RECORD["verl"]["results"]["value_loss"]
    values = X["values"].clone().requires_grad_()
    per_token = value_loss(values, X["old_values"], X["returns"], MASK, clip_range=SET["value_clip"])
    loss = token_mean(per_token, MASK, IDS, Counts(COUNTS.tokens, COUNTS.turns, COUNTS.sequences))
    (gradient,) = torch.autograd.grad(loss, values)
    what = f"verl {RECORD['verl']['version']}: value loss and KL"
    same(what, loss, torch.tensor(theirs["loss"], dtype=torch.float64), tolerance=1e-7)
    same(what, gradient, theirs["gradient"], tolerance=1e-7)
    for name in ("k1", "k2", "k3"):
        ours = kl_per_token(X["logp"], X["ref_logp"], MASK, estimator=name)
        same(what, ours, RECORD["verl"]["results"][name]["per_token"], tolerance=1e-12)
