from __future__ import annotations

import json
import multiprocessing
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from retrieval_index import Hit, Passage, RetrievalError, Retriever
from retrieval_index.client import RetrieverClient
from retrieval_index.wire import render_answer

HIT = Hit(Passage("7", "Lima", "is a city"), 0.5)
Reply = Callable[[socket.socket], None]


def http(
    content: bytes = b"", status: str = "200 OK", length: int | None = None, version: str = "v1", **headers: str
) -> Reply:
    """A reply that keeps the connection open."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content) if length is None else length}"]
    lines += [f"X-Index-Version: {version}"] if version else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return lambda connection: connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise ConnectionAbortedError  # the server closes, and without lingering that is a reset


def hang_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def then_hang_up(reply: Reply) -> Reply:
    def both(connection: socket.socket) -> None:
        reply(connection)
        hang_up(connection)

    return both


def drip(connection: socket.socket) -> None:
    """An answer that would take minutes."""
    http(length=100)(connection)
    try:
        for _ in range(100):
            connection.sendall(b" ")
            time.sleep(0.05)
    except OSError:
        return


def answer(*answers: list[Hit], **options: str) -> Reply:
    return http(render_answer(answers, True), **options)


class Server:
    """Gives one scripted reply to each request, over real sockets; keeps what was asked."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = list(replies)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[dict] = []
        self.headers: list[str] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            while self._read(file) and self._replies:
                try:
                    self._replies.pop(0)(connection)
                except OSError:
                    return

    def _read(self, file) -> bool:
        try:
            head = []
            while (line := file.readline()).strip():
                head.append(line.decode().strip())
        except OSError:
            return False
        if not head:
            return False
        lengths = [int(line.split(":")[1]) for line in head if line.lower().startswith("content-length")]
        body = file.read(lengths[0]) if lengths else b"null"
        self.headers.append("\n".join(head))
        self.requests.append(json.loads(body))
        return True

    def close(self) -> None:
        self._listener.close()


@contextmanager
def serving(*replies: Reply) -> Iterator[Server]:
    server = Server(replies)
    try:
        yield server
    finally:
        server.close()


def client_of(server: Server, **options) -> RetrieverClient:
    waits: list[float] = []
    client = RetrieverClient(server.url, **{"timeout_s": 0.5, "sleep": waits.append, "seed": 1} | options)
    client.waits = waits  # type: ignore[attr-defined]
    return client


def test_a_search_over_http() -> None:
    with serving(answer([HIT], [])) as server, client_of(server, token="sesame") as client:
        assert isinstance(client, Retriever)
        assert client.search(["lima", "nothing"], 3) == [[HIT], []]
        assert server.requests == [{"queries": ["lima", "nothing"], "topk": 3, "return_scores": True}]
        assert "Authorization: Bearer sesame" in server.headers[0]
        assert client.version == "v1"


def test_connections_are_kept() -> None:
    with serving(*[answer([HIT])] * 5) as server, client_of(server, cache_entries=0) as client:
        for _ in range(5):
            client.search(["a"], 1)
        assert server.connections == 1


def test_answers_are_cached_and_repeated_queries_asked_once() -> None:
    with serving(answer([HIT], []), answer([])) as server, client_of(server) as client:
        assert client.search(["a", "b", "a"], 1) == [[HIT], [], [HIT]]
        assert client.search(["b", "a"], 1) == [[], [HIT]]
        client.search(["a"], 2)
        assert [request["queries"] for request in server.requests] == [["a", "b"], ["a"]]


def test_long_batches_are_sent_in_pieces() -> None:
    with serving(answer([HIT], [HIT]), answer([])) as server, client_of(server, batch_queries=2) as client:
        assert client.search(["a", "b", "c"], 1) == [[HIT], [HIT], []]
        assert [request["queries"] for request in server.requests] == [["a", "b"], ["c"]]


def test_an_empty_batch_asks_nobody() -> None:
    with serving() as server, client_of(server) as client:
        assert client.search([], 3) == []
        assert server.connections == 0


def test_a_restarting_server_is_waited_for() -> None:
    # Refused, then reset, then an answer: three attempts, as after a restart.
    with serving(reset, answer([HIT])) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            refusing = closed.getsockname()[1]
        client = client_of(server, retries=3)
        client._port = refusing
        waits: list[float] = client.waits

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            client._port = port

        client._sleep = sleep
        assert client.search(["a"], 1) == [[HIT]]
        assert len(waits) == 2


def drip_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(100):  # 2 s, never silent for as long as the client waits for a whole answer
        connection.sendall(b"x")
        time.sleep(0.02)
    connection.sendall(b"\r\n\r\n")


BROKEN = {
    "reset": reset,
    "hang up": hang_up,
    "half an answer": then_hang_up(http(render_answer([[HIT]], True)[:-9], length=len(render_answer([[HIT]], True)))),
    "cut JSON": http(render_answer([[HIT]], True)[:-9]),
    "no JSON": http(b"<html>gateway</html>"),
    "too few answers": http(b'{"result": []}'),
    "an error as a 200": http(b'{"error": "out of memory"}'),
    "not HTTP": lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n"),
    "slow": drip,
    "slow head": drip_head,
    "silent": lambda connection: time.sleep(1),
    "503": http(b"{}", "503 Service Unavailable"),
    "429": http(b"{}", "429 Too Many Requests"),
    "502": http(b"", "502 Bad Gateway", version=""),
    "bad length": then_hang_up(
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}")
    ),
}


