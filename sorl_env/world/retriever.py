"""A small BM25 index in numpy: the retriever that works with nothing else installed.

score(q, d) = sum over the terms t of q of idf(t) * tf(t, d) / (tf(t, d) + k1 * (1 - b + b * |d| / mean |d|))
idf(t) = ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5))

This is the formula of Lucene's BM25Similarity (Robertson and Zaragoza, "The Probabilistic Relevance
Framework", 2009, without the constant factor k1 + 1), on exact document lengths.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from retrieval_index.types import Hit, Passage

K1, B = 0.9, 0.4

_WORD = re.compile(r"\w+")
# Only words that are neither an element's symbol nor an internet domain (as, at, be, in, is, it, to ... are).
_STOP = frozenset(
    "a an and are does for from has have how its of one or that the their there this was what when where "
    "which who whose with".split()
)


def tokens(text: str) -> list[str]:
    """Lower-case words without accents; stop words left out, a plural or possessive s taken off."""
    plain = (
        text
        if text.isascii()
        else "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    )
    return [stem(word) for word in _WORD.findall(plain.lower()) if word not in _STOP]


def stem(word: str) -> str:
    """countries -> country, cities -> city, languages -> language; short words and numbers stay."""
    if len(word) < 4 or not word.endswith("s") or word.endswith(("ss", "us", "is")):
        return word
    return word[:-3] + "y" if word.endswith("ies") and len(word) > 4 else word[:-1]


class WorldRetriever:
    """BM25 over passages (title and text), kept as postings sorted by term.

    Args:
        passages: the corpus; its order breaks ties between equal scores.
        k1: how slowly repeated terms stop counting. b: how much long passages are held back, 0 to 1.
    """

    def __init__(self, passages: Iterable[Passage], *, k1: float = K1, b: float = B) -> None:
        self.passages = tuple(passages)
        if not self.passages:
            raise ValueError("a retriever needs at least one passage")
        self._vocabulary: dict[str, int] = {}
        terms: list[int] = []
        documents: list[int] = []
        counts: list[int] = []
        lengths = np.zeros(len(self.passages))
        for row, passage in enumerate(self.passages):
            words = Counter(tokens(f"{passage.title} {passage.text}"))
            lengths[row] = words.total()
            terms += [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words]
            documents += [row] * len(words)
            counts += words.values()
        order = np.argsort(np.array(terms, dtype=np.int64), kind="stable")
        self._documents = np.array(documents, dtype=np.int64)[order]
        found = np.bincount(np.array(terms, dtype=np.int64), minlength=len(self._vocabulary))
        self._starts = np.concatenate(([0], np.cumsum(found)))
        idf = np.log(1.0 + (len(self.passages) - found + 0.5) / (found + 0.5))
        frequency = np.array(counts, dtype=np.float64)[order]
        mean = lengths.mean() or 1.0
        saturated = frequency / (frequency + k1 * (1.0 - b + b * lengths[self._documents] / mean))
        self._weights = np.repeat(idf, found) * saturated

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """The best `top_k` passages for each query, fewer where fewer share a term with it.

        Raises ValueError if top_k is below 1.
        """
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if isinstance(queries, str):
            raise TypeError("queries must be a sequence of texts; wrap a single query in a list")
        return [self._search_one(query, top_k) for query in queries]

    def _search_one(self, query: str, top_k: int) -> list[Hit]:
        scores = np.zeros(len(self.passages))
        for word, times in Counter(tokens(query)).items():
            term = self._vocabulary.get(word)
            if term is not None:
                part = slice(self._starts[term], self._starts[term + 1])
                scores[self._documents[part]] += times * self._weights[part]  # a passage has a term once
        matched = np.flatnonzero(scores)
        if len(matched) > top_k:
            # all that reach the k-th score stay, so that ties are cut by corpus order and not by chance
            floor = np.partition(scores[matched], len(matched) - top_k)[len(matched) - top_k]
            matched = matched[scores[matched] >= floor]
        best = matched[np.argsort(-scores[matched], kind="stable")][:top_k]
        return [Hit(self.passages[row], float(scores[row])) for row in best]
