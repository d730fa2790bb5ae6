"""Indexes that others have built and published on the hub, taken over into our form.

A FAISS file of flat vectors and a Lucene folder hold no passages and no word on their corpus. They are
put beside the passages of the corpus they were made from, counted against it, and given a manifest;
whether they fit in content too, `probe` tells for vectors: the passage that a vector stands for must be
near its own text.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrieval_index.builder import BuildResult, run_build
from retrieval_index.corpus import CorpusPaths
from retrieval_index.dense_plan import DenseParameters
from retrieval_index.encoder import Encoder
from retrieval_index.lucene import FOLDER, LuceneParameters, start_jvm
from retrieval_index.passages import PassageStore
from retrieval_index.staging import Progress
from retrieval_index.types import Passage, RetrievalError

_SAMPLE = 16  # vectors compared with the passages they stand for
_LEAST_COSINE = 0.95


def fetch(name: str, folder: str | os.PathLike[str]) -> Path:
    """Download a data set's files from the hub; goes on where it was interrupted.

    Raises:
        RuntimeError: huggingface_hub is not installed.
        RetrievalError: the hub cannot be reached or does not have it.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise RuntimeError("downloading needs huggingface_hub: pip install huggingface_hub") from error
    try:
        return Path(snapshot_download(name, repo_type="dataset", local_dir=Path(folder)))
    except (OSError, ValueError) as error:  # the library's errors are of these kinds
        raise RetrievalError(f"{name} cannot be fetched from the hub ({error}); check the connection") from error


def adopt_flat(
    corpus: CorpusPaths,
    pieces: Sequence[Path],
    output: str | os.PathLike[str],
    encoder: Encoder,
    *,
    progress: Progress | None = None,
) -> BuildResult:
    """Take over a FAISS file of flat vectors, one for each passage of the corpus in order.

    Args:
        pieces: the file, or the pieces it was cut into, in order.
        encoder: the one it was made with; it encodes queries, and a few passages for comparison.

    Raises:
        RetrievalError: not a flat index of inner products, another number of vectors or dimension than
            fits, or vectors that are not those of the passages.
    """
    builder = _AdoptedFlat(list(pieces), encoder)
    return run_build(builder, corpus, output, progress=progress, shard_rows=50_000)


def adopt_lucene(
    corpus: CorpusPaths,
    folder: Path,
    output: str | os.PathLike[str],
    *,
    parameters: LuceneParameters | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Take over a Lucene folder whose document names are the passages' numbers from 0, as wiki-18's are.

    Raises:
        RetrievalError: no Lucene there, or another number of documents than passages.
    """
    start_jvm()
    builder = _AdoptedLucene(folder, parameters or LuceneParameters())
    return run_build(builder, corpus, output, progress=progress, shard_rows=50_000)


class _AdoptedFlat:
    kind = "dense"
    endings = ()

    def __init__(self, pieces: list[Path], encoder: Encoder) -> None:
        self._pieces, self._encoder = pieces, encoder
        self.parameters: dict[str, Any] = {
            "encoder": encoder.describe(),
            "index": DenseParameters("flat").as_dict(),
            "adopted": [piece.name for piece in pieces],
        }
        self.shard_parameters: dict[str, Any] = {}

    def write_shard(self, partial: Path, number: int, rows: list[Passage]) -> None:
        """Nothing: the vectors are there."""

    def finish(self, partial: Path, shards: int, tell: Progress) -> list[str]:
        from retrieval_index import dense

        target = partial / dense.INDEX_FILE
        with target.open("wb") as out:
            for number, piece in enumerate(self._pieces, start=1):
                with piece.open("rb") as file:
                    shutil.copyfileobj(file, out, 1 << 24)
                tell("add", number, len(self._pieces))
        index, store = dense.read_index(target, mapped=True), PassageStore(partial)
        if not dense.is_flat(index):
            raise RetrievalError(f"{self._pieces[0]} is no flat FAISS index of inner products; build one instead")
        if index.ntotal != len(store) or index.d != self._encoder.dimension:
            raise RetrievalError(
                f"{self._pieces[0]} has {index.ntotal} vectors of {index.d} numbers, the corpus {len(store)} passages"
                f" and the encoder {self._encoder.dimension} numbers; take the corpus and encoder it was built with"
            )
        rows = np.linspace(0, len(store) - 1, min(_SAMPLE, len(store)), dtype=np.int64)
        own = self._encoder.encode_passages([store[int(row)] for row in rows])
        theirs = np.stack([index.reconstruct(int(row)) for row in rows])
        lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(theirs, axis=1)
        cosines = (own * theirs).sum(axis=1) / np.maximum(lengths, 1e-12)
        if float(np.median(cosines)) < _LEAST_COSINE:
            raise RetrievalError(
                f"the vectors of {self._pieces[0]} are not those of the corpus's passages (median cosine"
                f" {float(np.median(cosines)):.3f} over {len(rows)}); take the corpus and encoder it was built with"
            )
        np.save(partial / dense.ROWS_FILE, np.arange(len(store), dtype=np.int64))
        np.save(partial / dense.PROBE_FILE, dense.probe_vectors(self._encoder))
        return [dense.INDEX_FILE, dense.ROWS_FILE, dense.PROBE_FILE]


class _AdoptedLucene:
    kind = "lucene"
    endings = ()

    def __init__(self, folder: Path, parameters: LuceneParameters) -> None:
        self._folder = folder
        self.parameters = parameters.as_dict()
        self.shard_parameters: dict[str, Any] = {}

    def write_shard(self, partial: Path, number: int, rows: list[Passage]) -> None:
        """Nothing: the postings are there."""

    def finish(self, partial: Path, shards: int, tell: Progress) -> list[str]:
        segments = sorted(self._folder.rglob("segments_*"))
        if len(segments) != 1:
            raise RetrievalError(f"{self._folder} holds {len(segments)} Lucene indexes; one is wanted")
        shutil.rmtree(partial / FOLDER, ignore_errors=True)
        shutil.copytree(segments[0].parent, partial / FOLDER)
        (partial / FOLDER / "write.lock").unlink(missing_ok=True)
        tell("add", 1, 1)
        java = start_jvm()
        try:
            searcher = java.autoclass("io.anserini.search.SimpleSearcher")(os.fspath(partial / FOLDER))
            documents, last = int(searcher.get_total_num_docs()), str(searcher.doc(0).docid())
            searcher.close()
        except java.JavaException as error:
            raise RetrievalError(f"Lucene cannot read {segments[0].parent}: {error}") from error
        passages = len(PassageStore(partial))
        if documents != passages or not last.isdigit():
            raise RetrievalError(
                f"{segments[0].parent} has {documents} documents (the first is named {last!r}), the corpus {passages}"
                " passages; take the corpus it was built from, with numbers for names"
            )
        return [f"{FOLDER}/{path.name}" for path in (partial / FOLDER).iterdir()]
