from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from retrieval_index import Passage, RetrievalError, open_index
from retrieval_index.dense_plan import DenseParameters
from retrieval_index.manifest import read_manifest
from tests.retrieval_index.encoders import HashingEncoder

pytest.importorskip("faiss", reason="FAISS is not installed")

from retrieval_index.build_dense import build_dense
from retrieval_index.dense import DenseIndex, empty_index, read_index, train, write_index

pytestmark = pytest.mark.filterwarnings("ignore:.* train 16 codes poorly")
FORK = multiprocessing.get_context("fork")
ANIMALS = ["red kite", "blue sea", "red sea", "grey deer"]
IVF = DenseParameters("ivf-pq", nlist=4, pq_m=16, pq_nbits=4)
TYPES = [DenseParameters("flat"), DenseParameters("fp16"), DenseParameters("hnsw", hnsw_m=8), IVF]


def words(count: int, seed: int = 0) -> list[str]:
    picks = random.Random(seed)
    return [" ".join(f"w{picks.randrange(400)}" for _ in range(8)) + f" own{number}" for number in range(count)]


def index_of(texts: list[str], parameters: DenseParameters | None = None, **options) -> DenseIndex:
    passages = [Passage(str(number), "", text) for number, text in enumerate(texts)]
    return DenseIndex.from_passages(passages, HashingEncoder(), parameters, **options)


def ids(hits) -> list[str]:
    return [hit.passage.id for hit in hits]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


# --- Search ----------------------------------------------------------------------------------------


def test_the_nearest_come_first_with_their_inner_products() -> None:
    index, encoder = index_of(ANIMALS), HashingEncoder()
    [hits] = index.search(["grey deer"], 2)
    products = encoder._encode(ANIMALS) @ encoder._encode(["grey deer"])[0]
    assert ids(hits)[0] == "3"
    assert [hit.score for hit in hits] == pytest.approx(sorted(products, reverse=True)[:2], abs=1e-6)


@pytest.mark.parametrize("parameters", TYPES, ids=lambda own: own.index_type)
def test_every_type_finds_a_text_by_itself(parameters: DenseParameters) -> None:
    texts = words(200)
    hits = index_of(texts, parameters).search(texts[:50], 5)
    found = sum(str(number) in ids(own) for number, own in enumerate(hits))
    assert found >= (50 if parameters.index_type != "ivf-pq" else 40)  # codes of 8 bytes lose some


@pytest.mark.parametrize("parameters", TYPES, ids=lambda own: own.index_type)
def test_more_hits_than_passages_are_not_made_up(parameters: DenseParameters) -> None:
    texts = words(160)
    [hits] = index_of(texts, parameters, nprobe=4, ef_search=200).search([texts[0]], 1000)
    assert len(hits) == len(set(ids(hits))) <= 160
    if parameters.index_type in ("flat", "fp16"):
        assert len(hits) == 160


def test_few_lists_give_fewer_hits_and_no_padding() -> None:
    texts = words(160)
    index = index_of(texts, IVF, nprobe=1)
    [few] = index.search([texts[0]], 160)
    [all_lists] = index.search([texts[0]], 160, nprobe=4)
    assert 0 < len(few) < len(all_lists) == 160


def test_ef_search_widens_the_search_of_a_graph() -> None:
    texts = words(2000)
    exact = index_of(texts).search(texts[:100], 10)
    graph = index_of(texts, DenseParameters("hnsw", hnsw_m=2, ef_construction=8))

    def overlap(ef_search: int) -> float:
        found = graph.search(texts[:100], 10, ef_search=ef_search)
        return sum(len(set(ids(a)) & set(ids(b))) for a, b in zip(found, exact, strict=True)) / 1000

    assert overlap(10) < overlap(500)


@pytest.mark.parametrize("query", ["", "   ", "\t\n"])
def test_a_blank_query_has_no_hits_and_does_not_move_the_others(query: str) -> None:
    index = index_of(ANIMALS)
    first, blank, last = index.search(["red kite", query, "grey deer"], 1)
    assert (ids(first), blank, ids(last)) == (["0"], [], ["3"])
    assert index.search([query], 3) == [[]]
    assert index.search([], 3) == []


def test_blank_passages_are_never_hits() -> None:
    index = index_of(["", "red kite", "  ", "grey deer", ""])
    assert len(index) == 5
    [hits] = index.search(["red"], 5)
    assert sorted(ids(hits)) == ["1", "3"]


@pytest.mark.parametrize("texts", [[], ["", " "]])
def test_a_corpus_without_text_has_no_hits(texts: list[str]) -> None:
    assert index_of(texts).search(["red"], 3) == [[]]


