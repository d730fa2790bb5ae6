"""Build a BM25 index: streamed, in shards, resumable, published all at once.

Everything is made in ``<output>.partial``, hashed, flushed to disk, given its manifest and then
renamed, so that ``<output>`` is a whole index or not there. A build that was killed leaves the
partial directory; the next one with the same corpus and parameters goes on after its last finished
shard and ends with the same bytes as one that was never stopped.

Memory: one shard of passages and its postings, the vocabulary, and 16 bytes a passage for the ids.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from retrieval_index.analysis import Analyzer, BM25Parameters
from retrieval_index.bm25 import (
    MATRIX_FILES,
    PARAMETERS_FILE,
    VOCABULARY_FILE,
    indexed_text,
    save_matrix_extras,
)
from retrieval_index.corpus import CorpusPaths, as_paths, read_corpus
from retrieval_index.manifest import (
    CREATED_BY,
    FORMAT,
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    check_files,
    file_record,
    is_index,
    read_manifest,
)
from retrieval_index.passages import OFFSETS_FILE, TEXT_FILE, encode_passage
from retrieval_index.postings import Shard, allocate_in, count_terms, merge_shards
from retrieval_index.types import Passage, RetrievalError

Progress = Callable[[str, int, int], None]  # stage ("hash", "read", "score", "check"), done, total

PLAN_FILE = "building.json"
SHARDS = "shards"
INDEX_FILES = sorted([TEXT_FILE, OFFSETS_FILE, VOCABULARY_FILE, PARAMETERS_FILE, *MATRIX_FILES.values()])


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build made or found."""

    path: Path
    manifest: Manifest
    reused: bool  # a finished index of the same corpus and parameters was there already
    resumed_shards: int  # shards taken over from a build that was stopped
    seconds: float


def build_bm25(
    corpus_paths: CorpusPaths,
    output: str | os.PathLike[str],
    *,
    parameters: BM25Parameters | None = None,
    progress: Progress | None = None,
    shard_rows: int = 50_000,
) -> BuildResult:
    """Build, finish or reuse the BM25 index of a corpus.

    Args:
        corpus_paths: one file or several, read in order; see `read_corpus`.
        output: directory of the index. An index of another corpus or other parameters is replaced once
            the new one is complete; a directory that is not an index is refused.
        parameters: BM25's; the defaults of `BM25Parameters` if None.
        progress: called often with stage, done, total; what it raises stops the build, resumably.
        shard_rows: passages held in memory at once; does not change the result.

    Raises:
        FileNotFoundError, ValueError: a corpus that cannot be read or has a broken line or no passage.
        RetrievalError: the output is something else, or another build is writing it.
    """
    started = time.monotonic()
    parameters = parameters or BM25Parameters()
    tell = progress or (lambda _stage, _done, _total: None)
    if shard_rows < 1:
        raise ValueError(f"shard_rows must be 1 or more, got {shard_rows}")
    paths, output = as_paths(corpus_paths), Path(output)
    partial = _partial(output)
    check_output(output)
    corpus = _hash_all(paths, "hash", tell)

    def finished(directory: Path) -> Manifest | None:
        return _finished(directory, corpus, parameters)

    def result(manifest: Manifest, *, reused: bool = False, resumed: int = 0) -> BuildResult:
        return BuildResult(output, manifest, reused, resumed, time.monotonic() - started)

    if manifest := finished(output):
        return result(manifest, reused=True)
    with _locked(partial):
        if manifest := finished(partial):  # stopped between the manifest and the rename
            _publish(partial, output)
            return result(manifest)
        plan = {"format": FORMAT, "corpus": [record.sha256 for record in corpus], "shard_rows": shard_rows}
        _prepare(partial, plan | parameters.as_dict())
        try:
            shards, resumed = _read_shards(paths, partial, parameters, shard_rows, tell)
        except ValueError:
            # A corpus with a broken line can never be finished as it is. The plan, which marks the
            # directory as ours, goes last.
            _clear(partial, keep=PLAN_FILE)
            _clear(partial)
            partial.rmdir()
            raise
        if [record.bytes for record in corpus] != [path.stat().st_size for path in paths]:
            raise RetrievalError("a corpus file changed while it was read; run the build again")
        _write_offsets(partial, shards)
        passages = _write_matrix(partial, shards, parameters, tell)
        manifest = _seal(partial, passages, parameters, corpus, tell)
        _publish(partial, output)
    return result(manifest, resumed=resumed)


# --- stages ---------------------------------------------------------------------------------------


def _read_shards(
    paths: list[Path], partial: Path, parameters: BM25Parameters, shard_rows: int, tell: Progress
) -> tuple[int, int]:
    """Write passages.jsonl and the shards; return how many there are and how many were there."""
    analyzer = Analyzer(parameters)
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
            if resumed == number and _shard_note(partial, number) == note and _size(text) >= end:
                resumed += 1
            else:
                text.seek(end - sum(map(len, lines)))
                text.truncate()
                text.writelines(lines)
                text.flush()
                os.fsync(text.fileno())
                _write_shard(partial, number, rows, lines, analyzer, note)
            number += 1
        text.truncate(end)
    if number == 0:
        raise ValueError(f"the corpus has no passage: {', '.join(map(str, paths))}")
    return number, resumed


