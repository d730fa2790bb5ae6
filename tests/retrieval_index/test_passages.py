from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_index import Passage, RetrievalError
from retrieval_index.passages import OFFSETS_FILE, TEXT_FILE, PassageStore, decode_passage, encode_passage


@given(st.text(min_size=1), st.text(), st.text())
def test_a_passage_survives_its_line(name: str, title: str, text: str) -> None:
    line = encode_passage(Passage(name, title, text))
    assert decode_passage(line) == Passage(name, title, text)
    assert line.index(b"\n") == len(line) - 1


def write_store(directory: Path, passages: list[Passage]) -> None:
    lines = [encode_passage(passage) for passage in passages]
    (directory / TEXT_FILE).write_bytes(b"".join(lines))
    np.save(directory / OFFSETS_FILE, np.cumsum([0, *map(len, lines)]))


def test_single_passages_are_fetched(tmp_path: Path) -> None:
    passages = [Passage(str(number), "title é", "text\n" * number) for number in range(5)]
    write_store(tmp_path, passages)
    store = PassageStore(tmp_path)
    assert len(store) == 5
    assert store[3] == passages[3]
    assert store.fetch([4, 1, 4]) == {1: passages[1], 4: passages[4]}
    for row in (-1, 5):
        with pytest.raises(IndexError, match=str(row)):
            store[row]


def test_text_and_offsets_out_of_step_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path, [Passage("1", "", "a"), Passage("2", "", "b")])
    with (tmp_path / TEXT_FILE).open("ab") as file:
        file.write(b"x")  # a line is 13 bytes: ["1","","a"] and its end
    with pytest.raises(RetrievalError, match="27 bytes, its offsets end at 26"):
        PassageStore(tmp_path)
