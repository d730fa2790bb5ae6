"""Trajectories to padded tensors: masks from lengths, alignment, and that order and padding mean nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_algos.batch import Batch, collate
from sorl_algos.losses.segments import turn_ids_from_mask
from sorl_env.trajectory import Trajectory, Turn
from tests.sorl_algos.small_game import made_up


def turn(observation: tuple[int, ...], action: tuple[int, ...], reward: float = 0.0) -> Turn:
    return Turn(observation, action, tuple(-0.1 * token for token in action), reward, "o", "a")


def two_rows(pad_id: int = 2) -> Batch:
    first = Trajectory((turn((5,), (6, 2), 0.25), turn((8, 9), (2,), 1.0)), "a", "a", 0, "answered")
    second = Trajectory((turn((7, 3), (2,), -0.5),), "b", "b", 0, "turn_limit")
    return collate([first, second], pad_id)


def test_two_rows_by_hand_with_pad_equal_to_the_end_token() -> None:
    # Row 0: o5 a6 a2 | o8 o9 a2. Row 1: o7 o3 a2, then padding with 2, the end token that both rows sampled.
    batch = two_rows()
    assert batch.token_ids.tolist() == [[5, 6, 2, 8, 9, 2], [7, 3, 2, 2, 2, 2]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0]]
    assert batch.turn_ids.tolist() == [[-1, 0, 0, -1, -1, 1], [-1, -1, 0, -1, -1, -1]]
    assert batch.rewards.tolist() == [[0, 0, 0.25, 0, 0, 1.0], [0, 0, -0.5, 0, 0, 0]]
    torch.testing.assert_close(
        batch.rollout_logp,
        torch.tensor([[0, -0.6, -0.2, 0, 0, -0.2], [0, 0, -0.2, 0, 0, 0]]),
        atol=1e-7,
        rtol=0,
    )
    assert batch.group_ids.tolist() == [0, 1]
    assert batch.lengths().tolist() == [6, 3]


def test_the_per_turn_limit_never_cuts_the_merged_row() -> None:
    # Turns of 4 and 3 sampled tokens with 6 observed between them: 13 after the prompt, 7 of them trained.
    row = Trajectory((turn((1,), (2, 3, 4, 5)), turn((6,) * 6, (7, 8, 9))), "q", 0, 0, "answered")
    batch = collate([row], 0)
    assert batch.token_ids.shape == (1, 14) and int(batch.loss_mask.sum()) == 7


@given(st.integers(0, 10_000), st.integers(1, 7))
def test_masks_agree_with_the_trajectory_and_turn_ids_can_be_rebuilt(seed: int, rows: int) -> None:
    items = made_up(rows, seed=seed)
    batch = collate(items, 0)
    assert torch.equal(batch.turn_ids, turn_ids_from_mask(batch.loss_mask))
    for row, item in enumerate(items):
        length = len(item.token_ids())
        assert batch.token_ids[row, :length].tolist() == item.token_ids()
        assert batch.turn_ids[row, :length].tolist() == item.turn_ids()
        assert batch.rollout_logp[row, :length].tolist() == pytest.approx(item.logprobs())
        assert not batch.attention_mask[row, length:].any() and not batch.loss_mask[row, length:].any()
        assert float(batch.rewards[row].sum()) == pytest.approx(item.reward)
        assert (batch.rewards[row] != 0).sum() <= len(item.turns)


@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_order_and_padding_do_not_matter(seed: int, rng) -> None:
    items = made_up(6, seed=seed)
    order = rng.sample(range(6), 6)
    straight, shuffled = collate(items, 0), collate([items[row] for row in order], 1)
    for place, row in enumerate(order):
        alone = collate([items[row]], 2)
        width = alone.token_ids.shape[1]
        assert torch.equal(shuffled.token_ids[place, :width], straight.token_ids[row, :width])
        for name in ("attention_mask", "loss_mask", "turn_ids", "rewards", "rollout_logp"):
            assert torch.equal(getattr(shuffled, name)[place, :width], getattr(alone, name)[0]), name
            assert torch.equal(getattr(straight, name)[row, :width], getattr(alone, name)[0]), name


def test_groups_are_numbered_in_order_of_appearance() -> None:
    items = made_up(6, group_size=2)
    assert collate(items, 0).group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert collate(items[::-1], 0).group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert collate(items, 0, group_ids=["x", 7, "x", 7, "y", "x"]).group_ids.tolist() == [0, 1, 0, 1, 2, 0]


def test_rows_are_cut_to_the_longest_of_them() -> None:
    batch = two_rows()
    short = batch.rows(torch.tensor([1]))
    assert short.token_ids.tolist() == [[7, 3, 2]] and short.group_ids.tolist() == [1]
    both = batch.rows(torch.tensor([1, 0]))
    assert both.token_ids.tolist() == [[7, 3, 2, 2, 2, 2], [5, 6, 2, 8, 9, 2]]
    assert batch.rows(slice(1, 2)).token_ids.tolist() == short.token_ids.tolist()
    assert short.old_logp is None


@given(st.integers(0, 1000), st.integers(1, 9))
def test_microbatches_are_a_partition_sorted_by_length(seed: int, sequences: int) -> None:
    batch = collate(made_up(8, seed=seed, group_size=1), 0)
    pieces = list(batch.microbatches(sequences))
    assert [len(piece) for piece in pieces[:-1]] == [sequences] * (len(pieces) - 1)
    assert sorted(int(group) for piece in pieces for group in piece.group_ids) == list(range(8))
    lengths = [int(length) for piece in pieces for length in piece.lengths()]
    assert lengths == sorted(lengths)
    assert all(piece.token_ids.shape[1] == int(piece.lengths().max()) for piece in pieces)


def test_stages_replace_and_wrong_shapes_are_refused() -> None:
    batch = two_rows()
    filled = batch.replace(old_logp=torch.zeros(2, 6))
    assert batch.old_logp is None and filled.old_logp is not None and len(filled) == 2
    with pytest.raises(ValueError, match=r"Batch.old_logp has shape \(2, 5\), expected \(2, 6\)"):
        batch.replace(old_logp=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"Batch.group_ids has shape \(2, 6\), expected \(2,\)"):
        batch.replace(group_ids=torch.zeros(2, 6))


def test_nothing_to_collate_is_an_error() -> None:
    with pytest.raises(ValueError, match="every episode of the batch was dropped"):
        collate([], 0)
