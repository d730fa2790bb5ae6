"""Indexes that others built, put beside the passages they were made from."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from retrieval_index import Passage, RetrievalError, open_index, read_corpus
from retrieval_index.prebuilt import adopt_flat
from tests.retrieval_index.encoders import HashingEncoder

faiss = pytest.importorskip("faiss", reason="FAISS is not installed")

TEXTS = [f"passage {number} of kite{number % 7} and deer{number % 11}" for number in range(40)]


def published(folder: Path, passages: list[Passage], *, pieces: int = 2, metric: int | None = None) -> list[Path]:
    """A flat FAISS file as the hub has them: cut into pieces."""
    index = faiss.IndexFlat(64, faiss.METRIC_INNER_PRODUCT if metric is None else metric)
    index.add(HashingEncoder().encode_passages(passages))
    content = faiss.serialize_index(index).tobytes()
    edges = np.linspace(0, len(content), pieces + 1, dtype=int)
    made = []
    for number in range(pieces):
        path = folder / f"part_a{'abcd'[number]}"
        path.write_bytes(content[edges[number] : edges[number + 1]])
        made.append(path)
    return made


def test_a_published_index_finds_the_corpus_passages(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(TEXTS)
    pieces = published(tmp_path, list(read_corpus(corpus)))
    result = adopt_flat(corpus, pieces, tmp_path / "index", HashingEncoder())
    index = open_index(result.path, encoder=HashingEncoder(), verify=True, corpus=corpus)
    found = index.search([" " + text for text in TEXTS[:5]], 1)
    assert [hits[0].passage.id for hits in found] == ["0", "1", "2", "3", "4"]
    assert adopt_flat(corpus, pieces, tmp_path / "index", HashingEncoder()).reused


def test_another_number_of_vectors_is_refused(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(TEXTS)
    pieces = published(tmp_path, list(read_corpus(corpus))[:-1])
    with pytest.raises(RetrievalError, match=r"39 vectors of 64 numbers, the corpus 40 passages"):
        adopt_flat(corpus, pieces, tmp_path / "index", HashingEncoder())
    assert not (tmp_path / "index").exists()


def test_another_encoder_or_another_order_is_refused(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(TEXTS)
    passages = list(read_corpus(corpus))
    pieces = published(tmp_path, passages)
    with pytest.raises(RetrievalError, match="are not those of the corpus's passages"):
        adopt_flat(corpus, pieces, tmp_path / "index", HashingEncoder(salt="other"))
    with pytest.raises(RetrievalError, match="the encoder 32 numbers"):
        adopt_flat(corpus, pieces, tmp_path / "index", HashingEncoder(32))
    random.Random(1).shuffle(passages)
    with pytest.raises(RetrievalError, match="are not those of the corpus's passages"):
        adopt_flat(corpus, published(tmp_path, passages), tmp_path / "index", HashingEncoder())


def test_what_is_no_flat_index_of_inner_products_is_refused(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(TEXTS)
    pieces = published(tmp_path, list(read_corpus(corpus)), metric=faiss.METRIC_L2)
    with pytest.raises(RetrievalError, match="no flat FAISS index of inner products"):
        adopt_flat(corpus, pieces, tmp_path / "index", HashingEncoder())
    with pytest.raises(RetrievalError, match="cannot be read"):
        adopt_flat(corpus, pieces[:1], tmp_path / "index", HashingEncoder())
