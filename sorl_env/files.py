"""Reading and writing text files: lines with numbers, atomic replacement."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 text file (``.gz`` unpacked) that are not blank, numbered from 1.

    Only a line feed ends a line: U+2028 and its kin stay inside. A byte-order mark and carriage
    returns are dropped. Raises ValueError, naming file and line, for text that is not UTF-8 or an
    archive that is damaged, and FileNotFoundError for a missing file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                encoding = "utf-8-sig" if number == 1 else "utf-8"
                line = raw.decode(encoding).rstrip("\r\n")
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}, after line {number}: damaged gzip file ({error}); fetch it again") from None


@contextmanager
def atomic_text(path: Path) -> Iterator[TextIO]:
    """A text stream whose content replaces ``path`` in one move when the block ends without error.

    Line ends are written as they are. On an error the old file stays and the temporary one goes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as raw:
            # a gzip member without a time stamp: equal content gives equal bytes
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
            with _text_over(packed) as stream:
                yield stream
            if packed is not raw:
                packed.close()
            raw.flush()
            os.fsync(raw.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """The path of a temporary file beside ``path`` which replaces it in one move when the block ends without
    error. For libraries that write files by themselves.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _text_over(binary: object) -> Iterator[TextIO]:
    import io

    stream = io.TextIOWrapper(binary, encoding="utf-8", newline="\n")  # type: ignore[type-var]
    yield stream
    stream.flush()
    stream.detach()  # the caller still has to sync and close what lies beneath
