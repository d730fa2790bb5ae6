from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from retrieval_index import BM25Parameters, RetrievalError, build_bm25, open_index
from retrieval_index.build import BuildResult
from retrieval_index.manifest import read_manifest

FORK = multiprocessing.get_context("fork")
TEXTS = [f"passage {number} speaks of kite{number % 7} and deer{number % 11}" for number in range(70)]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_what_was_built_is_found(tmp_path: Path, write_corpus) -> None:
    stages = []
    result = build_bm25(
        write_corpus(["the red kite", "blue sea", "red sea"]),
        tmp_path / "index",
        progress=lambda stage, done, total: stages.append((stage, done, total)),
    )
    assert (result.manifest.passages, result.reused, result.resumed_shards) == (3, False, 0)
    hits = open_index(tmp_path / "index").search(["sea", "kite"], 3)
    assert [[hit.passage.id for hit in own] for own in hits] == [["1", "2"], ["0"]]
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["hash", "read", "score", "check"]
    assert all(0 < done <= total for _, done, total in stages)


def test_building_again_gives_the_same_bytes_whatever_the_shards(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(TEXTS)
    made = [
        contents(build_bm25(corpus, tmp_path / f"index{rows}", shard_rows=rows).path) for rows in (1, 7, 1000, 1000)
    ]
    assert made[0] == made[1] == made[2] == made[3]
    assert len(made[0]) == 8


def test_the_same_corpus_and_parameters_are_not_built_twice(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(TEXTS), tmp_path / "index"
    build_bm25(corpus, output)
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert build_bm25(corpus, output).reused
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before


def test_other_parameters_or_another_corpus_replace_an_index(tmp_path: Path, write_corpus) -> None:
    output = tmp_path / "index"
    build_bm25(write_corpus(TEXTS), output)
    assert not build_bm25(write_corpus(TEXTS), output, parameters=BM25Parameters(k1=0.9)).reused
    assert read_manifest(output).parameters["k1"] == 0.9
    assert not build_bm25(write_corpus(TEXTS[:5]), output, parameters=BM25Parameters(k1=0.9)).reused
    assert read_manifest(output).passages == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]


def test_a_damaged_index_is_built_again(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(TEXTS), tmp_path / "index"
    whole = contents(build_bm25(corpus, output).path)
    (output / "passages.jsonl").unlink()
    assert not build_bm25(corpus, output).reused
    assert contents(output) == whole


@pytest.mark.parametrize("name", ["index", "index.partial"])
def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, write_corpus, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("three years of work")
    with pytest.raises(RetrievalError, match="not an index and is left alone"):
        build_bm25(write_corpus(TEXTS), tmp_path / "index")
    assert (tmp_path / name / "thesis.txt").read_text() == "three years of work"


def test_a_file_in_the_place_of_the_index_is_left_alone(tmp_path: Path, write_corpus) -> None:
    (tmp_path / "index").write_text("a file")
    with pytest.raises(RetrievalError, match="is a file"):
        build_bm25(write_corpus(TEXTS), tmp_path / "index")


def test_an_empty_directory_may_become_the_index(tmp_path: Path, write_corpus) -> None:
    (tmp_path / "index").mkdir()
    assert build_bm25(write_corpus(TEXTS), tmp_path / "index").manifest.passages == 70


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"id": "1", "contents": "fine"}\n{"id": "2"}\n', "line 2"),
        ('{"id": "1", "contents": "a"}\n{"id": "1", "contents": "b"}\n', "id 1 .* line 1"),
        ("\n\n", "no passage"),
    ],
)
def test_a_bad_corpus_leaves_nothing_behind(tmp_path: Path, write_text, text: str, says: str) -> None:
    corpus = write_text(text)
    with pytest.raises(ValueError, match=says):
        build_bm25(corpus, tmp_path / "index", shard_rows=1)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_an_old_index_survives_a_bad_corpus(tmp_path: Path, write_text, write_corpus) -> None:
    output = tmp_path / "index"
    whole = contents(build_bm25(write_corpus(TEXTS), output).path)
    with pytest.raises(ValueError, match="line 1"):
        build_bm25(write_text("nonsense"), output)
    assert contents(output) == whole


def _build_until(event: int, corpus: Path, output: Path, rows: int) -> None:
    """Build in a process of its own that kills itself at the given event of its progress."""
    count = 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal count
        count += 1
        if count == event:
            os.kill(os.getpid(), signal.SIGKILL)

    build_bm25(corpus, output, shard_rows=rows, progress=progress)


