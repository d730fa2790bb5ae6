"""Reductions over given global counts: by hand, against token weights, any split, empty rows and batches."""

import pytest
import torch

from sorl_algos.losses.reduce import REDUCTIONS, Counts, counts_of, sequence_mean_token_sum_norm
from sorl_algos.losses.segments import turn_ids_from_mask
from tests.sorl_algos import reference_loops as loops
from tests.sorl_algos.proofs import random_batch, same


def reduce_all(per_token: list[list[float]], mask: list[list[int]], norm_length: float = 8) -> dict[str, float]:
    tensor_mask = torch.tensor(mask)
    ids = turn_ids_from_mask(tensor_mask)
    counts = counts_of(tensor_mask, ids)
    losses = torch.tensor(per_token, dtype=torch.float64)
    return {
        name: function(losses, tensor_mask, ids, counts, norm_length=norm_length).item()
        for name, function in REDUCTIONS.items()
    }


def test_five_objectives_by_hand() -> None:
    # Row 0: 1, 1, 1, 1; row 1: 3 and padding. Tokens 5, sequences 2, turns 2 (one a row).
    # 7/5; (1 + 3)/2; (4 + 3)/2; 7/(2*8); turns have means 1 and 3.
    got = reduce_all([[1, 1, 1, 1], [3, 0, 0, 0]], [[1, 1, 1, 1], [1, 0, 0, 0]])
    assert got == pytest.approx(
        {
            "token_mean": 1.4,
            "turn_mean": 2.0,
            "sequence_mean_token_mean": 2.0,
            "sequence_mean_token_sum": 3.5,
            "sequence_mean_token_sum_norm": 0.4375,
        },
        abs=1e-12,
    )


def test_turn_mean_by_hand() -> None:
    # Row 0: turns (1, 2) and (6); row 1: turn (3). Turn means 1.5, 6, 3: 10.5 / 3. The token mean is 12 / 4
    # and the sequence mean (9/3 + 3) / 2; the observation's 100 counts nowhere.
    got = reduce_all([[1, 2, 100, 6], [3, 100, 100, 100]], [[1, 1, 0, 1], [1, 0, 0, 0]])
    assert got["turn_mean"] == pytest.approx(3.5)
    assert got["token_mean"] == pytest.approx(3.0)
    assert got["sequence_mean_token_mean"] == pytest.approx(3.0)


def test_only_action_tokens_enter_the_denominator() -> None:
    # Ten response tokens, four of them actions with losses 0.5: 2 / 4, not 2 / 10.
    got = reduce_all([[0.5] * 4 + [9.0] * 6], [[1] * 4 + [0] * 6])
    assert got["token_mean"] == pytest.approx(0.5)


def test_row_without_action_tokens_leaves_the_means() -> None:
    got = reduce_all([[0.4, 0.6], [9.0, 9.0]], [[1, 1], [0, 0]])
    assert got["token_mean"] == got["sequence_mean_token_mean"] == got["turn_mean"] == pytest.approx(0.5)
    assert got["sequence_mean_token_sum"] == pytest.approx(1.0)


@pytest.mark.parametrize("how", list(REDUCTIONS))
def test_empty_batch_gives_zero_attached_to_the_graph(how: str) -> None:
    per_token = torch.tensor([[1.0, float("nan")], [3.0, 4.0]], requires_grad=True)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    ids = turn_ids_from_mask(mask)
    for counts in (counts_of(mask, ids), Counts(0, 0, 0)):
        loss = REDUCTIONS[how](per_token, mask, ids, counts, norm_length=4)
        assert loss.item() == 0.0
        (gradient,) = torch.autograd.grad(loss, per_token)
        assert gradient.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_microbatches_add_up_to_the_whole_by_hand() -> None:
    # 3 tokens of mean 1.0 and 9 of mean 0.2 over a global count of 12: 4.8 / 12 = 0.4 (the mean of means is
    # 0.6).
    counts = Counts(tokens=12, turns=2, sequences=2)
    total = 0.0
    for tokens, mean in ((3, 1.0), (9, 0.2)):
        per_token = torch.full((1, tokens), mean, dtype=torch.float64)
        mask = torch.ones(1, tokens)
        total += REDUCTIONS["token_mean"](per_token, mask, turn_ids_from_mask(mask), counts).item()
    assert total == pytest.approx(0.4, abs=1e-12)


@pytest.mark.parametrize("how", list(REDUCTIONS))
@pytest.mark.parametrize("seed", range(3))
def test_reductions_equal_token_weights_under_any_split(how: str, seed: int) -> None:
    batch = random_batch(seed)
    counts = counts_of(batch.mask, batch.turn_ids)
    weights = torch.tensor(loops.reduction_weights(batch.mask.tolist(), how, 16), dtype=torch.float64)
    per_token = batch.rewards.clone().requires_grad_()
    loss = REDUCTIONS[how](per_token, batch.mask, batch.turn_ids, counts, norm_length=16)
    (gradient,) = torch.autograd.grad(loss, per_token)
    same(f"{how}: value = weighted sum", loss, (weights * batch.rewards).sum(), tolerance=1e-13)
    same(f"{how}: gradient = token weights", gradient, weights, tolerance=1e-15)
    for size in (1, 2, 3):
        for order in (torch.arange(5), torch.tensor([4, 2, 0, 3, 1])):
            parts = [
                REDUCTIONS[how](batch.rewards[i], batch.mask[i], batch.turn_ids[i], counts, norm_length=16)
                for i in order.split(size)
            ]
            same(f"{how}: micro-batches add up", torch.stack(parts).sum(), loss, tolerance=1e-13)


def test_counts_by_hand_and_their_sum() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    counts = counts_of(mask, turn_ids_from_mask(mask))
    assert (int(counts.tokens), int(counts.turns), int(counts.sequences)) == (7, 3, 2)
    both = counts + counts
    assert (int(both.tokens), int(both.turns), int(both.sequences)) == (14, 6, 4)


def test_a_turn_with_a_hole_is_one_turn() -> None:
    # A rejected token splits the run of the mask, not the turn.
    mask = torch.tensor([[1, 0, 1, 0, 1]])
    ids = torch.tensor([[0, 0, 0, -1, 1]])
    assert int(counts_of(mask, ids).turns) == 2


def test_norm_length_is_required_where_it_is_used() -> None:
    batch = random_batch(0)
    counts = counts_of(batch.mask, batch.turn_ids)
    with pytest.raises(ValueError, match="needs a positive norm_length in tokens, got None"):
        sequence_mean_token_sum_norm(batch.rewards, batch.mask, batch.turn_ids, counts)
