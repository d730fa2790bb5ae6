from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from retrieval_index import Passage, RetrievalError, build_bm25, open_index
from retrieval_index.compose import compose_rerank
from retrieval_index.reranker_data import TrainingList
from retrieval_index.reranker_training import RerankerSettings, step_seconds, train_reranker

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_reranker.py"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"who is red blue kite sea old new deer moon".split()]
LISTS = [
    TrainingList(f"who is {thing}", f"{thing} red", (f"{thing} blue", f"{thing} old", f"{thing} new"))
    for thing in ("kite", "sea", "deer", "moon")
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A BERT of random weights on disk: one layer, 16 numbers, 32 places."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes, **dropout)
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def settings(tiny: Path, **changes) -> RerankerSettings:
    return RerankerSettings(**{"encoder": str(tiny), "max_tokens": 24, "batch_lists": 2, "device": "cpu", **changes})


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_two_updates_give_a_model_that_re_ranks(tmp_path: Path, tiny: Path, write_corpus) -> None:
    result = train_reranker(LISTS, tmp_path / "model", settings(tiny), notes={"questions": ["a.jsonl"]})
    assert (result.path, result.steps) == (tmp_path / "model", 2)  # 4 lists, 2 an update
    # ln 4: four passages a list, which a fresh scoring layer cannot tell apart (its weights are about 0.02)
    assert result.loss == pytest.approx(1.386, abs=0.1)
    names = {path.name for path in result.path.iterdir()}
    assert "model.safetensors" in names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    assert not (tmp_path / "model.partial").exists()
    told = json.loads((result.path / "training.json").read_text())
    assert (told["lists"], told["settings"]["max_tokens"], told["questions"]) == (4, 24, ["a.jsonl"])

    corpus = write_corpus(["kite red", "kite blue", "moon"])
    compose_rerank(tmp_path / "best", build_bm25(corpus, tmp_path / "base").path, model=str(result.path))
    [hits] = open_index(tmp_path / "best").search(["kite"], 5)
    assert {hit.passage for hit in hits} == {Passage("0", "", "kite red"), Passage("1", "", "kite blue")}


def test_the_same_seed_gives_the_same_weights(tmp_path: Path, tiny: Path) -> None:
    one, two, other = (
        weights(train_reranker(LISTS, tmp_path / name, settings(tiny, seed=seed)).path)
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    )
    assert all((one[name] == two[name]).all() for name in one)
    assert not (one["classifier.weight"] == other["classifier.weight"]).all()


def test_frozen_layers_stay_as_they_are(tmp_path: Path, tiny: Path) -> None:
    frozen = weights(train_reranker(LISTS, tmp_path / "frozen", settings(tiny, frozen_layers=1)).path)
    free = weights(train_reranker(LISTS, tmp_path / "free", settings(tiny)).path)
    start = {f"bert.{name}": value for name, value in weights(tiny).items()}
    for name, value in start.items():
        kept = name.startswith(("bert.embeddings.", "bert.encoder.layer.0."))
        assert bool((frozen[name] == value).all()) == kept, name
    assert not (free["bert.embeddings.word_embeddings.weight"] == start["bert.embeddings.word_embeddings.weight"]).all()
    with pytest.raises(RetrievalError, match="frozen_layers is 2, but BertModel has 1 layers"):
        train_reranker(LISTS, tmp_path / "more", settings(tiny, frozen_layers=2))


def test_it_learns_what_makes_a_passage_right(tmp_path: Path, tiny: Path) -> None:
    """Passages with "red" are right. Asked of a thing that training did not show, the red one comes first."""
    from retrieval_index.rerank import CrossEncoderScorer

    seen = LISTS[:3]
    result = train_reranker(seen, tmp_path / "model", settings(tiny, steps=40, batch_lists=3, learning_rate=1e-2))
    assert result.loss < 1.0
    scorer = CrossEncoderScorer(str(result.path), device="cpu", max_tokens=24)
    scores = scorer.score([(LISTS[3].question, text) for text in LISTS[3].texts])
    assert max(range(4), key=lambda place: scores[place]) == 0


def test_a_place_that_is_taken_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    absent = RerankerSettings(encoder="no/such-encoder")
    with pytest.raises(RetrievalError, match="is there already"):
        train_reranker(LISTS, tmp_path / "model", absent)
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "thesis.txt").write_text("work")
    with pytest.raises(RetrievalError, match="left alone"):
        train_reranker(LISTS, tmp_path / "other", absent)
    with pytest.raises(ValueError, match="no list to train on"):
        train_reranker([], tmp_path / "new", absent)
    assert not (tmp_path / "new").exists()


