"""Build a dense index: vectors by shard, then one FAISS index over them.

Encoding is the long part and is kept by shard, so that a killed build goes on after the last finished
shard; another index type may be chosen then without encoding again. The same corpus, parameters,
`shard_rows`, machine and number of threads give the same bytes.

Memory: one shard of passages and vectors, the training sample, and the FAISS index itself (bytes a
vector: `dense_plan.vector_bytes`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from retrieval_index import dense
from retrieval_index.builder import BuildResult, run_build
from retrieval_index.corpus import CorpusPaths, count_rows
from retrieval_index.dense_plan import DenseParameters, settle
from retrieval_index.encoder import Encoder, Vectors
from retrieval_index.staging import SHARDS, Progress, shard_path, sync
from retrieval_index.types import Passage


def build_dense(
    corpus_paths: CorpusPaths,
    output: str | os.PathLike[str],
    encoder: Encoder,
    *,
    parameters: DenseParameters | None = None,
    progress: Progress | None = None,
    shard_rows: int = 10_000,
) -> BuildResult:
    """Build, finish or reuse the dense index of a corpus; see `build_bm25` for what they share.

    Args:
        encoder: makes the vectors; its description goes to the manifest.
        parameters: of the FAISS index. The corpus is counted first, and what cannot be trained is refused
            before anything is encoded.
        progress: hears of the stages "hash", "read" (with the encoding), "train", "add" and "check".
        shard_rows: passages encoded between two points from which an interrupted build can go on.

    Raises:
        FileNotFoundError, ValueError: a bad corpus, or parameters that do not fit its size.
        RetrievalError: the output is something else, another build is writing it, or the encoder failed.
    """
    settled = settle(parameters or DenseParameters(), count_rows(corpus_paths), encoder.dimension)
    return run_build(_DenseBuilder(encoder, settled), corpus_paths, output, progress=progress, shard_rows=shard_rows)


class _DenseBuilder:
    kind = "dense"
    endings = ("rows.npy", "vectors.npy")

    def __init__(self, encoder: Encoder, settled: DenseParameters) -> None:
        self._encoder, self._settled = encoder, settled
        # What is compressed anyway is kept in half the space until then.
        self._stored = np.dtype("float32" if settled.index_type in ("flat", "hnsw") else "float16")
        described = encoder.describe()
        self.parameters: dict[str, Any] = {"encoder": described, "index": settled.as_dict()}
        self.shard_parameters: dict[str, Any] = {
            "encoder": described,
            "stored": self._stored.name,
            "dtype": getattr(encoder, "dtype", "float32"),  # shards of one index are made alike
        }

    def write_shard(self, partial: Path, number: int, rows: list[Passage]) -> None:
        chosen, vectors = dense.encode_block(self._encoder, rows)
        np.save(shard_path(partial, number, "rows.npy"), chosen)
        np.save(shard_path(partial, number, "vectors.npy"), vectors.astype(self._stored))

    def finish(self, partial: Path, shards: int, tell: Progress) -> list[str]:
        rows = self._rows(partial, shards)
        np.save(partial / dense.ROWS_FILE, rows)
        np.save(partial / dense.PROBE_FILE, dense.probe_vectors(self._encoder))
        index = self._trained(partial, shards, len(rows), tell)
        for number, vectors in enumerate(self._vectors(partial, shards), start=1):
            dense.add(index, self._settled, vectors)
            tell("add", number, shards)
        dense.write_index(index, partial / dense.INDEX_FILE)
        return [dense.INDEX_FILE, dense.ROWS_FILE, dense.PROBE_FILE]

    def _rows(self, partial: Path, shards: int) -> np.ndarray:
        """The passage of each vector, counted over all shards."""
        pieces, start = [], 0
        for number in range(shards):
            note = json.loads(shard_path(partial, number, "json").read_text(encoding="utf-8"))
            pieces.append(np.load(shard_path(partial, number, "rows.npy")) + start)
            start += note["rows"]
        return np.concatenate(pieces)

    def _vectors(self, partial: Path, shards: int) -> Iterator[Vectors]:
        for number in range(shards):
            yield np.load(shard_path(partial, number, "vectors.npy"), mmap_mode="r").astype(np.float32)

    def _trained(self, partial: Path, shards: int, total: int, tell: Progress) -> Any:
        """An index ready for vectors; training is the second longest part and is kept as well."""
        index = dense.empty_index(self._settled, self._encoder.dimension)
        if index.is_trained:
            return index
        name = hashlib.sha256(json.dumps(self.parameters, sort_keys=True).encode()).hexdigest()[:16]
        kept = partial / SHARDS / f"trained-{name}.faiss"
        if kept.is_file():
            return dense.read_index(kept, mapped=False)
        tell("train", 0, 1)
        dense.train(index, self._settled, self._vectors(partial, shards), total)
        temporary = kept.with_suffix(".tmp")
        dense.write_index(index, temporary)
        sync(temporary)
        temporary.replace(kept)
        tell("train", 1, 1)
        return index
