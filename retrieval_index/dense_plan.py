"""Decisions about a dense index that need no FAISS: its type, its sizes, whether they can be trained.

They are taken before the first passage is encoded, since encoding is the expensive part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

INDEX_TYPES = ("flat", "fp16", "hnsw", "ivf-pq")

# "auto": the smallest corpora exactly; then exactly in half the memory; then a graph, whose searches do
# not grow with the corpus; then compressed, since a graph needs all vectors in memory.
FLAT_UP_TO = 100_000
FP16_UP_TO = 400_000
HNSW_UP_TO = 2_000_000

POINTS_PER_LIST = 39  # FAISS's own lower bound for training k-means (ClusteringParameters)
TRAINING_POINTS_PER_LIST = 64
# Sub-quantisers for which FAISS has GPU code.
PQ_SIZES = (96, 64, 56, 48, 40, 32, 28, 24, 20, 16, 12, 8, 4, 3, 2, 1)
_GPU_RESERVE = 2 << 30  # what FAISS's scratch space and the query batches take on each GPU


@dataclass(frozen=True, slots=True)
class DenseParameters:
    """What decides which FAISS index is made; written to the manifest once `settled`.

    Args:
        index_type: "flat", "fp16", "hnsw", "ivf-pq", or "auto" (by the number of passages).
        nlist: lists of ivf-pq; None: about 4 times the square root of the number of passages.
        pq_m: bytes a vector takes with ivf-pq and 8 bits; None: the most that divides the dimension.
        pq_nbits: bits of a code, 4 to 8 (a GPU wants 8).
        hnsw_m: links a vector of the graph.
        ef_construction: how widely the graph is searched while it is built.
        nprobe: lists looked at by a search unless it says otherwise; None: a sixteenth, 8 to 128.
        ef_search: how widely the graph is searched unless a search says otherwise.
        seed: of the sample that lists and codes are trained on.

    Raises:
        ValueError: an unknown type or a number out of range.
    """

    index_type: str = "auto"
    nlist: int | None = None
    pq_m: int | None = None
    pq_nbits: int = 8
    hnsw_m: int = 32
    ef_construction: int = 200
    nprobe: int | None = None
    ef_search: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.index_type not in ("auto", *INDEX_TYPES):
            raise ValueError(f"unknown index type {self.index_type!r}; choose auto, {', '.join(INDEX_TYPES)}")
        for name in ("nlist", "pq_m", "hnsw_m", "ef_construction", "nprobe", "ef_search"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if not 4 <= self.pq_nbits <= 8:
            raise ValueError(f"pq_nbits must lie between 4 and 8, got {self.pq_nbits}")
        if self.hnsw_m < 2:
            raise ValueError(f"hnsw_m must be 2 or more, got {self.hnsw_m}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return asdict(self)


def settle(wanted: DenseParameters, passages: int, dimension: int) -> DenseParameters:
    """Choose what was left open, and refuse what cannot be trained.

    Args:
        passages: how many vectors there will be.
        dimension: of a vector.

    Raises:
        ValueError: more lists or codes than the corpus can train; names the numbers and the largest
            that can be.
    """
    kind = wanted.index_type if wanted.index_type != "auto" else choose_type(passages)
    if kind != "ivf-pq":
        if wanted.nlist is not None and wanted.index_type == "auto":
            largest_nlist(passages, wanted=wanted.nlist)
            kind = "ivf-pq"
        else:
            return replace(wanted, index_type=kind)
    pq_m = wanted.pq_m or next(size for size in PQ_SIZES if dimension % size == 0 and dimension // size >= 2)
    if dimension % pq_m:
        raise ValueError(f"pq_m {pq_m} does not divide the dimension {dimension}; choose a divisor")
    if not pq_trainable(passages, wanted.pq_nbits):
        raise ValueError(
            f"codes of {wanted.pq_nbits} bits need {2**wanted.pq_nbits} vectors to train, the corpus has"
            f" {passages}; choose fewer bits or the index type flat"
        )
    most = largest_nlist(passages, wanted=wanted.nlist)
    nlist = wanted.nlist or min(most, default_nlist(passages))
    nprobe = wanted.nprobe or min(nlist, max(8, min(128, nlist // 16)))
    if training_rows(nlist, passages) < POINTS_PER_LIST * 2**wanted.pq_nbits:
        warnings.warn(
            f"{passages} vectors train {2**wanted.pq_nbits} codes poorly; a corpus of this size is better"
            " served by the index type flat",
            stacklevel=2,
        )
    return replace(wanted, index_type=kind, nlist=nlist, pq_m=pq_m, nprobe=min(nprobe, nlist))


def choose_type(passages: int) -> str:
    """The index type that "auto" means for a corpus of this size."""
    if passages <= FLAT_UP_TO:
        return "flat"
    if passages <= FP16_UP_TO:
        return "fp16"
    return "hnsw" if passages <= HNSW_UP_TO else "ivf-pq"


def largest_nlist(passages: int, points_per_list: int = POINTS_PER_LIST, *, wanted: int | None = None) -> int:
    """The most lists that this many vectors can train.

    Raises:
        ValueError: too few vectors for even one list, or fewer lists than `wanted`.
    """
    most = passages // points_per_list
    if most < 1 or (wanted is not None and wanted > most):
        lists = "one list" if wanted is None else f"nlist {wanted}"
        remedy = f"choose nlist {most} or less, or" if most else "choose"
        raise ValueError(
            f"{lists} needs {points_per_list * (wanted or 1)} vectors to train, the corpus has {passages};"
            f" {remedy} the index type flat"
        )
    return most


def pq_trainable(passages: int, nbits: int) -> bool:
    """Are there as many vectors as a product quantiser of this many bits has centroids?"""
    return passages >= 2**nbits


def default_nlist(passages: int) -> int:
    """4 times the square root, as a power of two, at most 65,536."""
    return int(2 ** min(16, max(0, round(math.log2(4 * math.sqrt(passages))))))


def training_rows(nlist: int, passages: int) -> int:
    """How many vectors lists and codes are trained on."""
    return min(passages, max(TRAINING_POINTS_PER_LIST * nlist, POINTS_PER_LIST * 256))


def vector_bytes(parameters: DenseParameters, dimension: int) -> int:
    """Bytes that one vector takes in a settled index."""
    if parameters.index_type == "flat":
        return 4 * dimension
    if parameters.index_type == "fp16":
        return 2 * dimension
    if parameters.index_type == "hnsw":
        return 4 * dimension + 8 * parameters.hnsw_m + 16  # float32 and the links, of which level 0 has 2 m
    return math.ceil((parameters.pq_m or 1) * parameters.pq_nbits / 8) + 8


def spread(needed: int, free: Sequence[int], *, reserve: int = _GPU_RESERVE) -> list[int] | None:
    """Over which GPUs an index is cut; None where it does not fit.

    Args:
        needed: bytes of the index.
        free: free bytes of each GPU; the cuts are equal, so the emptiest counts for all that take part.
        reserve: bytes of each GPU that are not the index's.

    Returns:
        The fewest GPUs that hold it, the emptiest first.
    """
    order = sorted(range(len(free)), key=lambda number: (-free[number], number))
    for count in range(1, len(order) + 1):
        if needed <= count * (free[order[count - 1]] - reserve):
            return order[:count]
    return None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an index is searched.

    Args:
        gpus: numbers of the GPUs that share it; empty: the CPU.
        half: vectors of a flat index are held in 16 bits there.
        remark: what a user should know about the choice; empty if it is the expected one.
    """

    gpus: tuple[int, ...] = ()
    half: bool = False
    remark: str = ""


