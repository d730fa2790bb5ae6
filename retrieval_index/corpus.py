"""Read a corpus: a passage a line of JSON or a row of parquet, checked as it streams by.

Accepted rows (other keys are ignored):

- ``{"id", "title", "text"}``;
- ``{"id", "title", "content", ...}``, the chunks of MedRAG;
- ``{"id", "contents"}`` with ``contents`` = ``"Title"`` newline text, as Search-R1, FlashRAG and
  pyserini have it. The first line is the title, with or without quotes; contents of a single line
  have no title.

Files are ``.jsonl`` (also ``.gz`` and ``.zst``) or ``.parquet``; a data set of the `datasets` library is
first written to a file by `fetch_dataset`. The first of these forms that a row has is used. An id is a
string or a whole number and travels as a string, so that 7 and "7" are the same id and "007" is
another one.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np

from retrieval_index.types import Passage

CorpusPaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
OnBytes = Callable[[int], None]  # receives how many more bytes of the (compressed) files were read

_BOM = b"\xef\xbb\xbf"
_FIELDS = ("id", "title", "text", "content", "contents")
_FORMS = "give `title` and `text` (the title may be empty), or `contents`, or MedRAG's `title` and `content`"


def as_paths(paths: CorpusPaths) -> list[Path]:
    """One path or several, as a list.

    Raises:
        FileNotFoundError: one of them is not a file.
        ValueError: the list is empty, or names a file twice.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = [Path(path) for path in given]
    if not found:
        raise ValueError("no corpus file was named; give at least one")
    for path in found:
        if not path.is_file():
            raise FileNotFoundError(f"corpus file {path} does not exist; check the path")
    if len({path.resolve() for path in found}) < len(found):
        raise ValueError(f"a corpus file is named twice: {', '.join(map(str, found))}")
    return found


def read_corpus(paths: CorpusPaths, *, on_bytes: OnBytes | None = None) -> Iterator[Passage]:
    """Stream the passages of one or several corpus files, in order.

    Args:
        paths: ``.jsonl``, ``.jsonl.gz``, ``.jsonl.zst`` (needs zstandard) or ``.parquet`` (needs pyarrow).
        on_bytes: called now and then with the number of file bytes read since the last call.

    Memory: a million ids at most are held as text, the rest as 16 bytes each, so that the 21 million
    passages of Wikipedia take about 0.5 GB while duplicates are still found at their line.

    Raises:
        FileNotFoundError: a path is not a file (at once, not at the first passage).
        ValueError: broken JSON, missing text, a bad or repeated id; names file and line.
        RuntimeError: a package that the file needs is not installed.
    """
    return _passages(as_paths(paths), on_bytes)


def count_rows(paths: CorpusPaths) -> int:
    """How many passages the files hold: lines that are not blank, rows of parquet. Checks nothing else."""
    return sum(
        _parquet(path).metadata.num_rows if _is_parquet(path) else sum(1 for _ in _lines(path, None))
        for path in as_paths(paths)
    )


def fetch_dataset(
    name: str,
    destination: str | os.PathLike[str],
    *,
    config: str | None = None,
    split: str = "train",
    on_row: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write a data set of the `datasets` library (a hub name or a local folder) to a corpus file.

    It streams: memory stays small whatever the size. A file that is there already is kept: delete it
    to fetch again.

    Args:
        destination: a ``.jsonl`` or ``.jsonl.gz`` file.
        on_row: called with the number of rows written so far.

    Raises:
        RuntimeError: the package datasets is not installed.
        ValueError: a row that is not a passage, named by its number.
    """
    destination = Path(destination)
    if destination.exists():
        return destination
    rows = stream_dataset(name, config, split)
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(destination.name + ".tmp")
    try:
        with temporary.open("wb") as raw:
            # No name and no time in the gzip header: the same rows give the same bytes.
            zipped = destination.suffix == ".gz"
            with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if zipped else nullcontext(raw) as file:
                for number, row in enumerate(rows, start=1):
                    try:
                        passage = make_passage(row)
                    except ValueError as error:
                        raise ValueError(f"data set {name}, row {number}: {error}") from error
                    fields = {"id": passage.id, "title": passage.title, "text": passage.text}
                    file.write(json.dumps(fields, ensure_ascii=False).encode("utf-8") + b"\n")
                    on_row(number)
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(destination)
    finally:
        temporary.unlink(missing_ok=True)
    return destination


def stream_dataset(name: str, config: str | None = None, split: str = "train") -> Iterator[dict[str, Any]]:
    """Rows of a data set of the `datasets` library, one at a time.

    Raises:
        RuntimeError: the package datasets is not installed.
        OSError: the hub cannot be reached or has no such data set; the message says what to do.
    """
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise RuntimeError(f"the data set {name} needs the package datasets: pip install datasets") from error
    try:
        rows: Any = datasets.load_dataset(name, config, split=split, streaming=True)
    except OSError as error:  # the library's errors of connection and of unknown names
        raise OSError(
            f"the data set {name} cannot be had ({error}); check its name and the connection, or name files that are"
            " here"
        ) from error
    return iter(rows)


def parse_row(line: bytes) -> Passage:
    """Make a passage of one line of JSON.

    Raises:
        ValueError: what is wrong with it, without file or line, which only the caller knows.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}, byte {error.start}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; nesting without end
        raise ValueError(f"invalid JSON ({type(error).__name__})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is wanted, got {type(row).__name__}")
    return make_passage(row)


