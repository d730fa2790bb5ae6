from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="fastapi is not installed")

from retrieval_index import RetrievalError, build_bm25, open_index
from retrieval_index.client import RetrieverClient
from retrieval_index.server import ServerSettings, create_app, index_opener
from retrieval_index.wire import Limits
from tests.retrieval_index.serving import Calls, EchoRetriever, running, until_ready, with_app

ROOT = Path(__file__).resolve().parents[2]


def ask(app: Any, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
    async def work(call: Calls) -> tuple[int, dict[str, str], Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, found, content = await call("POST", "/retrieve", raw, headers)
        return status, found, json.loads(content)

    return with_app(app, work)


def get(app: Any, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    return with_app(app, lambda call: call("GET", path, b"", headers))


def app_of(echo: EchoRetriever | None = None, **settings_: Any) -> Any:
    return create_app((echo or EchoRetriever()).open, ServerSettings(**settings_))


def test_a_search_is_answered() -> None:
    status, headers, answer = ask(app_of(), {"queries": ["a", "b"], "topk": 1, "return_scores": True})
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert headers["x-index-version"] == "v1"
    document = {"id": "v1-0", "contents": '"Title"\na', "title": "Title", "text": "a"}
    assert answer["result"][0] == [{"document": document, "score": 1.0}]
    assert len(answer["result"]) == 2
    _, _, bare = ask(app_of(), {"query": "a", "k": 1})
    assert bare == {"result": [[document]]}


def test_bad_input_is_422_with_the_field() -> None:
    status, _, answer = ask(app_of(), {"queries": ["a", 3]})
    assert (status, answer["field"]) == (422, "queries[1]")
    status, _, answer = ask(app_of(limits=Limits(body_bytes=100)), b" " * 101)
    assert (status, answer["field"]) == (422, "body")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["queries", "query", "topk", "top_k", "top_n", "k", "return_scores", "other"])
BODY = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())
BODY |= st.dictionaries(NAMES, JSON | st.lists(st.text(max_size=5), max_size=3) | st.integers(-2, 9), max_size=4).map(
    lambda value: json.dumps(value).encode()
)


@pytest.mark.slow
def test_no_body_whatever_gets_another_answer_than_200_or_422() -> None:
    seen: dict[int, int] = {}
    app = app_of()
    call = Calls(app)
    with asyncio.Runner() as runner:
        life = app.router.lifespan_context(app)
        runner.run(life.__aenter__())
        runner.run(until_ready(call))

        @settings(max_examples=2000, deadline=None)
        @given(BODY)
        def post(body: bytes) -> None:
            status, _, content = runner.run(call("POST", "/retrieve", body))
            seen[status] = seen.get(status, 0) + 1
            assert status in (200, 422)
            assert ("field" in json.loads(content)) == (status == 422)

        post()
        runner.run(life.__aexit__(None, None, None))
    assert seen[422] > 800
    assert seen[200] > 20


def test_not_ready_is_503_until_the_index_is_there() -> None:
    gate = threading.Event()

    def slow() -> Any:
        assert gate.wait(20)
        return EchoRetriever().open()

    async def work(call: Calls) -> list[int]:
        statuses = [(await call("GET", path))[0] for path in ("/health", "/ready", "/info", "/metrics")]
        status, headers, _ = await call("POST", "/retrieve", b'{"queries": ["a"]}')
        assert headers["retry-after"] == "1"
        gate.set()
        while (await call("GET", "/ready"))[0] != 200:
            await asyncio.sleep(0.005)
        return [*statuses, status, (await call("POST", "/retrieve", b'{"queries": ["a"]}'))[0]]

    assert with_app(create_app(slow), work, ready=False) == [200, 503, 503, 200, 503, 200]


def test_an_index_that_cannot_be_opened_says_why() -> None:
    def broken() -> Any:
        raise RetrievalError("passages.jsonl is missing")

    app = create_app(broken)

    async def work(call: Calls) -> bytes:
        while app.state.failed() is None:
            await asyncio.sleep(0.005)
        status, _, content = await call("GET", "/ready")
        assert status == 503
        return content

    assert b"passages.jsonl is missing" in with_app(app, work, ready=False)


@pytest.mark.parametrize("error", [RuntimeError("re-ranking needs it"), KeyError("depth")])
def test_whatever_keeps_an_index_from_opening_is_told(error: Exception) -> None:
    def broken() -> Any:
        raise error

    app = create_app(broken)

    async def work(call: Calls) -> bytes:
        while app.state.failed() is None:
            await asyncio.sleep(0.005)
        return (await call("GET", "/ready"))[2]

    told = json.loads(with_app(app, work, ready=False))["error"]
    assert told == ("re-ranking needs it" if isinstance(error, RuntimeError) else "KeyError: 'depth'")


def test_a_swap_that_fails_for_whatever_reason_keeps_the_old_index() -> None:
    faults: list[Exception] = []

    def open_it() -> Any:
        if faults:
            raise faults[0]
        return EchoRetriever().open()

    app = create_app(open_it)

    async def work(call: Calls) -> int:
        faults.append(KeyError("kind"))
        assert await asyncio.wrap_future(app.state.swap_soon()) is None
        return (await call("POST", "/retrieve", b'{"queries": ["a"]}'))[0]

    assert with_app(app, work) == 200


def test_below_the_path_of_another_application_it_answers_the_same() -> None:
    # In ASGI the path holds the prefix and root_path names it.
    body, refused = b'{"queries": ["a"], "topk": 1}', b'{"queries": [1]}'

    async def work(call: Calls) -> list[Any]:
        below = Calls(call.app, root_path="/search")
        assert await below("POST", "/search/retrieve", body) == await call("POST", "/retrieve", body)
        asked = [("POST", "retrieve", refused), ("GET", "retrieve", b""), ("GET", "ready", b""), ("POST", "other", b"")]
        return [(await below(method, f"/search/{path}", sent))[0] for method, path, sent in asked]

    assert with_app(app_of(), work) == [422, 405, 200, 404]
    assert with_app(app_of(token="secret"), lambda call: call("POST", "/retrieve", body))[0] == 401


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_not_allowed(method: str) -> None:
    status, headers, _ = with_app(app_of(), lambda call: call(method, "/retrieve"))
    assert (status, headers["allow"]) == (405, "POST")


def test_a_request_that_a_stop_cuts_off_is_503() -> None:
    gate = threading.Event()

    async def work(call: Calls) -> tuple[int, str]:
        task = asyncio.ensure_future(call("POST", "/retrieve", b'{"queries": ["a"]}'))
        while not echo.batches:
            await asyncio.sleep(0.005)
        task.cancel()
        status, headers, _ = await task
        gate.set()
        return status, headers["retry-after"]

    echo = EchoRetriever(gate=gate)
    assert with_app(app_of(echo), work) == (503, "1")


@pytest.mark.parametrize("trouble", ["fail", "crash"])
def test_a_search_that_fails_is_503_and_nobody_elses_problem(trouble: str) -> None:
    async def work(call: Calls) -> list[int]:
        bodies = [json.dumps({"queries": [text]}).encode() for text in ("a", trouble, "b")]
        answers = await asyncio.gather(*(call("POST", "/retrieve", body) for body in bodies))
        assert "retry-after" in answers[1][1]
        return [status for status, _, _ in answers]

    assert with_app(app_of(), work) == [200, 503, 200]


def test_overload_is_429_and_the_rest_is_answered() -> None:
    async def work(call: Calls) -> list[int]:
        bodies = [json.dumps({"queries": [f"q{n}"]}).encode() for n in range(20)]
        answers = await asyncio.gather(*(call("POST", "/retrieve", body) for body in bodies))
        assert all("retry-after" in headers for status, headers, _ in answers if status == 429)
        return [status for status, _, _ in answers]

    statuses = with_app(app_of(EchoRetriever(seconds=0.01), pending_queries=8), work)
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 8


def test_a_token_is_asked_for_where_one_is_set() -> None:
    app = app_of(token="sesame")
    body = {"queries": ["a"]}
    assert ask(app, body)[0] == 401
    assert ask(app, body, {"Authorization": "Bearer wrong"})[0] == 401
    assert ask(app, body, {"Authorization": "Bearer s\u00e9same"})[0] == 401
    assert ask(app, body, {"Authorization": "Bearer sesame"})[0] == 200
    assert get(app, "/info")[0] == get(app, "/metrics")[0] == 401
    assert get(app, "/ready")[0] == get(app, "/health")[0] == 200


def test_metrics_count_what_happened() -> None:
    async def work(call: Calls) -> str:
        for body in (b'{"queries": ["a", "b"]}', b'{"queries": ["a"]}', b"nonsense"):
            await call("POST", "/retrieve", body)
        return (await call("GET", "/metrics"))[2].decode()

    lines = with_app(app_of(), work).splitlines()
    for line in (
        'retrieval_requests_total{status="200"} 2',
        'retrieval_requests_total{status="422"} 1',
        "retrieval_queries_total 3",
        "retrieval_cache_hits 1",
        "retrieval_ready 1",
        'retrieval_batch_queries_bucket{le="1"} 0',
        'retrieval_batch_queries_bucket{le="2"} 1',
        'retrieval_batch_queries_bucket{le="+Inf"} 1',
        "retrieval_request_seconds_count 3",
    ):
        assert line in lines, line


def test_info_is_the_manifest_with_a_version(tmp_path: Path, write_corpus) -> None:
    index = build_bm25(write_corpus(["red kite", "blue sea"]), tmp_path / "index").path
    status, _, content = get(create_app(index_opener(index)), "/info")
    info = json.loads(content)
    assert status == 200
    assert (info["kind"], info["passages"], info["parameters"]["k1"]) == ("bm25", 2, 1.5)
    assert info["manifest"] == json.loads((index / "manifest.json").read_text())
    assert len(info["version"]) == 16


def test_an_index_is_swapped_without_dropping_a_request(tmp_path: Path, write_corpus) -> None:
    build_bm25(write_corpus(["red kite"]), tmp_path / "index")
    app = create_app(index_opener(tmp_path / "index"))
    with running(app) as url, RetrieverClient(url, cache_entries=0, allow_swap=True, retries=0) as client:
        client_ready(client)
        assert client.search(["red"], 3)[0][0].passage.text == "red kite"
        first, stop, failures, answers = client.version, threading.Event(), [], []

        def hammer() -> None:
            while not stop.is_set():
                try:
                    answers.append(client.search(["red"], 3)[0][0].passage.text)
                except RetrievalError as error:
                    failures.append(error)

        threads = [threading.Thread(target=hammer) for _ in range(4)]
        for thread in threads:
            thread.start()
        build_bm25(write_corpus(["red deer", "blue"]), tmp_path / "index")
        app.state.swap_soon()
        deadline = time.monotonic() + 20
        while (not answers or answers[-1] != "red deer") and time.monotonic() < deadline:
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert answers[-1] == "red deer"
        assert set(answers) == {"red kite", "red deer"}
        assert client.version != first


def client_ready(client: RetrieverClient) -> None:
    client.wait_until_ready(20, poll_s=0.02)


def test_http_gives_the_hits_of_the_index_itself(tmp_path: Path, write_corpus) -> None:
    texts = [f"passage {n} speaks of kite{n % 7} and deer{n % 11}" for n in range(70)]
    index = build_bm25(write_corpus(texts), tmp_path / "index").path
    queries = [f"kite{n % 9} deer{n % 5}" for n in range(40)] + ["", "unknownword", "the"]
    with running(create_app(index_opener(index))) as url, RetrieverClient(url, batch_queries=7) as client:
        client_ready(client)
        assert client.search(queries, 5) == open_index(index).search(queries, 5)
        assert client.info()["passages"] == 70


def test_broken_connections_leave_the_server_well() -> None:
    with running(app_of(body_timeout_s=0.3)) as url, RetrieverClient(url) as client:
        client_ready(client)
        host, port = url.removeprefix("http://").split(":")
        head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n"
        for start in (b"", b"nonsense\r\n\r\n", head[:30], head, head + b'{"queries": ["a'):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(start)
        with socket.create_connection((host, int(port))) as connection:  # stays open and sends nothing more
            connection.sendall(head)
            assert b" 422 " in connection.recv(1000)
        assert client.search(["a"], 1)[0][0].passage.text == "a"


def start_script(index: Path, port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "serve_index.py", index, "--port", str(port)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def served(tmp_path: Path, write_corpus):
    """scripts/serve_index.py in a process of its own; gives process, URL and index."""
    index = build_bm25(write_corpus(["red kite", "blue sea"]), tmp_path / "index").path
    port = free_port()
    process = start_script(index, port)
    yield process, f"http://127.0.0.1:{port}", index
    process.kill()
    process.wait()


@pytest.mark.slow
def test_kills_of_the_server_lose_and_change_nothing(tmp_path: Path, write_corpus) -> None:
    texts = [f"passage {n} speaks of kite{n % 97} and deer{n % 89}" for n in range(500)]
    index = build_bm25(write_corpus(texts), tmp_path / "index").path
    batches = [[f"kite{(n * 20 + m) % 97} deer{(n * 7 + m) % 89}" for m in range(20)] for n in range(500)]
    port, stop, kills = free_port(), threading.Event(), []

    def keep_killing() -> None:
        process = start_script(index, port)
        while not stop.wait(0.4 if process.poll() is None and answered(port) else 0.02):
            if len(kills) < 4 and answered(port):
                process.kill()
                process.wait()
                kills.append(time.monotonic())
                process = start_script(index, port)
        process.kill()
        process.wait()

    killer = threading.Thread(target=keep_killing)
    killer.start()
    try:
        with RetrieverClient(f"http://127.0.0.1:{port}", cache_entries=0, retries=40, max_backoff_s=0.5) as client:
            client.wait_until_ready(60, poll_s=0.1)
            found = []
            for batch in batches:
                found.append(client.search(batch, 3))
                time.sleep(0.005)
    finally:
        stop.set()
        killer.join()
    own = open_index(index)
    assert found == [own.search(batch, 3) for batch in batches]  # 10,000 queries
    assert len(kills) >= 3


def answered(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_script_serves_swaps_and_stops(served, write_corpus) -> None:
    process, url, index = served
    with RetrieverClient(url, cache_entries=0) as client:
        client.wait_until_ready(30, poll_s=0.05)
        assert client.search(["red"], 1)[0][0].passage.text == "red kite"
        build_bm25(write_corpus(["red deer"]), index)
        process.send_signal(signal.SIGHUP)
        with pytest.raises(RetrievalError, match="serves another index than before"):
            for _ in range(400):
                client.search(["red"], 1)
                time.sleep(0.02)
    process.terminate()
    assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()


def test_the_script_refuses_a_wrong_index(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "serve_index.py", tmp_path / "nowhere"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "there is no index at" in done.stderr
    assert "Traceback" not in done.stderr
