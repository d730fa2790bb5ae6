from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from retrieval_index import Hit, Passage, RetrievalError, build_bm25, open_index
from retrieval_index.bm25 import BM25Index
from retrieval_index.compose import compose_hybrid, compose_rerank
from retrieval_index.rerank import RerankRetriever

TEXTS = ["red kite", "red sea sea", "red deer deer deer", "blue moon"]


class LongestFirst:
    """Scores a text by its length, and remembers what it read."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        self.pairs += pairs
        return [len(text) for _, text in pairs]


class Says:
    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        return self.scores


@pytest.fixture
def base() -> BM25Index:
    return BM25Index.from_passages(Passage(str(number), "", text) for number, text in enumerate(TEXTS))


def ids(hits: Sequence[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


def test_hits_come_in_the_scorers_order_with_its_scores(base: BM25Index) -> None:
    assert ids(base.search(["red"], 3)[0]) == ["0", "1", "2"]  # the shortest first
    [hits] = RerankRetriever(base, LongestFirst()).search(["red"], 3)
    assert [(hit.passage.id, hit.score) for hit in hits] == [("2", 18.0), ("1", 11.0), ("0", 8.0)]


def test_what_the_retriever_did_not_find_is_no_hit(base: BM25Index) -> None:
    scorer = LongestFirst()
    found = RerankRetriever(base, scorer).search(["red", "", "the", "unknown", "moon"], 10)
    assert [len(hits) for hits in found] == [3, 0, 0, 0, 1]
    assert {query for query, _ in scorer.pairs} == {"red", "moon"}
    assert RerankRetriever(base, scorer).search([], 3) == []


def test_only_the_depth_is_read_again_but_never_less_than_top_k(base: BM25Index) -> None:
    scorer = LongestFirst()
    [hits] = RerankRetriever(base, scorer, depth=2).search(["red"], 1)
    assert ids(hits) == ["1"]  # passage 2 is third and was not read
    assert len(scorer.pairs) == 2
    assert len(RerankRetriever(base, scorer, depth=1).search(["red"], 3)[0]) == 3


def test_equal_scores_stay_in_the_retrievers_order(base: BM25Index) -> None:
    assert ids(RerankRetriever(base, Says([1.0, 1.0, 1.0])).search(["red"], 3)[0]) == ["0", "1", "2"]


def test_the_title_is_read_too() -> None:
    scorer = LongestFirst()
    base = BM25Index.from_passages([Passage("a", "Kites", "they are red")])
    RerankRetriever(base, scorer).search(["red"], 1)
    assert scorer.pairs == [("red", "Kites they are red")]


@pytest.mark.parametrize("scores", [[1.0, float("nan"), 2.0], [1.0], [float("inf")] * 3])
def test_scores_that_are_none_are_an_error(base: BM25Index, scores: list[float]) -> None:
    with pytest.raises(RetrievalError, match="cross-encoder gave"):
        RerankRetriever(base, Says(scores)).search(["red"], 3)


def test_a_depth_below_one_is_refused(base: BM25Index, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="depth"):
        RerankRetriever(base, LongestFirst(), depth=0)
    with pytest.raises(ValueError, match="depth"):
        compose_rerank(tmp_path / "index", tmp_path, depth=0)


# --- Composed indexes ------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path, write_corpus) -> list[Path]:
    corpus = write_corpus(TEXTS)
    from retrieval_index.analysis import PRESETS

    return [build_bm25(corpus, tmp_path / name, parameters=PRESETS[name]).path for name in ("default", "stemmed")]


def test_a_fused_index_opens_like_any_other_and_can_be_moved(tmp_path: Path, parts: list[Path]) -> None:
    compose_hybrid(tmp_path / "both", parts, weights=[1, 2], k=10)
    (tmp_path / "moved").mkdir()
    for name in ("default", "stemmed", "both"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    index = open_index(tmp_path / "moved" / "both", verify=True, corpus=tmp_path / "corpus.jsonl")
    [hits] = index.search(["red"], 2)
    # rank 1 in both rankings: 1 / 11 + 2 / 11; rank 2: 3 / 12
    assert [(hit.passage.id, hit.score) for hit in hits] == [("0", pytest.approx(3 / 11)), ("1", pytest.approx(0.25))]


def test_indexes_nest(tmp_path: Path, parts: list[Path]) -> None:
    compose_hybrid(tmp_path / "both", parts)
    compose_rerank(tmp_path / "best", tmp_path / "both", depth=3)
    [hits] = open_index(tmp_path / "best", scorer=LongestFirst()).search(["red"], 9)
    assert ids(hits) == ["2", "1", "0"]


def test_a_part_that_was_built_again_is_refused(tmp_path: Path, parts: list[Path]) -> None:
    compose_hybrid(tmp_path / "both", parts)
    from retrieval_index import BM25Parameters

    build_bm25(tmp_path / "corpus.jsonl", parts[0], parameters=BM25Parameters(k1=0.5))
    with pytest.raises(RetrievalError, match=r"was built again since .*both was composed"):
        open_index(tmp_path / "both")


def test_a_part_that_is_gone_is_named(tmp_path: Path, parts: list[Path]) -> None:
    compose_hybrid(tmp_path / "both", parts)
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(RetrievalError, match=r"no index at .*stemmed"):
        open_index(tmp_path / "both")


def test_parts_of_different_corpora_are_refused(tmp_path: Path, parts: list[Path], write_corpus) -> None:
    other = build_bm25(write_corpus(TEXTS[:2], "other.jsonl"), tmp_path / "other").path
    with pytest.raises(RetrievalError, match=r"\(4 passages\) and .*other \(2 passages\) index different corpora"):
        compose_hybrid(tmp_path / "both", [parts[0], other])
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize(
    ("numbers", "says"),
    [({"weights": [1]}, "1 weights for 2"), ({"weights": [1, 0]}, "above 0"), ({"k": -1}, "k must")],
)
def test_numbers_are_checked_before_anything_is_written(tmp_path: Path, parts, numbers: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compose_hybrid(tmp_path / "both", parts, **numbers)
    with pytest.raises(ValueError, match="two indexes or more"):
        compose_hybrid(tmp_path / "both", parts[:1])
    assert not (tmp_path / "both").exists()


def test_something_else_in_the_place_is_left_alone(tmp_path: Path, parts: list[Path]) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("work")
    with pytest.raises(RetrievalError, match="left alone"):
        compose_hybrid(tmp_path / "thesis", parts)
    with pytest.raises(RetrievalError, match="part of itself"):
        compose_rerank(parts[0], parts[0])


def test_a_directory_of_a_model_is_named_relative_to_the_index(tmp_path: Path, parts: list[Path], monkeypatch) -> None:
    model = tmp_path / "models" / "mine"
    model.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    made = compose_rerank("best", parts[0], model="models/mine", depth=3)
    assert made.parameters["model_path"] == "../models/mine"
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(RetrievalError, match=r"cross-encoder .*/models/mine of .*best is not there"):
        open_index(tmp_path / "best")
    assert ids(open_index(tmp_path / "best", scorer=LongestFirst()).search(["red"], 9)[0]) == ["2", "1", "0"]


@pytest.mark.parametrize("model", ["./mine", "/models/mine", "a/b/c", ""])
def test_a_model_that_can_only_be_a_missing_directory_is_refused(tmp_path: Path, parts: list[Path], model: str) -> None:
    with pytest.raises(ValueError, match="neither a directory nor a name of the hub"):
        compose_rerank(tmp_path / "best", parts[0], model=model)
    assert not (tmp_path / "best").exists()


def test_names_of_models_are_kept_as_they_are(tmp_path: Path, parts: list[Path]) -> None:
    for model in ("minilm", "cross-encoder/ms-marco-MiniLM-L6-v2", "some_model.v2"):
        assert compose_rerank(tmp_path / "best", parts[0], model=model).parameters["model"] == model


def test_a_library_that_is_there_but_broken_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    for name, text in (("torch", ""), ("sentence_transformers", "from collections import what_it_lacks")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    code = """
from retrieval_index.encoder import TransformerEncoder, encoder_spec
from retrieval_index.rerank import CrossEncoderScorer
for make in (CrossEncoderScorer, lambda **options: TransformerEncoder(encoder_spec("minilm"), **options)):
    try:
        make(device="cpu", dtype="float32")
    except RuntimeError as error:
        print(error)
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2])])

    def told() -> list[str]:
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    broken = told()
    assert len(broken) == 2
    assert all("cannot import name 'what_it_lacks'" in line for line in broken)
    (tmp_path / "torch" / "__init__.py").write_text("raise ModuleNotFoundError('', name='torch')")
    missing = told()
    assert missing == [
        "re-ranking needs sentence-transformers: pip install 'sorl[dense]'",
        "dense retrieval needs PyTorch: pip install 'sorl[dense]'",
    ]
