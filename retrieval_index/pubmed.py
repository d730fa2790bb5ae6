"""PubMed as passages: NLM's baseline and update files (``pubmed26n0001.xml.gz`` ...), streamed.

A citation comes in several files when it was revised, and update files delete some. The files are read
from the newest to the oldest, so that the first sight of a PMID is the one that counts; which were seen
is a bit a PMID (8 MB for all of PubMed), and no more than one file's citations are held. Every source
file gives one part, written atomically, so that an interrupted run goes on after the last whole part.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from xml.parsers import expat

import numpy as np

from retrieval_index.types import Passage
from retrieval_index.wikipedia import write_corpus

_NUMBER = re.compile(r"^pubmed(\d\d)n(\d+)\.xml(\.gz)?$")
_SPACE = re.compile(r"\s+")
_TEXT_TAGS = ("ArticleTitle", "VernacularTitle", "AbstractText")


@dataclass(frozen=True, slots=True)
class Citation:
    """What is kept of a PubmedArticle."""

    pmid: int
    title: str
    abstract: str  # sections in order, each with its label: "METHODS: ..."
    version: int = 1  # of the PMID; a few journals publish several of one article

    def passage(self) -> Passage:
        """The citation as a passage; its id is the PMID."""
        return Passage(str(self.pmid), self.title, self.abstract)


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the citations of the files.

    Args:
        kept: are passages now.
        revised: were left out, since a newer one of the same PMID came or a later file deleted it.
        deleted: were deleted by their own file.
        empty: have neither title nor abstract.
    """

    kept: int = 0
    revised: int = 0
    deleted: int = 0
    empty: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.kept + other.kept,
            self.revised + other.revised,
            self.deleted + other.deleted,
            self.empty + other.empty,
        )


