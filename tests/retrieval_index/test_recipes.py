"""Named builds, their estimates, and where corpora come from. Nothing is fetched."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from retrieval_index import RetrievalError, open_index
from retrieval_index.builds import Wanted, carry_out, estimate, make_plan
from retrieval_index.dense_plan import DenseParameters
from retrieval_index.recipes import ENCODER_SIZES, RECIPES, estimate_recipe
from retrieval_index.sources import bundled_world, is_local, resolve

GB = 1e9


def test_the_recipes_are_there() -> None:
    assert {"world", "wiki18-bm25", "wiki18-e5", "pubmed-bm25", "pubmed-medcpt", "textbooks"} <= set(RECIPES)
    for recipe in RECIPES.values():
        assert recipe.kind in ("bm25", "dense", "lucene")
        assert recipe.kind != "dense" or recipe.encoder in ENCODER_SIZES


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_an_estimate_without_its_corpus(name: str, tmp_path: Path) -> None:
    guess = estimate(make_plan(Wanted([name], tmp_path / "index")))
    assert guess is not None
    assert guess.seconds > 0
    assert guess.index_bytes > 0
    assert guess.memory_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_estimates_follow_from_the_sizes() -> None:
    # 21,015,324 vectors: flat 768 * 4 bytes each = 64.6 GB; codes of 96 + 8 bytes = 2.2 GB
    flat = estimate_recipe(RECIPES["wiki18-e5"], DenseParameters("flat"), gpus=1)
    packed = estimate_recipe(RECIPES["wiki18-e5"], gpus=1)
    assert flat.index_bytes - packed.index_bytes == pytest.approx(64.56 * GB - 2.19 * GB, rel=0.01)
    assert packed.memory_bytes < 10 * GB < 60 * GB < flat.memory_bytes
    # 640 / 4.3 = 149 tokens, 2 * 85 million operations each: 5.3e17 in all, at 1e14 a second
    assert packed.seconds == pytest.approx(5320, rel=0.02)
    assert estimate_recipe(RECIPES["wiki18-e5"], gpus=8).seconds == pytest.approx(5320 / 8, rel=0.02)
    assert estimate_recipe(RECIPES["wiki18-e5"], cores=2).seconds > 100 * packed.seconds


def test_bm25_memory_grows_far_slower_than_the_corpus() -> None:
    guess = estimate_recipe(RECIPES["pubmed-bm25"])
    assert guess.memory_bytes < 2 * GB < 30 * GB < guess.index_bytes


def test_world_is_built_by_name(tmp_path: Path) -> None:
    plan = make_plan(Wanted(["world"], tmp_path / "index"))
    guess = estimate(plan)
    assert guess and guess.exact
    result, paths = carry_out(plan)
    assert result.manifest.passages == guess.passages
    assert paths == [bundled_world()]
    assert open_index(result.path, corpus=paths)


def test_files_take_the_place_of_a_recipes_corpus(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(["red kites", "blue sea"])
    plan = make_plan(Wanted(["textbooks", str(corpus)], tmp_path / "index", changes={"k1": 1.1}))
    assert (plan.kind, plan.bm25.stemmer, plan.bm25.k1) == ("bm25", "english", 1.1)
    result, _ = carry_out(plan)
    assert open_index(result.path).search(["kite"], 1)[0][0].passage.id == "0"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"names": ["wiki18-bm25"], "download": True}, "no ready-made bm25 index of wiki18-bm25"),
        ({"names": ["wiki18-e5"], "download": True, "kind": "bm25"}, "no ready-made bm25"),
        ({"names": ["x.jsonl"], "download": True}, "no ready-made"),
        ({"names": ["wiki18-e5"], "encoder": "e6"}, "unknown encoder 'e6'"),
        ({"names": ["world"], "kind": "magic"}, "unknown kind 'magic'"),
        ({"names": ["world"], "preset": "best"}, "unknown preset 'best'"),
    ],
)
def test_what_cannot_work_is_refused_first(tmp_path: Path, changes: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_plan(Wanted(output=tmp_path / "index", **changes))


def test_lists_that_cannot_be_trained_are_refused_by_the_estimate(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus([f"text {number}" for number in range(175)])
    dense = DenseParameters("ivf-pq", nlist=500)
    plan = make_plan(Wanted([str(corpus)], tmp_path / "index", kind="dense", dense=dense))
    with pytest.raises(ValueError, match="the corpus has 175"):
        estimate(plan)


def test_an_output_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("work")
    with pytest.raises(RetrievalError, match="left alone"):
        make_plan(Wanted(["world"], tmp_path))


# --- Sources ---------------------------------------------------------------------------------------


def test_what_must_be_fetched_or_converted_is_known_by_its_name(tmp_path: Path) -> None:
    assert is_local(["corpus.jsonl.gz", "more.parquet", "bundled:world"])
    for source in ("datasets:a/b", "articles:a/b:en", "psgs_w100.tsv.gz", "pubmed26n0001.xml.gz", str(tmp_path)):
        assert not is_local(["corpus.jsonl", source])


def test_tables_and_nlm_files_are_converted_once(tmp_path: Path) -> None:
    table = tmp_path / "psgs_w100.tsv"
    table.write_text("id\ttext\ttitle\n1\tAaron is a prophet.\tAaron\n")
    xml = "<PubmedArticleSet><PubmedArticle><MedlineCitation><PMID>7</PMID><Article><ArticleTitle>Kites.</ArticleTitle>"
    xml += "</Article></MedlineCitation></PubmedArticle></PubmedArticleSet>"
    folder = tmp_path / "nlm"
    folder.mkdir()
    (folder / "pubmed26n0001.xml.gz").write_bytes(gzip.compress(xml.encode()))
    told: list[str] = []
    sources = [str(table), str(folder)]
    paths = resolve(sources, tmp_path / "made", told.append)
    before = {path: path.stat().st_mtime_ns for path in paths}
    assert resolve(sources, tmp_path / "made") == paths
    assert {path: path.stat().st_mtime_ns for path in paths} == before
    assert told[1].startswith("PubMed: 1 citations kept")
    plan = make_plan(Wanted(sources, tmp_path / "index"))
    assert estimate(plan) is None
    result, _ = carry_out(plan)
    assert {hit.passage.id for hits in open_index(result.path).search(["kites", "prophet"], 1) for hit in hits} == {
        "1",
        "7",
    }


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        resolve([str(tmp_path / "nowhere.tsv")], tmp_path / "made")
