"""Wikipedia as passages: the 100-word passages others have cut, or whole articles cut here.

`read_psgs` reads DPR's ``psgs_w100.tsv`` (December 2018, 21,015,324 passages), the source of the corpora
that Search-R1 and FlashRAG publish as JSON lines (those `read_corpus` reads as they are). `cut_article`
cuts an article at ends of sentences; `cut_articles` does so for rows of ``wikimedia/wikipedia``.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from retrieval_index.corpus import stream_dataset
from retrieval_index.types import Passage

WORDS = 100

# A sentence ends at . ! or ? (with closing quotes or brackets) before white space and what may begin one.
_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*(?=\s+[\"'“‘(\[]*[A-Z0-9À-ÖØ-Þ])|(?<=[。！？])")
# After these a full stop ends no sentence, nor after single letters: initials, U.S.
_SHORT = frozenset(
    """mr mrs ms dr prof st sr jr gen col lt capt sgt rev hon gov sen rep vs no vol pp ed eds fig ca cf al
    jan feb mar apr jun jul aug sep sept oct nov dec inc ltd co corp dept univ approx est e.g i.e""".split()
)
_LETTERS = re.compile(r"(?:\w\.)*\w$")
_LAST_WORD = re.compile(r"([\w.]+)\.[\"'”’)\]]*$")


def sentences(text: str) -> list[str]:
    """Cut a paragraph at the ends of its sentences. All but white space between them is kept."""
    found, start = [], 0
    for match in _END.finditer(text):
        piece = text[start : match.end()].strip()
        last = _LAST_WORD.search(piece)
        if last and (_LETTERS.match(last[1]) or last[1].lower() in _SHORT):
            continue
        if piece:
            found.append(piece)
        start = match.end()
    if rest := text[start:].strip():
        found.append(rest)
    return found


def cut_article(text: str, words: int = WORDS) -> list[str]:
    """Cut an article into passages of at most `words` words that end where sentences do.

    Sentences are taken as long as they fit; one that is longer than a passage is cut between words.
    Line breaks become spaces, so that a heading goes with what follows it.

    Raises:
        ValueError: words below 1.
    """
    if words < 1:
        raise ValueError(f"a passage needs 1 word or more, got {words}")
    passages: list[str] = []
    held: list[str] = []
    for paragraph in re.split(r"\n+", text):
        for sentence in sentences(paragraph):
            own = sentence.split()
            if held and len(held) + len(own) > words:
                passages.append(" ".join(held))
                held = []
            while len(own) > words:
                passages.append(" ".join(own[:words]))
                own = own[words:]
            held += own
    if held:
        passages.append(" ".join(held))
    return passages


def cut_articles(rows: Iterable[Mapping[str, Any]], words: int = WORDS) -> Iterator[Passage]:
    """Passages of articles, rows ``{"id", "title", "text"}`` as the data set wikimedia/wikipedia has them.

    The ids are the article's and the number of the passage in it: ``12-0``, ``12-1``. Articles without
    text give none.

    Raises:
        ValueError: a row without one of the three; says which row.
    """
    for number, row in enumerate(rows, start=1):
        fields = [row.get("id"), row.get("title"), row.get("text")]
        if fields[0] in (None, "") or not all(isinstance(field, str) for field in fields[1:]):
            raise ValueError(f"article {number} (id {fields[0]!r}) needs `id`, `title` and `text`")
        for place, piece in enumerate(cut_article(str(fields[2]), words)):
            yield Passage(f"{fields[0]}-{place}", str(fields[1]), piece)


def fetch_articles(name: str, config: str | None = None, split: str = "train") -> Iterator[Mapping[str, Any]]:
    """Stream the rows of a data set of the `datasets` library, such as wikimedia/wikipedia 20231101.en.

    Raises:
        RuntimeError: the package datasets is not installed.
    """
    return stream_dataset(name, config, split)


def read_psgs(path: str | os.PathLike[str]) -> Iterator[Passage]:
    """Passages of ``psgs_w100.tsv`` (or ``.gz``): a header, then id, text and title parted by tabs.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a row of another form; names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; check the path")
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as raw:
        reader = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""), delimiter="\t")  # type: ignore[arg-type]
        for row in reader:
            if row == ["id", "text", "title"] and reader.line_num == 1:
                continue
            if len(row) != 3 or not row[0]:
                raise ValueError(
                    f"{path}, line {reader.line_num}: id, text and title are wanted, got {len(row)} columns"
                )
            yield Passage(row[0], row[2], row[1])


def write_corpus(passages: Iterable[Passage], destination: str | os.PathLike[str]) -> int:
    """Write passages as a corpus file (``.jsonl`` or ``.jsonl.gz``), whole or not at all; count them.

    The same passages give the same bytes.
    """
    destination = Path(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(destination.name + ".tmp")
    count = 0
    try:
        with temporary.open("wb") as raw:
            zipped = destination.suffix == ".gz"
            with gzip.GzipFile("", "wb", 6, fileobj=raw, mtime=0) if zipped else nullcontext(raw) as file:
                for passage in passages:
                    row = {"id": passage.id, "title": passage.title, "text": passage.text}
                    file.write(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n")
                    count += 1
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(destination)
    finally:
        temporary.unlink(missing_ok=True)
    return count
