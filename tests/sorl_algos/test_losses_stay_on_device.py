"""No loss waits for the device: on the meta device every `.item()` and every data-dependent shape raises."""

import pytest
import torch
from torch import Tensor

from sorl_algos.algorithms import ALGORITHMS, CoefficientRatio, algorithm
from sorl_algos.losses import corrections
from sorl_algos.losses.kl import KL_ESTIMATORS
from sorl_algos.losses.policy import clip_fractions
from sorl_algos.losses.reduce import REDUCTIONS, counts_of
from sorl_algos.losses.segments import turn_ids_from_mask
from sorl_algos.losses.value import explained_variance, value_loss

CLIPS = {"clip_low": 0.2, "clip_high": 0.2}


def on_meta() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, other floats, mask, turn ids: (4, 16)."""
    mask = torch.zeros(4, 16, dtype=torch.bool, device="meta")
    logp = torch.zeros(4, 16, device="meta", requires_grad=True)
    return logp, torch.zeros(4, 16, device="meta"), mask, turn_ids_from_mask(mask)


def test_meta_tensors_do_refuse_a_transfer() -> None:
    with pytest.raises(RuntimeError):
        torch.zeros((), device="meta").item()


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_policy_losses(name: str) -> None:
    logp, other, mask, ids = on_meta()
    row = algorithm(name)
    out = row.policy_loss(logp, other, other, mask, ids, **CLIPS)
    row.reduce(out.per_token, mask, ids, counts_of(mask, ids)).backward()
    assert logp.grad is not None and logp.grad.shape == logp.shape
    if isinstance(row.normalisation, CoefficientRatio):
        assert row.trigger_sums(logp, other, other, mask, ids, **CLIPS).shape == (4,)
    clip_fractions(logp, other, mask, ids, **CLIPS)


def test_reductions_kl_value_and_corrections() -> None:
    logp, other, mask, ids = on_meta()
    counts = counts_of(mask, ids)
    for reduction in REDUCTIONS.values():
        reduction(logp, mask, ids, counts, norm_length=8).backward()
    for estimator in KL_ESTIMATORS.values():
        estimator(logp, other, mask).sum().backward()
    value_loss(logp, other, other, mask, clip_range=0.2).sum().backward()
    explained_variance(logp, other, mask)
    kept = {"low": 0.5, "high": 2.0, "rejected_leave_denominator": True}
    for level in ("token", "turn", "sequence"):
        corrections.truncated_is(other, other, mask, ids, level=level, cap=2.0)
        corrections.icepop(other, other, mask, ids, level=level, **kept)
        corrections.rejection(other, other, mask, ids, level=level, **kept)
        corrections.decoupled_weights(other, other, mask, ids, level=level)
    corrections.mismatch_by_turn(other, other, mask, ids, turns=3)
