from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval_index import RetrievalError, build_bm25, open_index
from retrieval_index.bm25 import BM25Index


@pytest.fixture
def index(tmp_path: Path, write_corpus) -> Path:
    return build_bm25(write_corpus(["red kite", "blue sea", "red sea", "deer"]), tmp_path / "index").path


def edit_manifest(index: Path, **changes: object) -> None:
    path = index / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_index_opens_from_any_place(index: Path, tmp_path: Path) -> None:
    moved = index.rename(tmp_path / "moved")
    assert open_index(str(moved)).search(["deer"], 1)[0][0].passage.text == "deer"


def test_arrays_and_passages_stay_on_disk(index: Path) -> None:
    own = open_index(index)
    assert isinstance(own, BM25Index)
    for name in ("data", "indices", "indptr"):
        array = getattr(own._matrix, name)
        while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
            array = array.base
        assert isinstance(array, np.memmap), name
    assert type(own._passages._text).__name__ == "mmap"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "there is no index at"),
        (lambda path: path.mkdir(), "has no manifest.json"),
        (lambda path: path.write_text("a file"), "has no manifest.json"),
        (lambda path: path.with_name("other.partial").mkdir(), "build did not finish"),
    ],
)
def test_what_is_not_an_index_is_named_with_the_remedy(tmp_path: Path, make, says: str) -> None:
    path = tmp_path / "other"
    make(path)
    with pytest.raises(RetrievalError, match=says) as caught:
        open_index(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}", '{"format": "one"}', '{"name": "a web app"}'])
def test_the_manifest_of_something_else_is_refused(index: Path, text: str) -> None:
    (index / "manifest.json").write_text(text)
    with pytest.raises(RetrievalError, match=r"manifest\.json"):
        open_index(index)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 2}, "format 2, this version reads up to 1"),
        ({"kind": "magic"}, "unknown kind 'magic'"),
        ({"parameters": {"k1": 1, "magic": 2}}, "magic"),
        ({"passages": 5}, r"stores 4 passages, its manifest says 5"),
        ({"passages": None}, "damaged"),
        ({"files": [{"name": "x"}]}, "damaged"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(index: Path, changes: dict, says: str) -> None:
    edit_manifest(index, **changes)
    with pytest.raises(RetrievalError, match=says):
        open_index(index)


def test_a_missing_or_cut_file_is_refused(index: Path) -> None:
    path = index / "data.csc.index.npy"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 4)
    with pytest.raises(RetrievalError, match=f"data.csc.index.npy has {size - 4} bytes, the manifest says {size}"):
        open_index(index)
    path.unlink()
    with pytest.raises(RetrievalError, match=r"data\.csc\.index\.npy is missing"):
        open_index(index)


def test_a_flipped_bit_is_found_by_verify(index: Path) -> None:
    path = index / "passages.jsonl"
    path.write_bytes(path.read_bytes().replace(b"kite", b"kits"))
    open_index(index)
    with pytest.raises(RetrievalError, match=r"passages\.jsonl is damaged.* delete .*index and build it again"):
        open_index(index, verify=True)


def test_a_corpus_with_one_more_line_is_refused_with_both_numbers(index: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    open_index(index, corpus=corpus)
    with corpus.open("a") as file:
        file.write('{"id": "new", "contents": "one more"}\n')
    with pytest.raises(RetrievalError, match=r"holds 4 passages but corpus .* has 5; build it again"):
        open_index(index, corpus=corpus)


def test_a_corpus_with_other_text_is_refused(index: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("kite", "hawk"))
    with pytest.raises(RetrievalError, match="was built from other files"):
        open_index(index, corpus=corpus)


def test_importing_the_package_imports_no_search_library() -> None:
    code = "import retrieval_index, sys; print([m for m in ('bm25s', 'numpy', 'Stemmer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
