"""Dense retrieval over a FAISS index: inner products of vectors, on the CPU or over all GPUs.

Defined in every corner: blank queries have no hits and blank passages are none; `top_k` may exceed the
corpus; places that FAISS leaves empty (-1) are left out, never filled; equal scores among the hits come
in corpus order. A query of unknown words has hits, since an encoder makes a vector of any text.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval_index.bm25 import check_search
from retrieval_index.dense_plan import DenseParameters, Placement, place, settle, training_rows
from retrieval_index.encoder import Encoder, Vectors, free_gpu_bytes, from_description
from retrieval_index.passages import PassageList, PassageStore
from retrieval_index.types import Hit, Passage, RetrievalError

INDEX_FILE = "index.faiss"
ROWS_FILE = "rows.npy"  # int64 (V,): the passage of each vector; blank passages have none
PROBE_FILE = "probe.npy"  # float32 (2, D): a fixed text as query and as passage
PROBE = Passage("probe", "Guernica", "Guernica is a large painting that Pablo Picasso finished in 1937.")
_PROBE_COSINE = 0.99  # bfloat16 against float32 stays above 0.999; another model falls far below

_GPU_DEPTH = 2048  # FAISS's limit on a GPU
_BLOCK = 65_536  # vectors moved at once
LOG = logging.getLogger("retrieval_index.dense")


class DenseIndex:
    """A `Retriever` over vectors. Safe to use from several threads."""

    def __init__(
        self,
        index: Any,
        rows: NDArray[np.int64],
        passages: PassageList | PassageStore,
        encoder: Encoder,
        parameters: DenseParameters,
        *,
        nprobe: int | None = None,
        ef_search: int | None = None,
        device: str = "auto",
    ) -> None:
        """Put an index together; `load` and `from_passages` are the usual ways.

        Args:
            index: of FAISS, on the CPU.
            rows: the passage of each vector.
            parameters: settled ones.
            nprobe, ef_search: how thoroughly a search looks, where it does not say so itself.
            device: "cpu", "gpu" (an error where it does not fit) or "auto".

        Raises:
            RetrievalError: the parts do not fit together, or not the device.
        """
        if index.ntotal != len(rows):
            raise RetrievalError(f"{INDEX_FILE} has {index.ntotal} vectors but {ROWS_FILE} {len(rows)} rows; rebuild")
        if len(rows) > len(passages) or (len(rows) and int(rows[-1]) >= len(passages)):
            raise RetrievalError(
                f"the index has {len(rows)} vectors but {len(passages)} passages are stored; build it again"
            )
        if index.d != encoder.dimension:
            raise RetrievalError(
                f"the index holds vectors of {index.d} numbers, the encoder makes {encoder.dimension};"
                " use the encoder that built it"
            )
        self.parameters = parameters
        self.nprobe = nprobe or parameters.nprobe or 1
        self.ef_search = ef_search or parameters.ef_search
        self._rows, self._passages, self._encoder = rows, passages, encoder
        self._lock = threading.Lock()
        self.placement = _placement(index, parameters, device)
        self._index, self._resources = _on_gpus(index, parameters, self.placement)

    @classmethod
    def from_passages(
        cls,
        passages: Iterable[Passage],
        encoder: Encoder,
        parameters: DenseParameters | None = None,
        **options: Any,
    ) -> DenseIndex:
        """Encode and index passages in memory; options as for `DenseIndex`."""
        stored = PassageList(passages)
        texts = [stored[row] for row in range(len(stored))]
        settled = settle(parameters or DenseParameters(), len(texts), encoder.dimension)
        rows, vectors = encode_block(encoder, texts)
        index = empty_index(settled, encoder.dimension)
        train(index, settled, [vectors], len(vectors))
        add(index, settled, vectors)
        return cls(index, rows, stored, encoder, settled, **options)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        parameters: dict[str, Any],
        *,
        encoder: Encoder | None = None,
        encoder_device: str | None = None,
        device: str = "auto",
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> DenseIndex:
        """Open the index files in a directory; `retrieval_index.open_index` calls this.

        On the CPU, vectors and passages stay on disk (memory-mapped).

        Args:
            parameters: those of the manifest.
            encoder: used instead of the one that the manifest names.
            encoder_device: where that one runs; None: a GPU where there is one.

        Raises:
            RetrievalError: a damaged file, or an encoder that is not the one that built the index.
        """
        directory = Path(directory)
        try:
            settled = DenseParameters(**parameters["index"])
            encoder = encoder or from_description(parameters["encoder"], device=encoder_device)
        except (KeyError, TypeError, ValueError) as error:
            raise RetrievalError(f"{directory} has parameters unknown to this version: {error}") from error
        _check_probe(directory, encoder)
        on_gpu = device != "cpu" and faiss.get_num_gpus() > 0
        index = read_index(directory / INDEX_FILE, mapped=not on_gpu)
        rows = np.asarray(np.load(directory / ROWS_FILE, mmap_mode="r", allow_pickle=False))
        store = PassageStore(directory)
        return cls(index, rows, store, encoder, settled, nprobe=nprobe, ef_search=ef_search, device=device)

    def __len__(self) -> int:
        return len(self._passages)

    def search(
        self, queries: Sequence[str], top_k: int, *, nprobe: int | None = None, ef_search: int | None = None
    ) -> list[list[Hit]]:
        """Return the `top_k` nearest passages of each query; see `Retriever.search`.

        Args:
            nprobe: lists looked at (ivf-pq), for this search.
            ef_search: how widely the graph is searched (hnsw), for this search.

        Raises:
            TypeError: `queries` is one string, or holds something else than strings.
            ValueError: `top_k` is below 1.
            RetrievalError: the encoder gave something else than numbers.
        """
        check_search(queries, top_k)
        asked = [number for number, query in enumerate(queries) if query.strip()]
        found: list[list[tuple[int, float]]] = [[] for _ in queries]
        depth = min(top_k, len(self._rows))
        if asked and depth:
            vectors = checked(self._encoder.encode_queries([queries[number] for number in asked]), len(asked))
            scores, places = self._nearest(vectors, depth, nprobe or self.nprobe, ef_search or self.ef_search)
            for number, own_scores, own_places in zip(asked, scores, places, strict=True):
                there = own_places >= 0
                rows = self._rows[own_places[there]]
                order = np.lexsort((rows, -own_scores[there]))
                found[number] = list(zip(rows[order].tolist(), own_scores[there][order].tolist(), strict=True))
        passages = self._passages.fetch([row for row, _ in chain.from_iterable(found)])
        return [[Hit(passages[row], score) for row, score in own] for own in found]

    def _nearest(self, vectors: Vectors, depth: int, nprobe: int, ef_search: int) -> tuple[Any, Any]:
        if self.placement.gpus:
            if depth > _GPU_DEPTH:
                raise RetrievalError(
                    f"a GPU finds {_GPU_DEPTH} hits at most, {depth} are wanted; open with device='cpu'"
                )
            with self._lock:  # FAISS's GPU indexes take one caller at a time
                if self.parameters.index_type == "ivf-pq":
                    faiss.GpuParameterSpace().set_index_parameter(self._index, "nprobe", float(min(nprobe, _GPU_DEPTH)))
                return self._index.search(vectors, depth)
        options = None
        if self.parameters.index_type == "ivf-pq":
            options = faiss.SearchParametersIVF(nprobe=nprobe)
        elif self.parameters.index_type == "hnsw":
            options = faiss.SearchParametersHNSW(efSearch=max(ef_search, depth))
        return self._index.search(vectors, depth, params=options)


# --- Making an index -------------------------------------------------------------------------------


def encode_block(encoder: Encoder, passages: Sequence[Passage]) -> tuple[NDArray[np.int64], Vectors]:
    """Vectors of the passages that hold any text, and which they are.

    Raises:
        RetrievalError: the encoder gave something else than finite numbers.
    """
    rows = [row for row, passage in enumerate(passages) if f"{passage.title}{passage.text}".strip()]
    if not rows:
        return np.zeros(0, np.int64), np.zeros((0, encoder.dimension), np.float32)
    chosen = [passages[row] for row in rows]
    vectors = checked(encoder.encode_passages(chosen), len(rows), chosen)
    return np.array(rows, np.int64), vectors


def checked(vectors: Vectors, count: int, passages: Sequence[Passage] | None = None) -> Vectors:
    """Vectors as FAISS wants them, or an error that names the first bad one."""
    vectors = np.ascontiguousarray(vectors, np.float32)
    if vectors.ndim != 2 or len(vectors) != count:
        raise RetrievalError(f"the encoder made vectors of shape {vectors.shape} for {count} texts")
    good = np.isfinite(vectors).all(axis=1)
    if not good.all():
        first = int(np.argmin(good))
        what = f"passage {passages[first].id}" if passages else f"query {first + 1} of the batch"
        raise RetrievalError(f"the encoder gave {what} a vector that is not of finite numbers; try dtype float32")
    return vectors


def empty_index(parameters: DenseParameters, dimension: int) -> Any:
    """An index of FAISS for inner products, of the settled type, without vectors."""
    metric = faiss.METRIC_INNER_PRODUCT
    if parameters.index_type == "flat":
        return faiss.IndexFlatIP(dimension)
    if parameters.index_type == "fp16":
        return faiss.IndexScalarQuantizer(dimension, faiss.ScalarQuantizer.QT_fp16, metric)
    if parameters.index_type == "hnsw":
        index = faiss.IndexHNSWFlat(dimension, parameters.hnsw_m, metric)
        index.hnsw.efConstruction = parameters.ef_construction
        return index
    coarse = faiss.IndexFlatIP(dimension)
    return faiss.IndexIVFPQ(coarse, dimension, parameters.nlist, parameters.pq_m, parameters.pq_nbits, metric)


def train(index: Any, parameters: DenseParameters, blocks: Iterable[Vectors], total: int) -> None:
    """Train an index that needs it, on a sample drawn evenly from blocks of `total` vectors in all.

    K-means runs on the GPUs where there are some.

    Raises:
        ValueError: fewer vectors than lists or codes.
    """
    if index.is_trained:
        return
    least = max(parameters.nlist or 1, 2**parameters.pq_nbits)
    if total < least:
        raise ValueError(f"{least} vectors are needed to train, the passages that hold text are {total}; use flat")
    chosen = np.sort(
        np.random.default_rng(parameters.seed).choice(total, training_rows(parameters.nlist or 1, total), replace=False)
    )
    sample, start = np.empty((len(chosen), index.d), np.float32), 0
    for block in blocks:
        low, high = np.searchsorted(chosen, (start, start + len(block)))
        sample[low:high] = block[chosen[low:high] - start]
        start += len(block)
    index.cp.min_points_per_centroid = 1  # `settle` has looked at the numbers; no second warning
    index.pq.cp.min_points_per_centroid = 1
    if faiss.get_num_gpus():
        index.clustering_index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(index.d))
    index.train(sample)
    index.clustering_index = None


def add(index: Any, parameters: DenseParameters, vectors: Vectors) -> None:
    """Add vectors; a graph in one thread, since its links depend on the order of insertion."""
    threads = faiss.omp_get_max_threads()
    if parameters.index_type == "hnsw":
        faiss.omp_set_num_threads(1)
    try:
        for start in range(0, len(vectors), _BLOCK):
            index.add(np.ascontiguousarray(vectors[start : start + _BLOCK], np.float32))
    finally:
        faiss.omp_set_num_threads(threads)


def is_flat(index: Any) -> bool:
    """Is it an exact index of inner products over float32 vectors?"""
    return isinstance(index, faiss.IndexFlat) and index.metric_type == faiss.METRIC_INNER_PRODUCT


def write_index(index: Any, path: Path) -> None:
    """Write an index to a file."""
    faiss.write_index(index, os.fspath(path))


def read_index(path: Path, *, mapped: bool) -> Any:
    """Read an index; mapped: what is large stays on disk until it is looked at.

    Raises:
        RetrievalError: not an index of FAISS.
    """
    try:
        if not mapped:
            return faiss.read_index(os.fspath(path))
        # Two flags for two kinds: the lists of ivf-pq, and the plain arrays of the others.
        kind = path.open("rb").read(4)
        lists = kind[:2] == b"Iw"
        return faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP if lists else faiss.IO_FLAG_MMAP_IFC)
    except (RuntimeError, OSError) as error:
        raise RetrievalError(f"{path} cannot be read ({str(error)[:200]}); build the index again") from error


def probe_vectors(encoder: Encoder) -> Vectors:
    """The fixed text as a query and as a passage, (2, D)."""
    pair = [encoder.encode_queries([PROBE.text])[0], encoder.encode_passages([PROBE])[0]]
    return np.stack(pair).astype(np.float32)


def _check_probe(directory: Path, encoder: Encoder) -> None:
    """Refuse an encoder that sees the fixed text otherwise than the one that built the index did."""
    wanted = np.load(directory / PROBE_FILE, allow_pickle=False)
    if wanted.shape[1] != encoder.dimension:
        return  # told with its own message
    found = encoder.encode_queries([PROBE.text])[0]
    cosine = float(found @ wanted[0] / max(np.linalg.norm(found) * np.linalg.norm(wanted[0]), 1e-12))
    if not cosine > _PROBE_COSINE:
        raise RetrievalError(
            f"the encoder differs from the one that built {directory} (cosine {cosine:.3f} on a fixed text);"
            " open the index with that one, or build it again"
        )


# --- GPUs ------------------------------------------------------------------------------------------


def _placement(index: Any, parameters: DenseParameters, device: str) -> Placement:
    if device not in ("auto", "cpu", "gpu"):
        raise ValueError(f"unknown device {device!r}; choose auto, cpu or gpu")
    if device == "cpu" or (device == "auto" and not faiss.get_num_gpus()):
        return Placement()
    if not faiss.get_num_gpus():
        raise RetrievalError("FAISS sees no GPU; install faiss-gpu-cu12 in the place of faiss-cpu, or use device='cpu'")
    chosen = place(parameters, index.ntotal, index.d, free_gpu_bytes())
    if device == "gpu" and not chosen.gpus:
        raise RetrievalError(f"{chosen.remark or 'no GPU is free'}: open with device='cpu' or another index type")
    if chosen.remark:
        LOG.warning("%s", chosen.remark)
    return chosen


def _on_gpus(index: Any, parameters: DenseParameters, placement: Placement) -> tuple[Any, list[Any]]:
    """The index where it is searched, and what must live as long as it does."""
    if not placement.gpus:
        return index, []
    resources = [faiss.StandardGpuResources() for _ in placement.gpus]
    if parameters.index_type == "ivf-pq":
        options = faiss.GpuMultipleClonerOptions()
        options.shard = len(placement.gpus) > 1
        options.useFloat16 = True  # lookup tables; codes of 64 bytes and more do not fit otherwise
        moved = faiss.index_cpu_to_gpu_multiple_py(resources, index, co=options, gpus=list(placement.gpus))
        return moved, resources
    # Flat ones are cut by hand: FAISS has no GPU code for the 16-bit quantiser of the CPU.
    parts = []
    for resource, number, (start, end) in zip(
        resources, placement.gpus, _cuts(index.ntotal, len(resources)), strict=True
    ):
        config = faiss.GpuIndexFlatConfig()
        config.device, config.useFloat16 = number, placement.half
        part = faiss.GpuIndexFlatIP(resource, index.d, config)
        for low in range(start, end, _BLOCK):
            part.add(index.reconstruct_n(low, min(_BLOCK, end - low)))
        parts.append(part)
    if len(parts) == 1:
        return parts[0], resources
    whole = faiss.IndexShards(index.d, True, True)  # searched side by side; numbers run on from part to part
    for part in parts:
        whole.add_shard(part)
    return whole, [*resources, *parts]


def _cuts(total: int, parts: int) -> Iterator[tuple[int, int]]:
    edges = [total * number // parts for number in range(parts + 1)]
    return pairwise(edges)
