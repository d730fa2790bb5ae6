"""torch on the device: is it there, do its products agree with the processor's; and FAISS on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_checks.outcome import CannotRunError, Outcome


def check_torch(cpu: bool) -> Outcome:
    """Versions, memory, a product in the device's half precision against float64."""
    import torch

    outcome, device = Outcome(), "cpu" if cpu else "cuda"
    outcome.note(torch=torch.__version__, cuda=torch.version.cuda, gpus=0 if cpu else torch.cuda.device_count())
    if not cpu:
        free, total = torch.cuda.mem_get_info()
        outcome.note(gpu=torch.cuda.get_device_name(), memory_gb=total / 1e9, free_gb=free / 1e9)
        outcome.require(torch.cuda.is_bf16_supported(), "the GPU has no bfloat16")
    size = 256 if cpu else 4096
    left, right = (torch.randn(size, size, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    exact = (left[:64].double() @ right.double()).float()
    for dtype, most in ((torch.float32, 1e-2), (torch.bfloat16, 2e-2)):  # float32 may use TF32 products
        began = time.perf_counter()
        found = (left.to(device, dtype) @ right.to(device, dtype))[:64].float().cpu()
        error = float((found - exact).norm() / exact.norm())
        outcome.note(**{f"{dtype}_error": error, f"{dtype}_seconds": time.perf_counter() - began})
        outcome.require(error < most, f"a product in {dtype} is off by {error:.2g} of its norm, more than {most}")
    return outcome


class RandomVectors:
    """An `Encoder` of texts that are numbers: passage n is the n-th vector, query n lies near it."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors
        noise = np.random.default_rng(1).normal(size=vectors.shape).astype(np.float32)
        self.queries = vectors + 0.05 * noise

    @property
    def dimension(self) -> int:
        return int(self.vectors.shape[1])

    def describe(self) -> dict[str, Any]:
        return {"kind": "random"}

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        return self.queries[[int(text) for text in queries]]

    def encode_passages(self, passages: Sequence[Any]) -> np.ndarray:
        return self.vectors[[int(passage.id) for passage in passages]]


def check_faiss(cpu: bool) -> Outcome:
    """Flat, 16-bit and compressed indexes on the GPU find what they find on the processor."""
    try:
        from retrieval_index.dense import DenseIndex, add, empty_index, train
    except ImportError as error:
        raise CannotRunError(f"{error.name} is not installed; bash scripts/install.sh dense") from None
    from retrieval_index.dense_plan import DenseParameters, settle
    from retrieval_index.passages import PassageList
    from retrieval_index.types import Passage, RetrievalError

    count = 12_000 if cpu else 60_000
    vectors = np.random.default_rng(0).normal(size=(count, 16 if cpu else 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    encoder, outcome = RandomVectors(vectors), Outcome()
    passages = PassageList(Passage(str(number), "", str(number)) for number in range(count))
    queries = [str(number) for number in range(0, count, count // 200)]
    # least share of the top ten in common; the GPU's tables of ivf-pq are in 16 bits
    for kind, least in (("flat", 0.999), ("fp16", 0.98), ("ivf-pq", 0.9)):
        wanted = DenseParameters(index_type=kind, nlist=64 if kind == "ivf-pq" else None, nprobe=16)
        settled = settle(wanted, count, encoder.dimension)
        index = empty_index(settled, encoder.dimension)
        train(index, settled, [vectors], count)
        add(index, settled, vectors)
        found = {}
        for device in ("cpu",) if cpu else ("cpu", "gpu"):
            try:
                opened = DenseIndex(index, np.arange(count), passages, encoder, settled, device=device)
            except RetrievalError as error:
                raise CannotRunError(str(error)) from None
            opened.search(queries[:1], 10)
            began = time.perf_counter()
            found[device] = opened.search(queries, 10)
            outcome.note(**{f"{kind}_{device}_queries_per_s": len(queries) / (time.perf_counter() - began)})
        own = [hits[0].passage.id == query for hits, query in zip(found["cpu"], queries, strict=True)]
        first = float(np.mean(own))
        outcome.note(**{f"{kind}_own_passage_first": first})
        outcome.require(first > (0.5 if kind == "ivf-pq" else 0.99), f"{kind}: {first:.2f} find their own passage")
        if "gpu" in found:
            pairs = list(zip(found["cpu"], found["gpu"], strict=True))
            ids = [({hit.passage.id for hit in a}, {hit.passage.id for hit in b}) for a, b in pairs]
            common = float(np.mean([len(a & b) / len(a) for a, b in ids]))
            gap = max(abs(a[0].score - b[0].score) for a, b in pairs)
            outcome.note(**{f"{kind}_common": common, f"{kind}_score_gap": gap})
            outcome.require(common >= least, f"{kind}: GPU and processor share {common:.3f} of the top ten")
            outcome.require(gap < 0.02, f"{kind}: best scores differ by {gap:.3g}")
    return outcome