def in_order(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Files of one year's release in NLM's order, the oldest first.

    Raises:
        ValueError: no file, a name that is not NLM's, files of two releases, or a number twice.
        FileNotFoundError: one is not there.
    """
    numbered: dict[tuple[str, int], Path] = {}
    for path in map(Path, paths):
        match = _NUMBER.match(path.name)
        if not match:
            raise ValueError(f"{path} is not named as NLM names its files (pubmed26n0001.xml.gz)")
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; check the path")
        key = (match[1], int(match[2]))
        if key in numbered:
            raise ValueError(f"{path} and {numbered[key]} have the same number; give one of them")
        numbered[key] = path
    years = sorted({year for year, _ in numbered})
    if len(years) != 1:
        found = ", ".join(f"pubmed{year}n" for year in years) or "no file"
        raise ValueError(f"files of just one release are wanted (a baseline and its updates), got {found}")
    return [numbered[key] for key in sorted(numbered)]


def convert(
    paths: Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    on_file: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[list[Path], Counts]:
    """Write one corpus file for each source file; what an earlier run finished is kept.

    Args:
        paths: baseline and update files of one release, in any order.
        folder: where the parts go; parts of other sources in it are removed at the end.
        on_file: called with the number of source files done and of all.

    Returns:
        The parts that hold a passage, newest source first, and what became of the citations.

    Raises:
        FileNotFoundError, ValueError: see `in_order` and `read_file`.
    """
    sources = in_order(paths)[::-1]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    seen, total = _Seen(), Counts()
    parts: list[Path] = []
    chain = hashlib.sha256()
    known: set[Path] = set()
    for done, source in enumerate(sources, start=1):
        # A part depends on its source and on all that are newer.
        chain.update(f"{source.name} {source.stat().st_size} {_digest(source)}\n".encode())
        stem = f"{source.name.partition('.')[0]}.{chain.hexdigest()[:12]}"
        part, note = folder / f"{stem}.jsonl.gz", folder / f"{stem}.npz"
        known |= {part, note}
        if not (part.is_file() and note.is_file()):
            _write_part(source, part, note, seen)
        with np.load(note, allow_pickle=False) as fields:
            seen.add(fields["seen"])
            counts = Counts(*fields["counts"].tolist())
        total += counts
        if counts.kept:
            parts.append(part)
        on_file(done, len(sources))
    for path in folder.iterdir():
        if _is_ours(path) and path not in known:
            path.unlink()
    return parts, total


def read_file(path: str | os.PathLike[str]) -> Iterator[Citation | list[int]]:
    """Citations of a file in its order; a list of PMIDs is what it deletes.

    Entity declarations are refused and nothing outside the file is fetched.

    Raises:
        ValueError: not XML, cut short, an entity declaration, or a citation without a PMID; names the
            file and where in it.
    """
    path = Path(path)
    parser = _Parser(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield from parser.run(file)  # type: ignore[arg-type]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the compressed file is damaged or cut short ({error}); fetch it again") from error
    except expat.ExpatError as error:
        raise ValueError(f"{path}, line {error.lineno}: not well-formed XML ({error}); fetch it again") from error


class _Parser:
    """Takes what is wanted from a stream of tags, and holds one citation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ready: list[Citation | list[int]] = []
        self._stack: list[str] = []
        self._pmid: str | None = None
        self._version = 1
        self._title = self._vernacular = ""
        self._sections: list[tuple[str, str]] = []
        self._label = ""
        self._deleted: list[int] = []
        self._text: list[str] | None = None  # of the element that is being read, if it is one we want
        self._text_depth = 0

    def run(self, file: IO[bytes]) -> Iterator[Citation | list[int]]:
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._data
        parser.EntityDeclHandler = self._refuse_entity
        parser.SkippedEntityHandler = self._skipped_entity
        self._parser = parser
        while piece := file.read(1 << 18):
            parser.Parse(piece, False)
            yield from self._taken()
        parser.Parse(b"", True)
        yield from self._taken()

    def _taken(self) -> list[Citation | list[int]]:
        taken, self._ready = self._ready, []
        return taken

    def _refuse_entity(self, name: str, *_rest: Any) -> None:
        raise ValueError(f"{self._path}, line {self._parser.CurrentLineNumber}: declares the entity {name}; refused")

    def _skipped_entity(self, name: str, _is_parameter: bool) -> None:
        """One that the DTD, which is not read, would declare: HTML's names are known, others stay as written."""
        self._data(html.unescape(f"&{name};"))

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        parent = self._stack[-1] if self._stack else ""
        self._stack.append(name)
        if self._text is not None:
            return  # markup inside a text: <i>, <sub>, <mml:math>
        if name == "PubmedArticle":
            self._pmid, self._title, self._vernacular, self._sections = None, "", "", []
        # Citations that this one names have PMIDs too, under other parents.
        wanted = name in _TEXT_TAGS and "OtherAbstract" not in self._stack
        wanted |= name == "PMID" and parent in ("MedlineCitation", "DeleteCitation")
        if wanted:
            self._label = attributes.get("Label", "").strip()
            if parent == "MedlineCitation":
                version = attributes.get("Version", "")
                self._version = int(version) if version.isdecimal() else 1
            self._text, self._text_depth = [], len(self._stack)

    def _data(self, text: str) -> None:
        if self._text is not None:
            self._text.append(text)

    def _end(self, name: str) -> None:
        if self._text is not None and len(self._stack) == self._text_depth:
            self._take_text(name, _SPACE.sub(" ", "".join(self._text)).strip())
            self._text = None
        self._stack.pop()
        if name == "PubmedArticle":
            self._ready.append(self._citation())
        elif name == "DeleteCitation":
            self._ready.append(self._deleted)
            self._deleted = []

    def _take_text(self, name: str, text: str) -> None:
        if name == "PMID":
            if self._stack[-2] == "DeleteCitation":
                self._deleted.append(self._number(text))
            else:
                self._pmid = text
        elif name == "ArticleTitle":
            self._title = text
        elif name == "VernacularTitle":
            self._vernacular = text
        elif text:
            self._sections.append((self._label, text))

    def _citation(self) -> Citation:
        pmid = self._number(self._pmid or "")
        # A translated title is in brackets, [Like this.]; an article without one has its own language's.
        title = self._title or self._vernacular
        if title.startswith("[") and title.rstrip(".").endswith("]"):
            title = title.rstrip(".")[1:-1]
        labelled = [f"{label}: {text}" if label and label != "UNLABELLED" else text for label, text in self._sections]
        return Citation(pmid, title, " ".join(labelled), self._version)

    def _number(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
            line = self._parser.CurrentLineNumber
            raise ValueError(f"{self._path}, line {line}: a citation has the PMID {text!r}, a number is wanted")
        return int(text)


def _write_part(source: Path, part: Path, note: Path, seen: _Seen) -> None:
    """Write the citations of a file that no newer file has, then a note of all that it speaks of."""
    newest: dict[int, Citation] = {}
    deleted: set[int] = set()
    repeated = 0
    for item in read_file(source):
        if isinstance(item, list):
            deleted.update(item)
        else:
            earlier = newest.get(item.pmid)
            repeated += earlier is not None
            if earlier is None or item.version >= earlier.version:
                newest.pop(item.pmid, None)  # the later one takes the later place
                newest[item.pmid] = item
    own = np.fromiter(newest, np.int64, len(newest))
    stale = set(own[seen.holds(own)].tolist())
    kept, empty = [], 0
    for pmid, citation in newest.items():
        if pmid in deleted or pmid in stale:
            continue
        if citation.title or citation.abstract:
            kept.append(citation)
        else:
            empty += 1
    gone = len(deleted & newest.keys())
    counts = Counts(len(kept), repeated + len(stale - deleted), gone, empty)
    write_corpus((citation.passage() for citation in kept), part)
    spoken = np.array(sorted(newest.keys() | deleted), np.int64)
    temporary = note.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, seen=spoken, counts=np.array([counts.kept, counts.revised, counts.deleted, counts.empty]))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(note)


class _Seen:
    """A set of PMIDs, a bit each."""

    def __init__(self) -> None:
        self._bits = np.zeros(1 << 16, np.uint8)

    def add(self, pmids: np.ndarray) -> None:
        if len(pmids) == 0:
            return
        size = int(pmids.max()) // 8 + 1
        if size > len(self._bits):
            self._bits = np.concatenate([self._bits, np.zeros(max(size - len(self._bits), len(self._bits)), np.uint8)])
        np.bitwise_or.at(self._bits, pmids // 8, np.left_shift(1, pmids % 8).astype(np.uint8))

    def holds(self, pmids: np.ndarray) -> np.ndarray:
        inside = pmids // 8 < len(self._bits)
        bits = self._bits[np.where(inside, pmids // 8, 0)]
        return inside & (np.right_shift(bits, (pmids % 8).astype(np.uint8)) & 1).astype(bool)


def _digest(path: Path) -> str:
    """Of a file's two ends: enough to tell a file that was fetched again, without reading them all."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        return hashlib.sha256(head + file.read()).hexdigest()[:16]


def _is_ours(path: Path) -> bool:
    return re.match(r"^pubmed\d\dn\d+\.[0-9a-f]{12}\.(jsonl\.gz|npz|tmp|jsonl\.gz\.tmp)$", path.name) is not None


def parts_of(paths: Sequence[Path]) -> list[Path]:
    """All NLM files in folders, and those named singly."""
    found: list[Path] = []
    for path in paths:
        found += [own for own in path.iterdir() if _NUMBER.match(own.name)] if path.is_dir() else [path]
    return found
