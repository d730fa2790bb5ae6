"""Small corpora written to disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

WriteCorpus = Callable[..., Path]


@pytest.fixture
def write_corpus(tmp_path: Path) -> WriteCorpus:
    """Write texts as a corpus whose ids are their numbers; returns the path."""

    def write(texts: Sequence[str], name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        rows = ({"id": str(number), "title": "", "text": text} for number, text in enumerate(texts))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def write_text(tmp_path: Path) -> WriteCorpus:
    """Write a file as it stands."""

    def write(text: str | bytes, name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        return path

    return write
