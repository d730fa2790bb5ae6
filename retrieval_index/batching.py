"""Put the queries of many callers into common batches, without making anybody wait for company.

One batch is searched at a time (a search uses the processor fully); what arrives meanwhile makes the
next batch. A lone query is searched at once; under load batches grow by themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from retrieval_index.types import Hit, RetrievalError, Retriever

OnBatch = Callable[[int, float], None]  # receives the number of queries and the seconds of each batch


Answer = tuple[list[list[Hit]], str]  # and the version of the index that gave it


class Overloaded(RetrievalError):
    """More queries are waiting than are allowed to; try again later."""


@dataclass(slots=True)
class _Waiting:
    queries: list[str]
    top_k: int
    answer: asyncio.Future[Answer]
    deadline: float  # of time.monotonic()


class Batcher:
    """Searches for many callers. All methods belong to one event loop."""

    def __init__(
        self,
        retriever: Retriever,
        version: str = "",
        *,
        batch_queries: int = 256,
        pending_queries: int = 32_768,
        timeout_s: float = 30.0,
        cache_entries: int = 20_000,
        on_batch: OnBatch = lambda _size, _seconds: None,
    ) -> None:
        """Start no work yet; `run` does.

        Args:
            version: name of the index, given back with its answers.
            batch_queries: a batch closes at this size (one request that is larger is still one batch).
            pending_queries: waiting queries above which new requests are refused with `Overloaded`.
            timeout_s: how long a request may wait for its turn.
            cache_entries: answers kept for queries that come again; 0 keeps none.
        """
        self.cache_hits = 0
        self._retriever, self._version = retriever, version
        self._batch_queries, self._pending_queries, self._timeout_s = (
            batch_queries,
            pending_queries,
            timeout_s,
        )
        self._on_batch = on_batch
        self._cache: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self._cache_entries = cache_entries
        self._waiting: deque[_Waiting] = deque()
        self._searched: list[_Waiting] = []  # the batch that is with the index now
        self._pending = 0
        self._arrived = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="search")

    @property
    def pending(self) -> int:
        """Queries that wait for their turn."""
        return self._pending

    def swap(self, retriever: Retriever, version: str) -> None:
        """Answer from another index from the next batch on; the running batch ends on the old one."""
        self._retriever, self._version = retriever, version
        self._cache.clear()

    async def search(self, queries: Sequence[str], top_k: int) -> Answer:
        """Answer one caller, from one version of the index.

        Raises:
            Overloaded: too many queries are waiting, or this one waited too long.
            RetrievalError: the search itself failed.
        """
        version = self._version
        known = [self._recall(query, top_k) for query in queries]
        missing = [query for query, hits in zip(queries, known, strict=True) if hits is None]
        if not missing:
            return [hits for hits in known if hits is not None], version
        answers, found_version = await self._wait_for(missing, top_k)
        if found_version != version and len(missing) < len(queries):
            return await self._wait_for(list(queries), top_k)  # the index was swapped: mix nothing
        found = iter(answers)
        return [next(found) if hits is None else hits for hits in known], found_version

    async def _wait_for(self, queries: list[str], top_k: int) -> Answer:
        if self._pending + len(queries) > self._pending_queries:
            raise Overloaded(f"{self._pending} queries are waiting, {self._pending_queries} at most may; try again")
        request = _Waiting(
            queries, top_k, asyncio.get_running_loop().create_future(), time.monotonic() + self._timeout_s
        )
        self._waiting.append(request)
        self._pending += len(queries)
        self._arrived.set()
        return await request.answer

    async def run(self) -> None:
        """Search batch after batch, until cancelled; what then waits is answered with an error."""
        try:
            while True:
                await self._arrived.wait()
                self._searched = self._next_batch()
                if self._searched:
                    await self._answer(self._searched)
        finally:
            for request in (*self._searched, *self._waiting):
                if not request.answer.done():
                    request.answer.set_exception(Overloaded("the server is stopping"))
            self._waiting.clear()
            self._pending = 0
            self._pool.shutdown(wait=False)

    def _next_batch(self) -> list[_Waiting]:
        """Requests of one top_k, oldest first; those that were given up or waited too long fall out.

        One top_k, because a wrapper (fusion, reranking) may rank otherwise for another depth.
        """
        batch: list[_Waiting] = []
        left: deque[_Waiting] = deque()
        size, now = 0, time.monotonic()
        for request in self._waiting:
            if request.answer.done():  # the caller went away
                self._pending -= len(request.queries)
            elif request.deadline < now:
                self._pending -= len(request.queries)
                request.answer.set_exception(Overloaded(f"waited longer than {self._timeout_s:g} s; try again"))
            elif batch and (request.top_k != batch[0].top_k or size + len(request.queries) > self._batch_queries):
                left.append(request)
            else:
                batch.append(request)
                size += len(request.queries)
                self._pending -= len(request.queries)
        self._waiting = left
        if not left:
            self._arrived.clear()
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        retriever, version, started = self._retriever, self._version, time.monotonic()
        # A group of episodes asks the same first question: each text is searched once.
        queries = list(dict.fromkeys(query for request in batch for query in request.queries))
        try:
            answers = await self._search(retriever, queries, batch[0].top_k)
        except RetrievalError as error:
            if len(batch) == 1:
                if not batch[0].answer.done():
                    batch[0].answer.set_exception(error)
                return
            for request in batch:  # one caller's query must not cost the others their answers
                await self._answer([request])
            return
        self._on_batch(len(queries), time.monotonic() - started)
        if retriever is self._retriever:
            self._remember(batch[0].top_k, queries, answers)
        found = dict(zip(queries, answers, strict=True))
        for request in batch:
            if not request.answer.done():
                request.answer.set_result(([found[query] for query in request.queries], version))

    async def _search(self, retriever: Retriever, queries: list[str], top_k: int) -> list[list[Hit]]:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._pool, retriever.search, queries, top_k)
        except RetrievalError:
            raise
        except Exception as error:  # whatever an index throws, its callers get an answer and the loop goes on
            raise RetrievalError(f"the search failed: {error!r}") from error
        if len(answers) != len(queries):
            raise RetrievalError(f"the index answered {len(answers)} of {len(queries)} queries")
        return answers

    def _recall(self, query: str, top_k: int) -> list[Hit] | None:
        hits = self._cache.get((query, top_k))
        if hits is not None:
            self._cache.move_to_end((query, top_k))
            self.cache_hits += 1
        return hits

    def _remember(self, top_k: int, queries: list[str], answers: list[list[Hit]]) -> None:
        if not self._cache_entries:
            return
        for query, hits in zip(queries, answers, strict=True):
            self._cache[query, top_k] = hits
        while len(self._cache) > self._cache_entries:
            self._cache.popitem(last=False)
