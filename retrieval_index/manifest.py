"""manifest.json: what an index holds, what it was made from, and whether it may be opened.

The manifest is the last file that a build writes, so a directory without one is not an index.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrieval_index.corpus import CorpusPaths, as_paths, count_rows
from retrieval_index.types import RetrievalError

MANIFEST_FILE = "manifest.json"
FORMAT = 1
CREATED_BY = "retrieval_index 0.1.0"
REBUILD = "build it again with scripts/build_index.py"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Name (no directory), size in bytes and SHA-256 of a file."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of manifest.json."""

    kind: str  # "bm25"; which class opens it
    passages: int
    parameters: dict[str, Any]
    corpus: tuple[FileRecord, ...]  # in reading order
    files: tuple[FileRecord, ...]  # of the index, by name
    format: int = FORMAT
    created_by: str = CREATED_BY

    def as_json(self) -> str:
        """Text with sorted keys, the same for the same contents."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @property
    def corpus_hashes(self) -> list[str]:
        """SHA-256 of the corpus files, in reading order."""
        return [record.sha256 for record in self.corpus]


def file_record(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> FileRecord:
    """Hash a file in pieces; `on_bytes` hears of each."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            size += len(piece)
            on_bytes(len(piece))
    return FileRecord(path.name, size, digest.hexdigest())


def is_index(directory: Path) -> bool:
    """Does the directory hold a manifest of ours (of whatever format number)?"""
    try:
        _read_object(directory)
    except RetrievalError:
        return False
    return True


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read a directory's manifest.

    Raises:
        RetrievalError: no directory, no index, an unfinished build, a newer format, a damaged manifest.
    """
    directory = Path(directory)
    fields = _read_object(directory)
    if fields["format"] > FORMAT:
        raise RetrievalError(
            f"{directory} has index format {fields['format']}, this version reads up to {FORMAT};"
            f" update the package or {REBUILD}"
        )
    try:
        return Manifest(
            kind=fields["kind"],
            passages=int(fields["passages"]),
            parameters=dict(fields["parameters"]),
            corpus=tuple(FileRecord(**record) for record in fields["corpus"]),
            files=tuple(FileRecord(**record) for record in fields["files"]),
            format=fields["format"],
            created_by=fields["created_by"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RetrievalError(f"{directory / MANIFEST_FILE} is damaged ({error!r}); {REBUILD}") from error


def check_files(directory: Path, manifest: Manifest, *, verify: bool) -> None:
    """Compare the files of an index with its manifest: sizes, and with `verify` their hashes.

    Raises:
        RetrievalError: a file is missing or differs.
    """
    for record in manifest.files:
        path = directory / record.name
        if not path.is_file():
            raise RetrievalError(f"{path} is missing; {REBUILD}")
        size = path.stat().st_size
        if size != record.bytes:
            raise RetrievalError(f"{path} has {size} bytes, the manifest says {record.bytes}; {REBUILD}")
        if verify and (found := file_record(path).sha256) != record.sha256:
            raise RetrievalError(
                f"{path} is damaged: its SHA-256 is {found[:12]}, the manifest says {record.sha256[:12]};"
                f" delete {directory} and {REBUILD}"
            )


def check_corpus(directory: Path, manifest: Manifest, corpus: CorpusPaths) -> None:
    """Refuse an index that was not built from these corpus files.

    Raises:
        RetrievalError: another number of rows or files, or other contents.
    """
    paths = as_paths(corpus)
    hashes = [file_record(path).sha256 for path in paths]
    if hashes == manifest.corpus_hashes:
        return
    rows = count_rows(paths)
    names = ", ".join(map(str, paths))
    if rows != manifest.passages:
        raise RetrievalError(
            f"index {directory} holds {manifest.passages} passages but corpus {names} has {rows}; {REBUILD}"
        )
    raise RetrievalError(
        f"index {directory} was built from other files than {names}"
        f" (SHA-256 {_short(manifest.corpus_hashes)}, now {_short(hashes)}); {REBUILD}"
    )


def _short(hashes: Sequence[str]) -> str:
    return "+".join(value[:12] for value in hashes)


def _read_object(directory: Path) -> dict[str, Any]:
    if not directory.exists():
        partial = directory.with_name(directory.name + ".partial")
        if partial.exists():
            raise RetrievalError(f"{directory}: its build did not finish ({partial} is left); run it again")
        raise RetrievalError(f"there is no index at {directory}; build one with scripts/build_index.py")
    path = directory / MANIFEST_FILE
    if not path.is_file():
        why = "an incomplete build" if directory.name.endswith(".partial") else f"it has no {MANIFEST_FILE}"
        raise RetrievalError(f"{directory} is not an index ({why}); {REBUILD}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RetrievalError(f"{path} is damaged ({error}); {REBUILD}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), int) or "kind" not in fields:
        raise RetrievalError(f"{path} is not the manifest of an index; name another directory")
    return fields
