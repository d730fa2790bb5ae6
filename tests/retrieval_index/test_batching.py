from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from retrieval_index import RetrievalError
from retrieval_index.batching import Batcher, Overloaded
from tests.retrieval_index.serving import EchoRetriever


def run(batcher: Callable[[], Batcher], work: Callable[[Batcher], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        own = batcher()
        task = asyncio.create_task(own.run())
        try:
            return await asyncio.wait_for(work(own), 20)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(main())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_what_arrives_during_a_search_makes_the_next_batch() -> None:
    gate = threading.Event()
    echo = EchoRetriever(gate=gate)

    async def work(batcher: Batcher) -> list:
        first = asyncio.create_task(batcher.search(["a"], 1))
        await _until(lambda: echo.batches == [["a"]])
        rest = [asyncio.create_task(batcher.search([text, "shared"], 1)) for text in "bcd"]
        other = asyncio.create_task(batcher.search(["deep"], 2))
        await _until(lambda: batcher.pending == 7)
        gate.set()
        return await asyncio.gather(first, *rest, other)

    answers = run(lambda: Batcher(echo, "v"), work)
    assert echo.batches == [["a"], ["b", "shared", "c", "d"], ["deep"]]
    texts = [[own[0].passage.text for own in found] for found, _ in answers]
    assert texts == [["a"], ["b", "shared"], ["c", "shared"], ["d", "shared"], ["deep"]]
    assert [len(own) for own in answers[4][0]] == [2]
    assert {version for _, version in answers} == {"v"}


def test_a_batch_closes_at_its_size() -> None:
    gate = threading.Event()
    echo = EchoRetriever(gate=gate)

    async def work(batcher: Batcher) -> None:
        tasks = [asyncio.create_task(batcher.search([f"q{n}", f"r{n}"], 1)) for n in range(4)]
        tasks.append(asyncio.create_task(batcher.search([f"big{n}" for n in range(9)], 1)))
        await _until(lambda: bool(echo.batches))
        gate.set()
        await asyncio.gather(*tasks)

    run(lambda: Batcher(echo, batch_queries=4), work)
    assert [len(batch) for batch in echo.batches] == [4, 4, 9]


def test_too_many_waiting_queries_are_refused_at_once() -> None:
    gate = threading.Event()

    async def work(batcher: Batcher) -> list:
        tasks = [asyncio.create_task(batcher.search([f"q{n}"], 1)) for n in range(6)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = run(lambda: Batcher(EchoRetriever(gate=gate), pending_queries=3), work)
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert 2 <= len(refused) <= 3  # the first may already be in the search when the last arrive


def test_a_query_that_waited_too_long_is_refused() -> None:
    async def work(batcher: Batcher) -> Any:
        first = asyncio.create_task(batcher.search(["slow"], 1))
        await asyncio.sleep(0.05)
        late = asyncio.create_task(batcher.search(["late"], 1))
        return await asyncio.gather(first, late, return_exceptions=True)

    answers = run(lambda: Batcher(EchoRetriever(seconds=0.3), timeout_s=0.1), work)
    assert answers[0][0][0][0].passage.text == "slow"
    assert isinstance(answers[1], Overloaded)
    assert "longer than 0.1 s" in str(answers[1])


@pytest.mark.parametrize("trouble", ["fail", "crash"])
def test_one_callers_query_does_not_cost_the_others_their_answers(trouble: str) -> None:
    gate = threading.Event()
    echo = EchoRetriever(gate=gate)

    async def work(batcher: Batcher) -> list:
        tasks = [asyncio.create_task(batcher.search([text], 1)) for text in ("first", "b", trouble, "c")]
        await _until(lambda: bool(echo.batches))
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = run(lambda: Batcher(echo), work)
    assert isinstance(answers[2], RetrievalError)
    assert not isinstance(answers[2], Overloaded)
    assert [answers[n][0][0][0].passage.text for n in (0, 1, 3)] == ["first", "b", "c"]


def test_answers_are_cached_by_query_and_depth() -> None:
    echo = EchoRetriever()

    async def work(batcher: Batcher) -> None:
        first = await batcher.search(["a", "b"], 1)
        assert await batcher.search(["b", "a"], 1) == ([first[0][1], first[0][0]], first[1])
        await batcher.search(["a", "c"], 1)
        await batcher.search(["a"], 2)
        assert batcher.cache_hits == 3

    run(lambda: Batcher(echo), work)
    assert echo.batches == [["a", "b"], ["c"], ["a"]]


@pytest.mark.parametrize(("entries", "batches"), [(0, 4), (1, 4), (2, 2)])
def test_the_cache_is_bounded_and_may_be_off(entries: int, batches: int) -> None:
    echo = EchoRetriever()

    async def work(batcher: Batcher) -> None:
        for text in ("a", "b", "a", "b"):
            await batcher.search([text], 1)

    run(lambda: Batcher(echo, cache_entries=entries), work)
    assert len(echo.batches) == batches


def test_a_swap_drops_nothing_and_mixes_nothing() -> None:
    gate = threading.Event()
    old, new = EchoRetriever("old", gate=gate), EchoRetriever("new")

    async def work(batcher: Batcher) -> list:
        gate.set()
        await batcher.search(["cached"], 1)
        gate.clear()
        running = asyncio.create_task(batcher.search(["running"], 1))
        await _until(lambda: ["running"] in old.batches)
        waiting = asyncio.create_task(batcher.search(["cached", "waiting"], 1))
        await asyncio.sleep(0.01)
        batcher.swap(new, "new")
        gate.set()
        return [*await asyncio.gather(running, waiting), await batcher.search(["cached"], 1)]

    answers = run(lambda: Batcher(old, "old"), work)
    found = [([own[0].passage.id for own in hits], version) for hits, version in answers]
    assert found == [(["old-0"], "old"), (["new-0", "new-0"], "new"), (["new-0"], "new")]


def test_stopping_answers_those_who_wait() -> None:
    async def main() -> list:
        gate = threading.Event()
        batcher = Batcher(EchoRetriever(gate=gate))
        task = asyncio.create_task(batcher.run())
        waiting = [asyncio.create_task(batcher.search([text], 1)) for text in "ab"]
        await asyncio.sleep(0.02)
        late = asyncio.create_task(batcher.search(["late"], 1))
        await asyncio.sleep(0.02)
        task.cancel()
        gate.set()
        return await asyncio.wait_for(asyncio.gather(*waiting, late, return_exceptions=True), 5)

    assert [type(answer) for answer in asyncio.run(main())] == [Overloaded] * 3