def test_equal_scores_come_in_corpus_order() -> None:
    [hits] = index_of(["grey deer", "red kite", "grey deer", "grey deer"]).search(["grey deer"], 4)
    assert ids(hits) == ["0", "2", "3", "1"]


@pytest.mark.parametrize(
    ("queries", "top_k", "error"), [("red", 1, TypeError), ([1], 1, TypeError), (["red"], 0, ValueError)]
)
def test_what_is_not_a_search_is_refused(queries, top_k: int, error: type) -> None:
    with pytest.raises(error):
        index_of(ANIMALS).search(queries, top_k)


class BrokenEncoder(HashingEncoder):
    def _encode(self, texts):
        vectors = super()._encode(texts)
        vectors[-1, 3] = np.nan
        return vectors


def test_vectors_that_are_no_numbers_are_an_error_that_names_the_text() -> None:
    with pytest.raises(RetrievalError, match="passage b a vector"):
        DenseIndex.from_passages([Passage("a", "", "x"), Passage("b", "", "y")], BrokenEncoder())
    good = index_of(ANIMALS)
    good._encoder = BrokenEncoder()
    with pytest.raises(RetrievalError, match="query 2 of the batch"):
        good.search(["red", "sea"], 1)


def test_a_gpu_that_is_not_there_is_an_error_only_when_it_is_asked_for() -> None:
    import faiss

    if faiss.get_num_gpus():
        pytest.skip("there is a GPU")
    assert index_of(ANIMALS, device="auto").placement.gpus == ()
    with pytest.raises(RetrievalError, match="sees no GPU"):
        index_of(ANIMALS, device="gpu")
    with pytest.raises(ValueError, match="unknown device"):
        index_of(ANIMALS, device="tpu")


# --- Build and open --------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", TYPES, ids=lambda own: own.index_type)
def test_what_was_built_is_opened_and_finds_the_same(tmp_path: Path, write_corpus, parameters) -> None:
    texts = words(200)
    stages = []
    result = build_dense(
        write_corpus(texts),
        tmp_path / "index",
        HashingEncoder(),
        parameters=parameters,
        shard_rows=64,
        progress=lambda stage, done, total: stages.append(stage),
    )
    index = open_index(result.path, encoder=HashingEncoder(), verify=True)
    found, wanted = index.search(texts[:20], 4), index_of(texts, index.parameters).search(texts[:20], 4)
    if parameters.index_type in ("flat", "fp16"):
        assert found == wanted
    else:  # built from shards, so a graph has other links, and codes are trained on rounded vectors
        assert sum(a[0].passage == b[0].passage for a, b in zip(found, wanted, strict=True)) >= 18
    trains = ["train"] if parameters.index_type == "ivf-pq" else []
    assert list(dict.fromkeys(stages)) == ["hash", "read", *trains, "add", "check"]
    assert index.search([texts[0]], 1, nprobe=2, ef_search=8)