def place(parameters: DenseParameters, vectors: int, dimension: int, free: Sequence[int]) -> Placement:
    """Choose GPUs for a settled index, or the CPU where it does not fit them or has no GPU code.

    Args:
        vectors: how many there are.
        free: free bytes of each GPU.
    """
    if not free:
        return Placement()
    kind = parameters.index_type
    if kind == "hnsw":
        return Placement(remark="FAISS has no GPU code for graphs (hnsw); searching on the CPU")
    if kind == "ivf-pq" and (parameters.pq_nbits != 8 or parameters.pq_m not in PQ_SIZES):
        return Placement(remark="FAISS has no GPU code for codes of this size; searching on the CPU")
    needed = vectors * vector_bytes(parameters, dimension) + 4 * (parameters.nlist or 0) * dimension
    if chosen := spread(needed, free):
        return Placement(tuple(chosen), half=kind == "fp16")
    if kind == "flat" and (chosen := spread(needed // 2, free)):
        return Placement(tuple(chosen), True, "the vectors fit the GPUs in 16 bits only; scores are rounded")
    gib = 1 << 30
    return Placement(
        remark=f"the index needs {needed / gib:.1f} GiB, the GPUs have {sum(free) / gib:.1f} GiB free, of which"
        f" {_GPU_RESERVE / gib:.0f} GiB each are kept; searching on the CPU"
    )