def make_passage(row: dict[str, Any]) -> Passage:
    """Make a passage of a row in one of the accepted forms.

    Raises:
        ValueError: what is wrong with it.
    """
    title, text = _title_and_text(row)
    return Passage(id=_row_id(row), title=_sound(title), text=_sound(text))


def _passages(paths: list[Path], on_bytes: OnBytes | None) -> Iterator[Passage]:
    seen = _SeenIds()
    for file_number, path in enumerate(paths):
        for number, record in _records(path, on_bytes):
            try:
                passage = parse_row(record) if isinstance(record, bytes) else make_passage(record)
            except ValueError as error:
                raise ValueError(f"{_place(path, number)}: {error}") from error
            for first_file, first_line in seen.add(passage.id, file_number, number):
                # Ids far back are known by their hash alone: look at the line before accusing it.
                if _id_at(paths[first_file], first_line) == passage.id:
                    first = _place(paths[first_file], first_line)
                    if first_file == file_number:
                        first = first.removeprefix(f"{path}, ")
                    raise ValueError(
                        f"{_place(path, number)}: id {passage.id} was used before, at {first}; ids must be unique"
                    )
            yield passage


def _place(path: Path, number: int) -> str:
    return f"{path}, {'row' if _is_parquet(path) else 'line'} {number}"


def _records(path: Path, on_bytes: OnBytes | None) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """The lines or rows of a file with their numbers from 1."""
    return _parquet_rows(path, on_bytes) if _is_parquet(path) else _lines(path, on_bytes)


def _is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def _parquet(path: Path) -> Any:
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise RuntimeError(f"{path} needs the package pyarrow: pip install pyarrow") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file, or is damaged ({error})") from error