@pytest.mark.parametrize("trouble", BROKEN)
def test_trouble_is_tried_again(trouble: str) -> None:
    with serving(BROKEN[trouble], answer([HIT])) as server, client_of(server) as client:
        assert client.search(["a"], 1) == [[HIT]]
        assert len(client.waits) == 1


@pytest.mark.parametrize("trouble", BROKEN)
def test_trouble_without_end_is_a_retrieval_error(trouble: str) -> None:
    with serving(*[BROKEN[trouble]] * 3) as server:
        client = client_of(server, retries=1, timeout_s=0.2)
        with pytest.raises(RetrievalError, match="no answer after 2 attempts; last: "):
            client.search(["a"], 1)


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 Unprocessable Entity"])
def test_a_refused_request_is_not_repeated(status: str) -> None:
    with (
        serving(http(b'{"error": "topk: must lie between 1 and 1000"}', status)) as server,
        client_of(server) as client,
    ):
        with pytest.raises(RetrievalError, match=f"refuses the request: {status[:3]}.*topk"):
            client.search(["a"], 1)
        assert client.waits == []


def test_waits_grow_are_jittered_and_heed_the_server() -> None:
    with serving(*[reset] * 9) as server:
        client = client_of(server, retries=7, backoff_s=1.0, max_backoff_s=8.0)
        with pytest.raises(RetrievalError):
            client.search(["a"], 1)
    for number, wait in enumerate(client.waits):
        assert 0.5 * min(8, 2**number) <= wait <= 1.5 * min(8, 2**number)
    assert len({round(wait / min(8, 2**n), 6) for n, wait in enumerate(client.waits)}) == 7
    with serving(http(b"", "503 Busy", Retry_After="5"), answer([HIT])) as server:
        client = client_of(server, backoff_s=0.1)
        client.search(["a"], 1)
    assert client.waits == [5.0]


def test_a_connection_that_the_server_closed_meanwhile_costs_no_attempt() -> None:
    with serving(then_hang_up(answer([HIT])), answer([HIT])) as server, client_of(server, retries=0) as client:
        client.search(["a"], 1)
        time.sleep(0.05)
        assert client.search(["b"], 1) == [[HIT]]
        assert server.connections == 2


def test_a_closed_connection_is_not_kept() -> None:
    with serving(then_hang_up(answer([HIT], Connection="close")), answer([HIT])) as server:
        client = client_of(server, retries=0)
        client.search(["a"], 1)
        assert not client._idle
        client.search(["b"], 1)


def test_an_index_swapped_under_a_run_is_noticed() -> None:
    with serving(answer([HIT]), answer([HIT], version="v2"), answer([HIT], version="v2")) as server:
        client = client_of(server)
        client.search(["a"], 1)
        with pytest.raises(RetrievalError, match=r"another index than before \(version v2, was v1\)"):
            client.search(["b"], 1)
        with pytest.raises(RetrievalError, match="another index"):
            client.search(["c"], 1)


def test_a_swap_may_be_allowed_and_empties_the_cache() -> None:
    other = Hit(Passage("8", "", "x"), 1.0)
    replies = [answer([HIT]), answer([HIT], version="v2"), answer([other], version="v2")]
    with serving(*replies) as server, client_of(server, allow_swap=True) as client:
        client.search(["a"], 1)
        client.search(["b"], 1)
        assert client.search(["a"], 1) == [[other]]
        assert client.version == "v2"


def test_info_and_readiness() -> None:
    info = json.dumps({"version": "v1", "passages": 3}).encode()
    with serving(*[http(b"{}", "503 Loading")] * 2, http(b'{"status": "ready"}'), http(info)) as server:
        client = client_of(server)
        client.wait_until_ready(5)
        assert len(client.waits) == 2
        assert client.info()["passages"] == 3
        assert client.version == "v1"
    with serving(*[http(b"{}", "503 Loading")] * 50) as server:
        client = client_of(server, sleep=time.sleep)
        with pytest.raises(RetrievalError, match=r"not ready after 0\.2 s: 503"):
            client.wait_until_ready(0.2, poll_s=0.05)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", ""])
def test_a_url_without_scheme_or_host_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        RetrieverClient(url)


def test_what_is_not_a_batch_is_refused() -> None:
    client = RetrieverClient("http://127.0.0.1:1")
    with pytest.raises(TypeError, match="list of queries"):
        client.search("one string", 3)
    with pytest.raises(ValueError, match="top_k"):
        client.search(["a"], 0)


def _search_in_child(client: RetrieverClient, answers) -> None:
    answers.put(client.search(["child"], 1))


def test_a_forked_process_takes_a_connection_of_its_own() -> None:
    fork = multiprocessing.get_context("fork")
    with serving(*[answer([HIT])] * 2) as server, client_of(server, cache_entries=0) as client:
        client.search(["parent"], 1)
        answers = fork.SimpleQueue()
        child = fork.Process(target=_search_in_child, args=(client, answers))
        child.start()
        child.join(20)
        assert answers.get() == [[HIT]]
        assert server.connections == 2


def test_many_threads_share_a_client() -> None:
    with serving(*[answer([HIT])] * 40) as server, client_of(server, cache_entries=0) as client:
        found: list = []
        threads = [
            threading.Thread(target=lambda: found.extend(client.search(["a"], 1) for _ in range(5))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[[HIT]]] * 40
        assert server.connections <= 8
