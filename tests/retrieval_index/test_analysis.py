from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import bm25s
import pytest

from retrieval_index.analysis import LUCENE_STOP_WORDS, PRESETS, Analyzer, BM25Parameters


def test_the_stop_words_are_those_of_bm25s() -> None:
    assert frozenset(bm25s.stopwords.STOPWORDS_EN) == LUCENE_STOP_WORDS
    assert len(LUCENE_STOP_WORDS) == 33  # as in Lucene's EnglishAnalyzer


@pytest.mark.parametrize(
    ("parameters", "terms"),
    [
        (BM25Parameters(), ["running", "queen", "ran", "don", "naïve"]),  # words of one letter fall out
        (BM25Parameters(stop_words="none"), ["running", "the", "queen", "ran", "don", "naïve"]),
        (BM25Parameters(stemmer="english"), ["run", "queen", "ran", "don", "naïv"]),
        (PRESETS["lucene-parity"], ["run", "queen", "ran", "don't", "a.b", "3.5", "x", "naïv"]),
        (
            BM25Parameters(tokens="whitespace", stop_words="none"),
            ["running,", "the", "queen's", "ran", "don't", "a.b", "3.5", "x", "naïve"],
        ),
    ],
)
def test_terms(parameters: BM25Parameters, terms: list[str]) -> None:
    assert Analyzer(parameters).analyse("Running, the Queen's ran don't A.b 3.5 x NAÏVE") == terms


def test_both_spellings_of_an_accent_are_one_word() -> None:
    analyzer = Analyzer(BM25Parameters())
    assert analyzer.analyse("cafe\u0301") == analyzer.analyse("caf\u00e9") == ["caf\u00e9"]


def test_porter_and_snowball_differ() -> None:
    # Porter's first algorithm makes "fairli" of "fairly", his second one "fair".
    assert Analyzer(BM25Parameters(stemmer="porter")).analyse("fairly") == ["fairli"]
    assert Analyzer(BM25Parameters(stemmer="snowball")).analyse("fairly") == ["fair"]


def test_terms_keep_their_places() -> None:
    assert Analyzer(BM25Parameters(stemmer="english")).terms(["cats", "the", "dogs"]) == ["cat", None, "dog"]


def test_the_analyser_may_be_shared_by_threads() -> None:
    analyzer = Analyzer(PRESETS["stemmed"])
    texts = [f"running cities {number} happily organised" for number in range(400)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(analyzer.analyse, texts)) == [analyzer.analyse(text) for text in texts]


@pytest.mark.parametrize(
    "wrong",
    [
        {"k1": -0.1},
        {"k1": float("nan")},
        {"b": 1.1},
        {"b": float("nan")},
        {"stemmer": "german"},
        {"stop_words": "x"},
        {"tokens": "x"},
        {"method": "bm25+"},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BM25Parameters(**wrong)
