"""Build an index: streamed, in shards, resumable, published all at once.

Everything is made in ``<output>.partial``, hashed, flushed to disk, given its manifest and then
renamed, so that ``<output>`` is a whole index or not there. A build that was killed leaves the
partial directory; the next one with the same corpus and parameters goes on after its last finished
shard and ends with the same bytes as one that was never stopped.

What is the same for every kind of index is `run_build`; a `Builder` holds what differs. See `build`
(BM25), `build_dense` and `lucene`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from retrieval_index.corpus import CorpusPaths, as_paths, read_corpus
from retrieval_index.manifest import (
    CREATED_BY,
    FORMAT,
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    check_files,
    read_manifest,
)
from retrieval_index.passages import OFFSETS_FILE, TEXT_FILE, encode_passage
from retrieval_index.staging import (
    PLAN_FILE,
    SHARDS,
    Progress,
    check_output,
    clear,
    hash_all,
    locked,
    partial_of,
    prepare,
    publish,
    shard_note,
    shard_path,
    size,
    sync,
    write_atomically,
)
from retrieval_index.types import Passage, RetrievalError


class Builder(Protocol):
    """What differs between the kinds of index."""

    @property
    def kind(self) -> str:
        """Name of the kind in the manifest."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything that decides what the index holds, for the manifest."""

    @property
    def shard_parameters(self) -> dict[str, Any]:
        """Those of them that decide what the shards hold; others may change between two tries."""

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of the files that `write_shard` writes."""

    def write_shard(self, partial: Path, number: int, rows: list[Passage]) -> None:
        """Do the long work on some passages and write it to `shard_path`."""

    def finish(self, partial: Path, shards: int, tell: Progress) -> list[str]:
        """Make the index of the shards; return the names of its files, relative to `partial`."""


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build made or found."""

    path: Path
    manifest: Manifest
    reused: bool  # a finished index of the same corpus and parameters was there already
    resumed_shards: int  # shards taken over from a build that was stopped
    seconds: float


def run_build(
    builder: Builder,
    corpus_paths: CorpusPaths,
    output: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    shard_rows: int,
) -> BuildResult:
    """Build, finish or reuse an index; see `retrieval_index.build.build_bm25` for arguments and errors."""
    started = time.monotonic()
    tell = progress or (lambda _stage, _done, _total: None)
    if shard_rows < 1:
        raise ValueError(f"shard_rows must be 1 or more, got {shard_rows}")
    paths, output = as_paths(corpus_paths), Path(output)
    partial = partial_of(output)
    check_output(output)
    corpus = hash_all(paths, "hash", tell)

    def finished(directory: Path) -> Manifest | None:
        return _finished(directory, corpus, builder)

    def result(manifest: Manifest, *, reused: bool = False, resumed: int = 0) -> BuildResult:
        return BuildResult(output, manifest, reused, resumed, time.monotonic() - started)

    if manifest := finished(output):
        return result(manifest, reused=True)
    with locked(partial):
        if manifest := finished(partial):  # stopped between the manifest and the rename
            publish(partial, output)
            return result(manifest)
        plan = {"format": FORMAT, "corpus": [record.sha256 for record in corpus], "shard_rows": shard_rows}
        prepare(partial, plan | {"kind": builder.kind} | builder.shard_parameters)
        try:
            shards, resumed = _read_shards(paths, partial, builder, shard_rows, tell)
        except ValueError:
            # A corpus with a broken line can never be finished as it is. The plan, which marks the
            # directory as ours, goes last.
            clear(partial, keep=PLAN_FILE)
            clear(partial)
            partial.rmdir()
            raise
        if [record.bytes for record in corpus] != [path.stat().st_size for path in paths]:
            raise RetrievalError("a corpus file changed while it was read; run the build again")
        passages = _write_offsets(partial, shards)
        names = builder.finish(partial, shards, tell)
        manifest = _seal(partial, passages, names, builder, corpus, tell)
        publish(partial, output)
    return result(manifest, resumed=resumed)