def test_a_killed_build_is_refused_then_finished_to_the_same_bytes(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(TEXTS[:7]), tmp_path / "index"
    whole = contents(build_bm25(corpus, tmp_path / "whole").path)
    for event in range(1, 60):
        build = FORK.Process(target=_build_until, args=(event, corpus, output, 3))
        build.start()
        build.join()
        if build.exitcode == 0:  # past the last event
            break
        assert build.exitcode == -signal.SIGKILL
        with pytest.raises(RetrievalError, match=r"did not finish|no index"):
            open_index(output)
        if (tmp_path / "index.partial").exists():
            with pytest.raises(RetrievalError, match=r"not an index \(an incomplete build\)"):
                open_index(tmp_path / "index.partial")
        result = build_bm25(corpus, output, shard_rows=3)
        assert contents(output) == whole
        assert len(open_index(output, verify=True).search(["deer1"], 9)[0]) == 1
        assert result.manifest.passages == 7
        for path in output.iterdir():
            path.unlink()
        output.rmdir()
    assert event > 10


def _build(corpus: Path, output: Path) -> None:
    build_bm25(corpus, output, shard_rows=5)


def test_twenty_kills_at_random_moments_change_nothing(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(TEXTS[:30]), tmp_path / "index"
    started = time.monotonic()
    whole = contents(build_bm25(corpus, tmp_path / "whole", shard_rows=5).path)
    once = time.monotonic() - started
    moments, kills = random.Random(5), 0
    for _ in range(400):  # bounded, whatever the machine's pace
        build = FORK.Process(target=_build, args=(corpus, output))
        build.start()
        build.join(moments.uniform(0, once))
        if build.is_alive():
            os.kill(build.pid, signal.SIGKILL)
            kills += 1
        build.join()
        if output.exists():  # it got through (or was killed after it had published)
            assert contents(output) == whole
            if kills >= 20:
                return
            for path in output.iterdir():
                path.unlink()
            output.rmdir()
    pytest.fail(f"only {kills} kills")


def test_shards_of_a_stopped_build_are_taken_over(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(TEXTS), tmp_path / "index"
    stopped = _stop_when_scoring(corpus, output)
    assert isinstance(stopped, KeyboardInterrupt)
    result = build_bm25(corpus, output, shard_rows=10)
    assert result.resumed_shards == 7
    assert contents(output) == contents(build_bm25(corpus, tmp_path / "whole").path)


@pytest.mark.parametrize("change", ["corpus", "parameters", "shard", "text"])
def test_nothing_stale_is_taken_over(tmp_path: Path, write_corpus, change: str) -> None:
    corpus, output, parameters = write_corpus(TEXTS), tmp_path / "index", BM25Parameters()
    _stop_when_scoring(corpus, output)
    partial = tmp_path / "index.partial"
    if change == "corpus":
        corpus = write_corpus([*TEXTS[:-1], "something else"])
    if change == "parameters":
        parameters = BM25Parameters(stemmer="english")
    if change == "shard":  # as after a torn write: its note is missing
        (partial / "shards" / "00002.json").unlink()
    if change == "text":
        with (partial / "passages.jsonl").open("r+b") as file:
            file.truncate(1500)  # a line has 47 to 51 bytes: three shards of ten end before
    result = build_bm25(corpus, output, parameters=parameters, shard_rows=10)
    assert result.resumed_shards == {"corpus": 0, "parameters": 0, "shard": 2, "text": 3}[change]
    assert contents(output) == contents(build_bm25(corpus, tmp_path / "whole", parameters=parameters).path)


def _stop_when_scoring(corpus: Path, output: Path) -> BaseException:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "score":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        build_bm25(corpus, output, shard_rows=10, progress=progress)
    return caught.value


def test_two_builds_of_one_index_do_not_mix(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(TEXTS), tmp_path / "index"
    refused: list[RetrievalError] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "score" and not refused:
            with pytest.raises(RetrievalError, match="another build") as caught:
                build_bm25(corpus, output)
            refused.append(caught.value)

    result: BuildResult = build_bm25(corpus, output, progress=progress)
    assert refused
    assert open_index(result.path, verify=True)


def test_a_build_killed_before_its_rename_is_published(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(TEXTS), tmp_path / "index"
    whole = contents(build_bm25(corpus, output).path)
    output.rename(tmp_path / "index.partial")
    assert not build_bm25(corpus, output).reused
    assert contents(output) == whole


def test_the_manifest_says_what_the_index_is(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(["red kite"])
    fields = json.loads((build_bm25(corpus, tmp_path / "index").path / "manifest.json").read_text())
    assert (fields["format"], fields["kind"], fields["passages"]) == (1, "bm25", 1)
    assert fields["parameters"] == BM25Parameters().as_dict()
    assert [(row["name"], row["bytes"]) for row in fields["corpus"]] == [("corpus.jsonl", corpus.stat().st_size)]
    names = {path.name for path in (tmp_path / "index").iterdir()}
    assert {row["name"] for row in fields["files"]} == names - {"manifest.json"}