def test_what_an_interrupted_training_left_is_cleared_away(tmp_path: Path, tiny: Path) -> None:
    partial = tmp_path / "model.partial"
    partial.mkdir()
    (partial / "building.json").write_text("{}")
    (partial / "model.safetensors").write_text("half")
    (partial / "stray.txt").write_text("old")
    train_reranker(LISTS, tmp_path / "model", settings(tiny, steps=1))
    assert not (tmp_path / "model" / "stray.txt").exists()
    assert weights(tmp_path / "model")


def test_encoders_that_do_not_fit_are_named(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RetrievalError, match=r"encoder .*empty cannot be loaded"):
        train_reranker(LISTS, tmp_path / "model", settings(tmp_path / "empty"))
    with pytest.raises(RetrievalError, match="reads 32 tokens at most; lower max_tokens from 64"):
        train_reranker(LISTS, tmp_path / "model", settings(tiny, max_tokens=64))
    assert not (tmp_path / "model").exists()


def test_a_step_is_timed(tiny: Path) -> None:
    assert 0 < step_seconds(LISTS, settings(tiny)) < 10
    assert settings(tiny, epochs=1.5).updates(5) == 5  # 1.5 times three batches, rounded up
    assert settings(tiny, steps=7).updates(5) == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("steps", 0),
        ("batch_lists", 0),
        ("max_tokens", 4),
        ("learning_rate", float("nan")),
        ("warmup_share", 1.5),
        ("weight_decay", -1),
        ("frozen_layers", -1),
        ("seed", -1),
        ("dtype", "float16"),
        ("device", "tpu"),
    ],
)
def test_numbers_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        RerankerSettings(**{field: value})


def test_the_script_says_what_there_is_to_learn(
    tmp_path: Path, tiny: Path, write_corpus, write_text, monkeypatch, capsys
) -> None:
    """Run in this process, where the libraries are loaded already."""
    index = build_bm25(write_corpus(["kite red", "kite blue", "sea red", "sea old"]), tmp_path / "index").path
    rows = [{"question": f"who is {thing}", "golden_answers": ["red"]} for thing in ("kite", "sea", "moon")]
    asked = write_text("".join(json.dumps(row) + "\n" for row in rows), "train.jsonl")
    unseen = write_text(json.dumps({"question": "Who is the sea?", "golden_answers": ["x"]}), "test.jsonl")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = runpy.run_path(str(SCRIPT))
    arguments = script["Arguments"](
        questions=(asked,),
        index=index,
        output=tmp_path / "model",
        exclude=(unseen,),
        held_out=0.0,
        settings=settings(tiny),
        dry_run=True,
    )
    assert script["run"](arguments) == 0
    said = capsys.readouterr().err
    assert "3 questions, 1 dropped as near one of 1 excluded" in said  # the sea
    assert "train: 1 lists of 2 pairs from 2 questions" in said  # the kite; no hit speaks of the moon
    assert "no positive 1" in said
    assert "1 updates of" in said
    assert not (tmp_path / "model").exists()


def test_the_script_refuses_bad_input_in_one_line(tmp_path: Path, write_text) -> None:
    asked = write_text('{"question": "q"}', "train.jsonl")
    done = subprocess.run(
        [sys.executable, SCRIPT, asked, "--index", tmp_path / "index", "--output", tmp_path / "model"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        timeout=240,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"train_reranker: {asked}, line 1: ")
    assert done.stderr.count("\n") == 1