# --- stages ---------------------------------------------------------------------------------------


def _read_shards(
    paths: list[Path], partial: Path, builder: Builder, shard_rows: int, tell: Progress
) -> tuple[int, int]:
    """Write passages.jsonl and the shards; return how many there are and how many were there."""
    total = sum(path.stat().st_size for path in paths)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        tell("read", done, total)

    passages = read_corpus(paths, on_bytes=on_bytes)
    number = resumed = end = 0
    with (partial / TEXT_FILE).open("r+b" if (partial / TEXT_FILE).exists() else "w+b") as text:
        while rows := list(islice(passages, shard_rows)):
            lines = [encode_passage(row) for row in rows]
            end += sum(map(len, lines))
            note = {"end": end, "rows": len(rows), "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}
            # Shards are taken over in an unbroken row from the first; what comes later is made anew.
            if resumed == number and shard_note(partial, number) == note and size(text) >= end:
                resumed += 1
            else:
                text.seek(end - sum(map(len, lines)))
                text.truncate()
                text.writelines(lines)
                text.flush()
                os.fsync(text.fileno())
                _write_shard(partial, number, rows, lines, builder, note)
            number += 1
        text.truncate(end)
    if number == 0:
        raise ValueError(f"the corpus has no passage: {', '.join(map(str, paths))}")
    return number, resumed


def _write_shard(
    partial: Path, number: int, rows: list[Passage], lines: list[bytes], builder: Builder, note: dict[str, Any]
) -> None:
    builder.write_shard(partial, number, rows)
    np.save(shard_path(partial, number, "lengths.npy"), np.fromiter(map(len, lines), np.int64, len(lines)))
    for ending in (*builder.endings, "lengths.npy"):
        sync(shard_path(partial, number, ending))
    write_atomically(shard_path(partial, number, "json"), json.dumps(note))  # last: the shard is whole


def _write_offsets(partial: Path, shards: int) -> int:
    """Write where each passage begins; return how many there are."""
    lengths = np.concatenate([np.load(shard_path(partial, number, "lengths.npy")) for number in range(shards)])
    np.save(partial / OFFSETS_FILE, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
    return len(lengths)


def _seal(
    partial: Path,
    passages: int,
    names: list[str],
    builder: Builder,
    corpus: tuple[FileRecord, ...],
    tell: Progress,
) -> Manifest:
    """Flush every file to disk, then write the manifest over their hashes.

    The shards stay until then: whatever the moment of a kill, either they or the whole index are there.
    """
    names = sorted([TEXT_FILE, OFFSETS_FILE, *names])
    kept = {name.partition("/")[0] for name in names} | {PLAN_FILE, SHARDS}
    for path in partial.iterdir():
        if path.name not in kept:
            path.unlink()  # the temporary name of a file that was cut short
    files = [partial / name for name in names]
    for path in files:
        sync(path)
    hashed = hash_all(files, "check", tell)
    manifest = Manifest(
        kind=builder.kind,
        passages=passages,
        parameters=builder.parameters,
        corpus=corpus,
        files=tuple(FileRecord(name, record.bytes, record.sha256) for name, record in zip(names, hashed, strict=True)),
    )
    write_atomically(partial / MANIFEST_FILE, manifest.as_json())
    return manifest


def _finished(directory: Path, corpus: tuple[FileRecord, ...], builder: Builder) -> Manifest | None:
    """The manifest of a whole index of just this corpus, kind and parameters, if it is one."""
    try:
        manifest = read_manifest(directory)
        check_files(directory, manifest, verify=False)
    except RetrievalError:
        return None
    wanted = (CREATED_BY, builder.kind, [record.sha256 for record in corpus], builder.parameters)
    found = (manifest.created_by, manifest.kind, manifest.corpus_hashes, manifest.parameters)
    return manifest if found == wanted else None
