from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from retrieval_index import Passage, read_corpus
from retrieval_index.wikipedia import cut_article, cut_articles, read_psgs, sentences, write_corpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "Go." Then he left.', ['He said "Go."', "Then he left."]),
        ("It opened (in 1937.) It closed.", ["It opened (in 1937.)", "It closed."]),
        (
            "Dr. Smith met J. R. Jones at St. Ives. They spoke.",
            ["Dr. Smith met J. R. Jones at St. Ives.", "They spoke."],
        ),
        ("Pi is 3.14 or so. It is.", ["Pi is 3.14 or so.", "It is."]),
        ("the U.S. Army came", ["the U.S. Army came"]),
        ("e.g. this one. and no capital", ["e.g. this one. and no capital"]),
        ("Émile wrote. Été came.", ["Émile wrote.", "Été came."]),
        ("  ", []),
        ("", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_passages_hold_whole_sentences_up_to_the_limit() -> None:
    # Sentences of 4, 3, 2 and 5 words; at most 7 words a passage.
    text = "One two three four. Five six seven. Eight nine. Ten eleven twelve thirteen fourteen."
    assert cut_article(text, 7) == [
        "One two three four. Five six seven.",
        "Eight nine. Ten eleven twelve thirteen fourteen.",
    ]


def test_a_long_sentence_is_cut_between_words() -> None:
    text = "Start here. " + " ".join(f"W{number}" for number in range(250)) + ". End."
    pieces = cut_article(text)
    assert [len(piece.split()) for piece in pieces] == [2, 100, 100, 51]
    assert " ".join(pieces) == text


def test_no_word_is_lost_and_no_passage_too_long() -> None:
    text = "\n\n".join(
        " ".join(f"Word{block}x{number}" + ("." if number % 9 == 8 else "") for number in range(60))
        for block in range(9)
    )
    pieces = cut_article(text)
    assert " ".join(pieces).split() == text.split()
    assert max(len(piece.split()) for piece in pieces) <= 100
    assert min(len(piece.split()) for piece in pieces[:-1]) > 90  # sentences have 9 words or 6


@pytest.mark.parametrize("text", ["", "\n\n", "  \n "])
def test_an_article_without_text_gives_nothing(text: str) -> None:
    assert cut_article(text) == []


def test_articles_give_numbered_passages_with_their_title() -> None:
    rows = [
        {"id": "12", "title": "Anarchism", "url": "u", "text": "One two. Three four."},
        {"id": "13", "title": "Empty", "text": ""},
        {"id": 14, "title": "Last", "text": "Five."},
    ]
    assert list(cut_articles(rows, 2)) == [
        Passage("12-0", "Anarchism", "One two."),
        Passage("12-1", "Anarchism", "Three four."),
        Passage("14-0", "Last", "Five."),
    ]


@pytest.mark.parametrize(
    "row", [{"id": "1", "title": "T"}, {"id": "", "title": "T", "text": "x"}, {"id": "1", "title": None, "text": "x"}]
)
def test_a_row_that_is_no_article_is_named(row: dict) -> None:
    good = {"id": "0", "title": "T", "text": "x"}
    with pytest.raises(ValueError, match="article 2"):
        list(cut_articles([good, row]))
    with pytest.raises(ValueError, match="1 word or more"):
        cut_article("x", 0)


@pytest.mark.parametrize("name", ["psgs.tsv", "psgs.tsv.gz"])
def test_dprs_passages_are_read(tmp_path: Path, name: str) -> None:
    # The file quotes a text that holds quotes, and doubles them.
    text = 'id\ttext\ttitle\n1\tAaron is a prophet.\tAaron\n2\t"He said ""no"" twice."\t"""Aaron"" (disambiguation)"\n'
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert list(read_psgs(path)) == [
        Passage("1", "Aaron", "Aaron is a prophet."),
        Passage("2", '"Aaron" (disambiguation)', 'He said "no" twice.'),
    ]


def test_a_broken_row_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "psgs.tsv"
    path.write_text("id\ttext\ttitle\n1\tonly two\n")
    with pytest.raises(ValueError, match=r"psgs\.tsv, line 2: .* got 2 columns"):
        list(read_psgs(path))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(read_psgs(tmp_path / "nowhere.tsv"))


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_a_written_corpus_is_read_back_and_is_the_same_each_time(tmp_path: Path, name: str) -> None:
    passages = [Passage("1", "Zürich", 'a "quoted"\ttext'), Passage("2", "", "x")]
    assert write_corpus(passages, tmp_path / "a" / name) == 2
    write_corpus(passages, tmp_path / "b" / name)
    assert list(read_corpus(tmp_path / "a" / name)) == passages
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_corpus_that_fails_halfway_is_not_there(tmp_path: Path) -> None:
    def failing():
        yield Passage("1", "", "x")
        raise ValueError("broken source")

    with pytest.raises(ValueError, match="broken source"):
        write_corpus(failing(), tmp_path / "corpus.jsonl")
    assert list(tmp_path.iterdir()) == []