def _write_shard(
    partial: Path,
    number: int,
    rows: list[Passage],
    lines: list[bytes],
    analyzer: Analyzer,
    note: dict[str, Any],
) -> None:
    shard = count_terms(map(indexed_text, rows), analyzer.words, analyzer.terms)
    shard.save(_shard_path(partial, number, "npz"))
    np.save(_shard_path(partial, number, "npy"), np.fromiter(map(len, lines), np.int64, len(lines)))
    for ending in ("npz", "npy"):
        _sync(_shard_path(partial, number, ending))
    _write_atomically(_shard_path(partial, number, "json"), json.dumps(note))  # last: the shard is whole


def _write_offsets(partial: Path, shards: int) -> None:
    lengths = np.concatenate([np.load(_shard_path(partial, number, "npy")) for number in range(shards)])
    np.save(partial / OFFSETS_FILE, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def _write_matrix(partial: Path, shards: int, parameters: BM25Parameters, tell: Progress) -> int:
    visits = 0

    def on_shard() -> None:
        nonlocal visits
        visits += 1
        tell("score", visits, 2 * shards)

    matrix = merge_shards(
        lambda number: Shard.load(_shard_path(partial, number, "npz")),
        shards,
        k1=parameters.k1,
        b=parameters.b,
        allocate=allocate_in(partial, MATRIX_FILES),
        on_shard=on_shard,
    )
    save_matrix_extras(matrix, parameters, partial)
    return matrix.passages  # the maps are written back when they go out of use here


def _seal(
    partial: Path, passages: int, parameters: BM25Parameters, corpus: tuple[FileRecord, ...], tell: Progress
) -> Manifest:
    """Flush every file to disk, then write the manifest over their hashes.

    The shards stay until then: whatever the moment of a kill, either they or the whole index are there.
    """
    for path in partial.iterdir():
        if path.name not in (*INDEX_FILES, PLAN_FILE, SHARDS):
            path.unlink()  # the temporary name of a manifest that was cut short
    files = [partial / name for name in INDEX_FILES]
    for path in files:
        _sync(path)
    manifest = Manifest(
        kind="bm25",
        passages=passages,
        parameters=parameters.as_dict(),
        corpus=corpus,
        files=_hash_all(files, "check", tell),
    )
    _write_atomically(partial / MANIFEST_FILE, manifest.as_json())
    return manifest


def _publish(partial: Path, output: Path) -> None:
    """Put the finished directory in its place; an index that is there moves aside first."""
    if (partial / SHARDS).exists():
        shutil.rmtree(partial / SHARDS)
    (partial / PLAN_FILE).unlink(missing_ok=True)
    old = output.with_name(output.name + ".old")
    if old.exists() and is_index(old):
        shutil.rmtree(old)
    if is_index(output):
        output.rename(old)
    partial.rename(output)
    _sync(output.parent)
    if old.exists() and is_index(old):
        shutil.rmtree(old)


# --- directories and files ------------------------------------------------------------------------


def _partial(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def check_output(output: Path) -> None:
    """Refuse to build where something else lies.

    Raises:
        RetrievalError: the directory, or the one with ``.partial``, holds something else than an index.
    """
    for directory, marker in ((output, MANIFEST_FILE), (_partial(output), PLAN_FILE)):
        if not directory.exists():
            continue
        if not directory.is_dir():
            raise RetrievalError(f"{directory} is a file; name another directory for the index")
        ours = is_index(directory) or (marker == PLAN_FILE and (directory / PLAN_FILE).is_file())
        if not ours and any(path.name != PLAN_FILE + ".tmp" for path in directory.iterdir()):
            raise RetrievalError(
                f"{directory} holds something that is not an index and is left alone; name another directory"
            )


def _finished(directory: Path, corpus: tuple[FileRecord, ...], parameters: BM25Parameters) -> Manifest | None:
    """The manifest of a whole index of just this corpus and these parameters, if it is one."""
    try:
        manifest = read_manifest(directory)
        check_files(directory, manifest, verify=False)
    except RetrievalError:
        return None
    wanted = (CREATED_BY, [record.sha256 for record in corpus], parameters.as_dict())
    return manifest if (manifest.created_by, manifest.corpus_hashes, manifest.parameters) == wanted else None


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold the partial directory for this process alone; the lock goes with the process."""
    partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RetrievalError(f"another build is writing {partial}; wait for it or stop it") from error
        yield
    finally:
        os.close(handle)


def _prepare(partial: Path, plan: dict[str, Any]) -> None:
    """Keep what an earlier build with the same plan left; clear away anything else of ours."""
    try:
        found = json.loads((partial / PLAN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found != plan:
        # An empty plan fits nothing: if the clearing is cut short, the next build clears again.
        _write_atomically(partial / PLAN_FILE, "{}")
        _clear(partial, keep=PLAN_FILE)
        _write_atomically(partial / PLAN_FILE, json.dumps(plan))
    (partial / MANIFEST_FILE).unlink(missing_ok=True)  # of an index that turned out to be damaged
    (partial / SHARDS).mkdir(exist_ok=True)


def _clear(directory: Path, keep: str = "") -> None:
    for path in directory.iterdir():
        if path.name == keep:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _shard_path(partial: Path, number: int, ending: str) -> Path:
    return partial / SHARDS / f"{number:05d}.{ending}"


def _shard_note(partial: Path, number: int) -> dict[str, Any] | None:
    path = _shard_path(partial, number, "json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _hash_all(paths: list[Path], stage: str, tell: Progress) -> tuple[FileRecord, ...]:
    total, done = sum(path.stat().st_size for path in paths), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        tell(stage, done, total)

    return tuple(file_record(path, on_bytes) for path in paths)


def _size(file: Any) -> int:
    return os.fstat(file.fileno()).st_size


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Make a file's contents, or a directory's names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
