"""Keep passages on disk and fetch single ones through a memory map.

Two files: ``passages.jsonl``, one JSON array ``[id, title, text]`` a line, and
``passages.offsets.npy``, int64 (N + 1,): where each line begins, and the end of the last. Opening
reads neither; 21 million passages cost no memory but the pages that are looked at.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from retrieval_index.fast_json import loads
from retrieval_index.types import Passage, RetrievalError

TEXT_FILE = "passages.jsonl"
OFFSETS_FILE = "passages.offsets.npy"
RECENT = 8192  # passages kept decoded, some 10 MB


def encode_passage(passage: Passage) -> bytes:
    """One line of ``passages.jsonl``."""
    row = [passage.id, passage.title, passage.text]
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"


def decode_passage(line: bytes) -> Passage:
    """The passage that `encode_passage` wrote."""
    return Passage(*loads(line))


class PassageStore:
    """Read-only sequence of the passages in a directory."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Open ``passages.jsonl`` and its offsets.

        Raises:
            RetrievalError: the two files do not fit together.
        """
        path = Path(directory) / TEXT_FILE
        # A plain array over the map: indexing a np.memmap costs several times as much.
        self._offsets = np.asarray(np.load(path.with_name(OFFSETS_FILE), mmap_mode="r", allow_pickle=False))
        size = path.stat().st_size
        if self._offsets.ndim != 1 or len(self._offsets) == 0 or int(self._offsets[-1]) != size:
            end = int(self._offsets[-1]) if self._offsets.size else 0
            raise RetrievalError(f"{path} has {size} bytes, its offsets end at {end}; build the index again")
        with path.open("rb") as file:  # the map outlives the file object; an empty file cannot be mapped
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        self._recent = lru_cache(maxsize=RECENT)(self._read)  # the same passages are found again and again

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < len(self):
            raise IndexError(f"passage {row} of {len(self)}")
        return self._read(row)

    def fetch(self, rows: Sequence[int]) -> dict[int, Passage]:
        """Several passages at once, as a search found them; each decoded once."""
        return {row: self._recent(row) for row in set(rows)}

    def _read(self, row: int) -> Passage:
        return decode_passage(self._text[int(self._offsets[row]) : int(self._offsets[row + 1])])


class PassageList:
    """The same for passages that are in memory anyway."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._passages = list(passages)

    def __len__(self) -> int:
        return len(self._passages)

    def __getitem__(self, row: int) -> Passage:
        return self._passages[row]

    def fetch(self, rows: Sequence[int]) -> dict[int, Passage]:
        """Several passages at once."""
        return {row: self._passages[row] for row in rows}
