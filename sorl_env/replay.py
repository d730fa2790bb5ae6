"""A recording of what an index found, so that an evaluation can be repeated without the index.

``Recording(path, index=…, retriever=…)`` asks the retriever and writes down each answer once; ``Recording(path,
index=…)`` without one plays back, and refuses a query it does not hold. The file is JSONL:

    {"schema": 1, "index": "<digest>", "about": {...}}
    {"passage": ["id", "title", "text"]}                 a passage, before the first answer that holds it
    {"query": "...", "top_k": 3, "hits": [["id", 12.5], ...]}

Every answer is on disk before it is handed out; a last line that a crash cut is dropped. An answer of the file is
never asked for again, so a recording also serves as a cache.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval_index.types import Hit, Passage, Retriever

SCHEMA = 1


class NotRecorded(ValueError):
    """A query that the recording does not hold, and no index to ask."""


class Recording:
    """A Retriever over a file of recorded answers. Safe to use from several threads.

    Args:
        path: the file; made if there is a retriever to fill it.
        index: digest of the index that answers; None, without a retriever only: whatever the file says.
        about: what else is to be known of the index, written into a new file; read back as ``about``.
        retriever: asked what the file does not hold.

    Raises ValueError for a file that is damaged or of another index, FileNotFoundError for one that is missing
    and cannot be made.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        index: str | None = None,
        about: Mapping[str, Any] | None = None,
        retriever: Retriever | None = None,
    ) -> None:
        if retriever is not None and not index:
            raise ValueError("a recording needs the digest of the index that it records; give index=")
        self.path, self.retriever = Path(path), retriever
        self.about: dict[str, Any] = dict(about or {})
        self._passages: dict[str, Passage] = {}
        self._answers: dict[tuple[str, int], list[Hit]] = {}
        self._lock = threading.Lock()
        if self.path.exists() and self.path.stat().st_size:
            self.index = self._load(index)
        elif retriever is None:
            raise FileNotFoundError(f"recording {self.path} does not exist; make it with an index first")
        else:
            assert index is not None
            self.index = index
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append([{"schema": SCHEMA, "index": index, "about": self.about}])

    def __len__(self) -> int:
        return len(self._answers)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """As the index answered. Raises NotRecorded for a query that nobody can answer."""
        texts = [str(query) for query in queries]
        with self._lock:
            missing = [text for text in dict.fromkeys(texts) if (text, top_k) not in self._answers]
            if missing:
                self._fill(missing, top_k)
            return [list(self._answers[text, top_k]) for text in texts]

    def _fill(self, queries: list[str], top_k: int) -> None:
        if self.retriever is None:
            raise NotRecorded(
                f"recording {self.path} holds no answer to {queries[0]!r} (top_k {top_k}); it was made with another "
                "model, prompt or limit: record it again with the index"
            )
        found = self.retriever.search(queries, top_k)
        if len(found) != len(queries):
            raise ValueError(f"the retriever gave {len(found)} results for {len(queries)} queries")
        lines: list[dict[str, Any]] = []
        new: dict[str, Passage] = {}
        for query, hits in zip(queries, found, strict=True):
            for hit in hits:
                known = self._passages.get(hit.passage.id) or new.get(hit.passage.id)
                if known is None:
                    known = new[hit.passage.id] = hit.passage
                    lines.append({"passage": [known.id, known.title, known.text]})
                elif known != hit.passage:
                    raise ValueError(f"passage {known.id!r} is not what the recording {self.path} holds; start it anew")
            score = [[hit.passage.id, float(hit.score)] for hit in hits]
            lines.append({"query": query, "top_k": top_k, "hits": score})
        self._append(lines)
        self._passages |= new
        for query, hits in zip(queries, found, strict=True):
            self._answers[query, top_k] = [Hit(self._passages[hit.passage.id], float(hit.score)) for hit in hits]

    def _append(self, lines: list[dict[str, Any]]) -> None:
        with self.path.open("ab") as file:
            file.write("".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def _load(self, index: str | None) -> str:
        raw = self.path.read_bytes()
        whole = raw.rfind(b"\n") + 1  # what stands behind the last line end was cut by a crash
        lines = raw[:whole].split(b"\n")[:-1]
        try:
            head = json.loads(lines[0])
            schema, recorded, about = head["schema"], str(head["index"]), dict(head.get("about") or {})
        except (IndexError, ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} is no recording of searches (its first line says nothing of it)") from None
        if schema != SCHEMA:
            raise ValueError(f"{self.path} has recording format {schema}, this version reads {SCHEMA}; record it again")
        if index is not None and recorded != index:
            raise ValueError(
                f"{self.path} was recorded with index {recorded[:12]}, this index is {index[:12]}; "
                "use the same index or another recording"
            )
        self.about = about
        for number, line in enumerate(lines[1:], start=2):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: damaged ({error!r}); record it again") from None
        if whole < len(raw) and self.retriever is not None:
            with self.path.open("r+b") as file:
                file.truncate(whole)
        return recorded

    def _take(self, row: dict[str, Any]) -> None:
        if "passage" in row:
            passage = Passage(*row["passage"])
            self._passages[passage.id] = passage
            return
        hits = [Hit(self._passages[one], float(score)) for one, score in row["hits"]]
        self._answers[row["query"], int(row["top_k"])] = hits