def _parquet_rows(path: Path, on_bytes: OnBytes | None) -> Iterator[tuple[int, dict[str, Any]]]:
    file = _parquet(path)
    wanted = [name for name in file.schema_arrow.names if name in _FIELDS]
    number, told, size, rows = 0, 0, path.stat().st_size, file.metadata.num_rows
    try:
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield number, row
            if on_bytes is not None:
                on_bytes(size * number // rows - told)
                told = size * number // rows
    except OSError as error:  # a damaged page; pyarrow's errors of reading are OSErrors
        raise ValueError(f"{path}, after row {number}: the file is damaged ({error}); fetch it again") from error


def _lines(path: Path, on_bytes: OnBytes | None) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, with their numbers from 1; ends of line and a BOM removed."""
    number = 0
    try:
        with _open_decompressed(path, on_bytes) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(_BOM)
                line = line.strip()
                if line:
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}, after line {number}: the compressed file is damaged or cut short ({error}); fetch it again"
        ) from error


@contextmanager
def _open_decompressed(path: Path, on_bytes: OnBytes | None) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        counted = raw if on_bytes is None else io.BufferedReader(_Counted(raw, on_bytes), 1 << 20)
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=counted) as file:
                yield file  # type: ignore[misc]
        elif path.suffix in (".zst", ".zstd"):
            yield _zstd_reader(path, counted)
        else:
            yield counted


def _zstd_reader(path: Path, raw: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise RuntimeError(f"{path} needs the package zstandard: pip install zstandard") from error
    return io.BufferedReader(_ZstdFile(raw, zstandard.ZstdDecompressor, zstandard.ZstdError), 1 << 20)


class _ZstdFile(io.RawIOBase):
    """Decompressed view of a zstd file of one frame or several.

    The library's own stream reader takes a file that was cut short for one that ended.
    """

    def __init__(self, raw: IO[bytes], decompressor: Callable[[], Any], broken: type[Exception]) -> None:
        self._raw, self._decompressor, self._broken = raw, decompressor, broken
        self._frame: Any = None  # the frame being read, none between two frames
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            piece = self._raw.read(1 << 16)
            if not piece:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            self._ready = self._decompress(piece)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, piece: bytes) -> bytes:
        out = []
        while piece:
            self._frame = self._frame or self._decompressor().decompressobj()
            try:
                out.append(self._frame.decompress(piece))
            except self._broken as error:
                raise EOFError(str(error)) from error
            piece = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        return b"".join(out)


class _Counted(io.RawIOBase):
    """A raw file that tells how much of it was read."""

    def __init__(self, raw: IO[bytes], on_bytes: OnBytes) -> None:
        self._raw, self._on_bytes = raw, on_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._on_bytes(len(data))
        return len(data)


def _title_and_text(row: dict[str, Any]) -> tuple[str, str]:
    title = row.get("title")
    for name in ("text", "content"):
        if isinstance(title, str) and isinstance(row.get(name), str):
            return title, row[name]
    contents = row.get("contents")
    if isinstance(contents, str):
        first, newline, rest = contents.partition("\n")
        return (_unquoted(first), rest) if newline else ("", contents)
    wrong = [name for name in _FIELDS[1:] if name in row and not isinstance(row[name], str)]
    because = f"`{wrong[0]}` is {_shown(row[wrong[0]])}, not a text" if wrong else "no `contents`"
    raise ValueError(f"{because}; {_FORMS}")


def _unquoted(title: str) -> str:
    title = title.strip()
    return title[1:-1] if len(title) > 1 and title[0] == title[-1] == '"' else title


def _row_id(row: dict[str, Any]) -> str:
    value = row.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        shown = "is missing" if "id" not in row else f"is {_shown(value)}"
        raise ValueError(f"`id` {shown}; give a text or a whole number")
    name = str(value)
    if _sound(name) != name:
        raise ValueError(f"`id` {name!r} holds half of a surrogate pair, which is not valid Unicode")
    return name


def _shown(value: Any) -> str:
    return json.dumps(value, default=repr)[:40]  # parquet has values that JSON has not: bytes, dates


def _sound(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can spell but UTF-8 cannot hold, by U+FFFD."""
    if not _has_surrogate(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _id_at(path: Path, line_number: int) -> str:
    record = next(record for number, record in _records(path, None) if number == line_number)
    return (parse_row(record) if isinstance(record, bytes) else make_passage(record)).id


class _SeenIds:
    """Which ids came by and where, in bounded memory.

    The newest ids are kept in a dict; when it is full they are folded into two sorted arrays: a
    64-bit hash and a place (file number and line number in one integer).
    """

    def __init__(self, recent_limit: int = 1_000_000) -> None:
        self._limit = recent_limit
        self._recent: dict[str, int] = {}
        self._hashes = np.empty(0, np.int64)
        self._places = np.empty(0, np.int64)

    def add(self, name: str, file_number: int, line_number: int) -> list[tuple[int, int]]:
        """Note an id; return the earlier places that may hold it (file number, line number)."""
        place = file_number << 40 | line_number
        first = self._recent.setdefault(name, place)
        suspects = [] if first == place else [first]
        if len(self._hashes):
            key = hash(name)
            low, high = np.searchsorted(self._hashes, key), np.searchsorted(self._hashes, key, side="right")
            suspects.extend(int(earlier) for earlier in self._places[low:high])
        if len(self._recent) >= self._limit:
            self._fold()
        return [(earlier >> 40, earlier & (1 << 40) - 1) for earlier in suspects]

    def _fold(self) -> None:
        hashes = np.fromiter(map(hash, self._recent), np.int64, len(self._recent))
        places = np.fromiter(self._recent.values(), np.int64, len(self._recent))
        all_hashes = np.concatenate([self._hashes, hashes])
        order = np.argsort(all_hashes, kind="stable")
        self._hashes = all_hashes[order]
        self._places = np.concatenate([self._places, places])[order]
        self._recent = {}
