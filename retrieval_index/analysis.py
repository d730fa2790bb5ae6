"""What BM25 sees of a text: its parameters, and the analyser that turns text into terms."""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Protocol

# The 33 words of Lucene's EnglishAnalyzer. bm25s' "english" list holds the same words (a test compares).
_STOP_TEXT = """a an and are as at be but by for if in into is it no not of on or such that the their
    then there these they this to was will with"""
LUCENE_STOP_WORDS = frozenset(_STOP_TEXT.split())
STOP_WORDS: dict[str, frozenset[str]] = {
    "english": LUCENE_STOP_WORDS,
    "lucene": LUCENE_STOP_WORDS,
    "none": frozenset(),
}
# Our names to PyStemmer's.
STEMMERS = {"none": None, "english": "english", "snowball": "english", "porter": "porter"}

# Lucene's StandardTokenizer follows Unicode's word boundaries (UAX #29): a dot, colon or apostrophe
# between letters, and a comma, dot or apostrophe between digits, do not end a word.
_LUCENE_WORD = r"\w+(?:(?<=[^\W\d_])[.:'’](?=[^\W\d_])\w+|(?<=\d)[.,;'’](?=\d)\w+)*"
TOKENS = {
    "words": re.compile(r"\b\w\w+\b"),  # two or more word characters, as bm25s cuts
    "lucene": re.compile(_LUCENE_WORD),
    "whitespace": re.compile(r"\S+"),
}


@dataclass(frozen=True, slots=True)
class BM25Parameters:
    """Everything that decides what a BM25 index holds; written to its manifest.

    Args:
        k1: how fast repeated terms stop counting; 0 or more.
        b: how much long passages are held back; 0 to 1.
        stemmer: "none", "english" (Snowball's, also called "snowball") or "porter"; all but the first
            need PyStemmer.
        stop_words: "english", "lucene" (the same 33 words) or "none".
        tokens: "words" (two or more word characters), "lucene" (Unicode word boundaries, possessive
            's removed) or "whitespace".
        method: the formula; only "lucene".

    Raises:
        ValueError: a value that is out of range or unknown.
    """

    k1: float = 1.5
    b: float = 0.75
    stemmer: str = "none"
    stop_words: str = "english"
    tokens: str = "words"
    method: str = "lucene"

    def __post_init__(self) -> None:
        if not (isfinite(self.k1) and self.k1 >= 0):
            raise ValueError(f"k1 must be 0 or more, got {self.k1}")
        if not 0 <= self.b <= 1:
            raise ValueError(f"b must lie between 0 and 1, got {self.b}")
        for field, known in (
            ("stemmer", STEMMERS),
            ("stop_words", STOP_WORDS),
            ("tokens", TOKENS),
            ("method", {"lucene"}),
        ):
            value = getattr(self, field)
            if value not in known:
                raise ValueError(f"unknown {field} {value!r}; choose one of {', '.join(sorted(known))}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return asdict(self)


PRESETS: dict[str, BM25Parameters] = {
    "default": BM25Parameters(),
    "stemmed": BM25Parameters(k1=0.9, b=0.4, stemmer="english"),
    "lucene-parity": BM25Parameters(k1=0.9, b=0.4, stemmer="porter", stop_words="lucene", tokens="lucene"),
}


class _Stemmer(Protocol):
    def stemWords(self, words: Sequence[str]) -> list[str]: ...


class Analyzer:
    """Text to terms: Unicode NFC, lower case, words, stop words out, stems."""

    def __init__(self, parameters: BM25Parameters) -> None:
        """Make the analyser of an index.

        Raises:
            RuntimeError: a stemmer is wanted and PyStemmer is not installed.
        """
        self._find = TOKENS[parameters.tokens].findall
        self._possessives = parameters.tokens == "lucene"
        self._stop_words = STOP_WORDS[parameters.stop_words]
        self._stemmer_name = STEMMERS[parameters.stemmer]
        self._local = threading.local()  # a PyStemmer object must not be used by two threads
        self.terms(["probe"])  # a missing stemmer shows now, not at the first search

    def words(self, text: str) -> list[str]:
        """The words of a text in order, lower case, stop words still in."""
        if not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
        found: list[str] = self._find(text.lower())
        if self._possessives:
            found = [word[:-2] if word.endswith(("'s", "’s")) else word for word in found]
        return found

    def terms(self, words: list[str]) -> list[str | None]:
        """The term of each word; None for a stop word."""
        kept = [word for word in words if word not in self._stop_words]
        stems = iter(self._stemmer().stemWords(kept) if self._stemmer_name else kept)
        return [None if word in self._stop_words else next(stems) for word in words]

    def analyse(self, text: str) -> list[str]:
        """The terms of a query, repetitions kept."""
        return [term for term in self.terms(self.words(text)) if term is not None]

    def _stemmer(self) -> _Stemmer:
        stemmer: _Stemmer | None = getattr(self._local, "stemmer", None)
        if stemmer is None:
            try:
                import Stemmer
            except ImportError as error:
                raise RuntimeError(
                    f"the stemmer {self._stemmer_name!r} needs PyStemmer: pip install PyStemmer"
                ) from error
            stemmer = self._local.stemmer = Stemmer.Stemmer(self._stemmer_name)
        return stemmer
