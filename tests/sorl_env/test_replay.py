"""Recorded searches: what was found is found again, without the index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrieval_index.types import Passage, RetrievalError
from sorl_env.actions import Query
from sorl_env.replay import NotRecorded, Recording
from tests.fakes import FakeRetriever

PASSAGES = [Passage("a", "Peru", "Lima é \u2028 city"), Passage("b", "Chile", "Santiago city")]


def record(path: Path, *batches: list[str], retriever: FakeRetriever | None = None) -> Recording:
    inner = retriever or FakeRetriever(passages=PASSAGES)
    recording = Recording(path, index="abc", about={"kind": "fake"}, retriever=inner)
    for batch in batches:
        recording.search(batch, 2)
    return recording


def test_what_was_found_is_found_again_without_the_index(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.jsonl"
    inner = FakeRetriever(passages=PASSAGES)
    queries = ["peru city", "nothing", Query("chile", "q", 0)]
    found = record(path, retriever=inner).search(queries, 2)
    assert found == FakeRetriever(passages=PASSAGES).search(queries, 2)
    played = Recording(path)
    assert played.search(queries, 2) == found and len(played) == 3
    assert (played.index, played.about) == ("abc", {"kind": "fake"})
    assert Recording(path, index="abc").search(["nothing"], 2) == [[]]


def test_each_query_is_asked_once_also_over_runs(tmp_path: Path) -> None:
    first, second = FakeRetriever(passages=PASSAGES), FakeRetriever(passages=PASSAGES)
    record(tmp_path / "r", ["city", "city", "peru"], ["peru"], retriever=first)
    assert first.calls == [(["city", "peru"], 2)]
    record(tmp_path / "r", ["peru", "chile"], retriever=second)
    assert second.calls == [(["chile"], 2)]
    rows = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert [row["passage"][0] for row in rows if "passage" in row] == ["a", "b"]  # each passage once
    assert [row["query"] for row in rows if "query" in row] == ["city", "peru", "chile"]


def test_an_unknown_query_is_refused_when_there_is_no_index(tmp_path: Path) -> None:
    record(tmp_path / "r", ["city"])
    with pytest.raises(NotRecorded, match=r"holds no answer to 'peru' \(top_k 2\); .*record it again"):
        Recording(tmp_path / "r").search(["city", "peru"], 2)
    with pytest.raises(NotRecorded, match="top_k 1"):
        Recording(tmp_path / "r").search(["city"], 1)


def test_another_index_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "r", ["city"])
    with pytest.raises(ValueError, match="was recorded with index abc, this index is other"):
        Recording(tmp_path / "r", index="other", retriever=FakeRetriever())


def test_a_line_that_a_crash_cut_is_dropped_and_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record(path, ["city"], ["peru"])
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole), 23):
        path.write_bytes(whole[:cut])
        inner = FakeRetriever(passages=PASSAGES)
        assert record(path, retriever=inner).search(["peru"], 2) == FakeRetriever(passages=PASSAGES).search(["peru"], 2)
        assert Recording(path).search(["peru"], 2)[0][0].passage == PASSAGES[0]
    assert len(inner.calls) == 1


def test_a_failed_search_leaves_nothing_behind(tmp_path: Path) -> None:
    recording = record(tmp_path / "r", retriever=FakeRetriever(fails=True))
    with pytest.raises(RetrievalError):
        recording.search(["city"], 2)
    assert len(Recording(tmp_path / "r")) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": 1}\n', "is no recording of searches"),
        ("nonsense\n", "is no recording of searches"),
        ('{"schema": 9, "index": "abc"}\n', "recording format 9, this version reads 1"),
        ('{"schema": 1, "index": "abc"}\n{"query": "x", "top_k": 1, "hits": [["z", 1.0]]}\n', "line 2: damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r").write_text(text)
    with pytest.raises(ValueError, match=message):
        Recording(tmp_path / "r", index="abc", retriever=FakeRetriever())


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; make it with an index first"):
        Recording(tmp_path / "r")
    with pytest.raises(ValueError, match="needs the digest of the index"):
        Recording(tmp_path / "r", retriever=FakeRetriever())
    record(tmp_path / "r", ["city"])
    changed = FakeRetriever(passages=[Passage("a", "Peru", "something else")])
    with pytest.raises(ValueError, match="passage 'a' is not what the recording"):
        record(tmp_path / "r", ["peru"], retriever=changed)