def test_building_again_gives_the_same_bytes_and_encodes_nothing(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(words(200))
    for parameters in TYPES:
        made = []
        for name in ("one", "two"):
            output = tmp_path / f"{parameters.index_type}-{name}"
            made.append(contents(build_dense(corpus, output, HashingEncoder(), parameters=parameters).path))
        assert made[0] == made[1]
        again = HashingEncoder()
        assert build_dense(corpus, output, again, parameters=parameters).reused
        assert again.passages == []


def test_what_cannot_be_trained_is_refused_before_anything_is_encoded(tmp_path: Path, write_corpus) -> None:
    encoder = HashingEncoder()
    with pytest.raises(ValueError, match=r"nlist 500 needs 19500 vectors to train, the corpus has 175"):
        build_dense(
            write_corpus(words(175)),
            tmp_path / "index",
            encoder,
            parameters=DenseParameters("ivf-pq", nlist=500, pq_nbits=4),
        )
    assert encoder.passages == []
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_blank_passages_can_leave_too_few_to_train() -> None:
    index = empty_index(IVF, 64)
    with pytest.raises(ValueError, match="16 vectors are needed to train, the passages that hold text are 5"):
        train(index, IVF, [np.ones((5, 64), np.float32)], 5)


def _build_until(event: int, corpus: Path, output: Path) -> None:
    count = 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal count
        count += 1
        if count == event:
            os.kill(os.getpid(), signal.SIGKILL)

    build_dense(corpus, output, HashingEncoder(), parameters=IVF, shard_rows=50, progress=progress)


def test_a_killed_build_is_finished_to_the_same_bytes(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(words(200)), tmp_path / "index"
    whole = contents(build_dense(corpus, tmp_path / "whole", HashingEncoder(), parameters=IVF, shard_rows=50).path)
    for event in range(1, 60):
        build = FORK.Process(target=_build_until, args=(event, corpus, output))
        build.start()
        build.join()
        if build.exitcode == 0:
            break
        assert build.exitcode == -signal.SIGKILL
        with pytest.raises(RetrievalError, match=r"did not finish|no index"):
            open_index(output, encoder=HashingEncoder())
    assert contents(output) == whole
    assert event > 8


def test_twenty_random_kills_change_nothing(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(words(200)), tmp_path / "index"
    started = time.monotonic()
    whole = contents(build_dense(corpus, tmp_path / "whole", HashingEncoder(), parameters=IVF, shard_rows=50).path)
    once = time.monotonic() - started
    moments, kills = random.Random(7), 0
    for _ in range(400):
        build = FORK.Process(target=_build_until, args=(0, corpus, output))
        build.start()
        build.join(moments.uniform(0, once))
        if build.is_alive():
            os.kill(build.pid, signal.SIGKILL)
            kills += 1
        build.join()
        if output.exists():
            assert contents(output) == whole
            if kills >= 20:
                return
            output.rename(tmp_path / f"done{kills}{time.monotonic_ns()}")
    pytest.fail(f"only {kills} kills")


def test_an_interrupted_build_encodes_only_what_is_missing(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(words(200)), tmp_path / "index"
    whole = contents(build_dense(corpus, tmp_path / "whole", HashingEncoder(), shard_rows=50).path)

    class Tired(HashingEncoder):
        def encode_passages(self, passages):
            if len(self.passages) >= 100:
                raise KeyboardInterrupt
            return super().encode_passages(passages)

    with pytest.raises(KeyboardInterrupt):
        build_dense(corpus, output, Tired(), shard_rows=50)
    rest = HashingEncoder()
    result = build_dense(corpus, output, rest, shard_rows=50)
    assert result.resumed_shards == 2
    assert len(rest.passages) == 100 + 1  # and the probe
    assert contents(output) == whole


def test_another_index_type_takes_over_the_vectors(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(words(200)), tmp_path / "index"

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "add":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_dense(corpus, output, HashingEncoder(), progress=stop)
    encoder = HashingEncoder()
    build_dense(corpus, output, encoder, parameters=DenseParameters("hnsw"))
    assert len(encoder.passages) == 1  # the probe alone
    assert read_manifest(output).parameters["index"]["index_type"] == "hnsw"


def test_another_encoder_does_not(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(ANIMALS), tmp_path / "index"
    build_dense(corpus, output, HashingEncoder())
    assert not build_dense(corpus, output, HashingEncoder(salt="other")).reused


@pytest.mark.parametrize(
    ("encoder", "says"),
    [
        (HashingEncoder(salt="other"), "differs from the one that built"),
        (HashingEncoder(32), "vectors of 64 numbers, the encoder makes 32"),
    ],
)
def test_an_encoder_that_did_not_build_the_index_is_refused(tmp_path: Path, write_corpus, encoder, says: str) -> None:
    build_dense(write_corpus(ANIMALS), tmp_path / "index", HashingEncoder())
    with pytest.raises(RetrievalError, match=says):
        open_index(tmp_path / "index", encoder=encoder)


def test_an_index_that_does_not_fit_its_passages_is_refused(tmp_path: Path, write_corpus) -> None:
    output = build_dense(write_corpus(ANIMALS), tmp_path / "index", HashingEncoder()).path
    np.save(output / "rows.npy", np.arange(5))
    index = read_index(output / "index.faiss", mapped=True)
    with pytest.raises(RetrievalError, match=r"4 vectors but rows.npy 5 rows"):
        DenseIndex(index, np.arange(5), index_of(ANIMALS)._passages, HashingEncoder(), DenseParameters("flat"))
    with pytest.raises(RetrievalError, match="4 vectors but 3 passages"):
        DenseIndex(index, np.arange(4), index_of(ANIMALS[:3])._passages, HashingEncoder(), DenseParameters("flat"))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    path.write_bytes(b"IxFInonsense")
    with pytest.raises(RetrievalError, match=r"index\.faiss cannot be read"):
        read_index(path, mapped=True)
    write_index(empty_index(DenseParameters("flat"), 8), path)
    assert read_index(path, mapped=True).ntotal == 0


def test_vectors_of_a_mapped_index_stay_on_disk(tmp_path: Path, write_corpus) -> None:
    output = build_dense(write_corpus(words(200)), tmp_path / "index", HashingEncoder()).path
    (output / "index.faiss").rename(tmp_path / "moved.faiss")
    mapped = read_index(tmp_path / "moved.faiss", mapped=True)
    assert "moved.faiss" in Path("/proc/self/maps").read_text()
    assert mapped.ntotal == 200
