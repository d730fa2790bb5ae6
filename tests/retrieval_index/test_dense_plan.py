"""Sizes of dense indexes: pure arithmetic, no FAISS."""

from __future__ import annotations

import math
import re

import pytest

from retrieval_index.dense_plan import (
    DenseParameters,
    choose_type,
    default_nlist,
    largest_nlist,
    place,
    pq_trainable,
    settle,
    spread,
    training_rows,
    vector_bytes,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("passages", "kind"),
    [
        (0, "flat"),
        (100_000, "flat"),
        (100_001, "fp16"),
        (400_001, "hnsw"),
        (2_000_000, "hnsw"),
        (21_015_324, "ivf-pq"),
    ],
)
def test_auto_goes_by_size(passages: int, kind: str) -> None:
    assert choose_type(passages) == kind
    assert settle(DenseParameters(), passages, 768).index_type == kind


@pytest.mark.parametrize(("passages", "most"), [(618, 15), (39, 1), (78, 2), (1_000_000, 25_641)])
def test_39_vectors_train_a_list(passages: int, most: int) -> None:
    assert largest_nlist(passages) == most


@pytest.mark.parametrize("passages", [0, 1, 38])
def test_too_few_vectors_for_one_list(passages: int) -> None:
    with pytest.raises(
        ValueError, match=rf"39 vectors to train, the corpus has {passages}; choose the index type flat"
    ):
        largest_nlist(passages)


@pytest.mark.parametrize("kind", ["ivf-pq", "auto"])
def test_more_lists_than_can_be_trained_are_refused_with_both_numbers(kind: str) -> None:
    # 175 // 39 = 4 lists
    with pytest.raises(ValueError, match=r"nlist 500 needs 19500 vectors to train, the corpus has 175; .*nlist 4"):
        settle(DenseParameters(kind, nlist=500, pq_nbits=4), 175, 64)


@pytest.mark.parametrize(
    ("passages", "nbits", "can"), [(111, 8, False), (111, 4, True), (256, 8, True), (255, 8, False), (16, 4, True)]
)
def test_codes_need_as_many_vectors_as_they_have_centroids(passages: int, nbits: int, can: bool) -> None:
    assert pq_trainable(passages, nbits) is can
    if not can:
        with pytest.raises(ValueError, match=f"codes of 8 bits need 256 vectors to train, the corpus has {passages}"):
            settle(DenseParameters("ivf-pq"), passages, 64)


def test_a_large_corpus_is_settled() -> None:
    # 4 * sqrt(21,015,324) = 18,337; the nearest power of two is 2^14; a sixteenth of the lists, at most 128
    made = settle(DenseParameters(), 21_015_324, 768)
    assert (made.nlist, made.pq_m, made.nprobe) == (16_384, 96, 128)
    assert vector_bytes(made, 768) == 96 + 8
    assert training_rows(16_384, 21_015_324) == 64 * 16_384


@pytest.mark.parametrize(("dimension", "m"), [(384, 96), (768, 96), (1024, 64), (64, 32), (100, 20)])
def test_codes_take_the_most_bytes_that_divide_the_dimension(dimension: int, m: int) -> None:
    assert settle(DenseParameters("ivf-pq"), 100_000, dimension).pq_m == m


def test_settling_again_changes_nothing() -> None:
    for kind in ("flat", "fp16", "hnsw", "ivf-pq"):
        once = settle(DenseParameters(kind), 50_000, 384)
        assert settle(once, 50_000, 384) == once


def test_a_small_corpus_is_told_that_codes_train_poorly() -> None:
    with pytest.warns(UserWarning, match="train 256 codes poorly"):
        settle(DenseParameters("ivf-pq"), 1000, 64)


@pytest.mark.parametrize(
    "wrong",
    [{"index_type": "best"}, {"nlist": 0}, {"pq_nbits": 9}, {"pq_nbits": 3}, {"hnsw_m": 1}, {"ef_search": 0}],
)
def test_parameters_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", "[ _]")):
        DenseParameters(**wrong)


def test_codes_that_do_not_divide_the_dimension_are_refused() -> None:
    with pytest.raises(ValueError, match="pq_m 7 does not divide the dimension 64"):
        settle(DenseParameters("ivf-pq", pq_m=7), 50_000, 64)


def test_bytes_of_a_vector() -> None:
    assert vector_bytes(DenseParameters("flat"), 768) == 3072
    assert vector_bytes(DenseParameters("fp16"), 768) == 1536
    assert vector_bytes(DenseParameters("hnsw"), 768) > 3072 + 2 * 32 * 4


@pytest.mark.parametrize(
    ("needed", "free", "chosen"),
    [
        (10 * GIB, [16 * GIB], [0]),
        (15 * GIB, [16 * GIB], None),  # 2 GiB of each are kept free
        (20 * GIB, [16 * GIB, 12 * GIB], [0, 1]),  # twice 12 - 2
        (21 * GIB, [16 * GIB, 12 * GIB], None),
        (5 * GIB, [4 * GIB, 24 * GIB], [1]),  # one suffices, the emptiest
        (60 * GIB, [24 * GIB] * 4, [0, 1, 2]),
        (1, [], None),
        (1, [1 * GIB], None),
    ],
)
def test_an_index_is_never_spread_over_more_memory_than_there_is(needed: int, free: list[int], chosen) -> None:
    assert spread(needed, free) == chosen


def test_lists_are_a_power_of_two() -> None:
    for passages in (40, 10_000, 3_000_000, 10**9):
        assert math.log2(default_nlist(passages)).is_integer()
    assert default_nlist(10**9) == 65_536


# 5 million vectors of 1,024 numbers: 19.1 GiB in float32, 9.5 in float16; 2 GiB of each GPU are kept.
@pytest.mark.parametrize(
    ("kind", "free", "gpus", "half", "says"),
    [
        ("flat", [], (), False, ""),
        ("flat", [24 * GIB], (0,), False, ""),
        ("flat", [16 * GIB], (0,), True, "16 bits only"),
        ("flat", [16 * GIB, 16 * GIB], (0, 1), False, ""),
        ("flat", [8 * GIB], (), False, r"needs 19\.1 GiB, the GPUs have 8\.0 GiB free"),
        ("fp16", [16 * GIB], (0,), True, ""),
        ("fp16", [8 * GIB], (), False, r"needs 9\.5 GiB"),
        ("hnsw", [80 * GIB], (), False, "no GPU code for graphs"),
        ("ivf-pq", [8 * GIB], (0,), False, ""),
    ],
)
def test_placement(kind: str, free: list[int], gpus: tuple, half: bool, says: str) -> None:
    made = place(settle(DenseParameters(kind), 5_000_000, 1024), 5_000_000, 1024, free)
    assert (made.gpus, made.half) == (gpus, half)
    assert re.search(says, made.remark)
    assert bool(made.remark) == bool(says)


def test_codes_without_gpu_code_stay_on_the_cpu() -> None:
    made = settle(DenseParameters("ivf-pq", pq_nbits=4), 50_000, 64)
    assert place(made, 50_000, 64, [80 * GIB]).gpus == ()
