"""An encoder without a model: words are hashed to places of a vector."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrieval_index import Passage


class HashingEncoder:
    """A bag of hashed words, of unit length. Texts that share words are near; the same on every machine.

    Records the texts it was given, so that a test can tell what was encoded (again).
    """

    def __init__(self, dimension: int = 64, salt: str = "") -> None:
        self.dimension, self.salt = dimension, salt
        self.queries: list[str] = []
        self.passages: list[str] = []

    def describe(self) -> dict[str, Any]:
        return {"model": "hashing", "salt": self.salt, "dimension": self.dimension}

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        self.queries += queries
        return self._encode(queries)

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        texts = [f"{passage.title} {passage.text}" for passage in passages]
        self.passages += texts
        return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.full((len(texts), self.dimension), 1e-3, np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                place = zlib.crc32(f"{self.salt}{word}".encode())
                vectors[row, place % self.dimension] += 1 if place & (1 << 20) else -1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
