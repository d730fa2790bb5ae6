"""RetrieverClient: an index behind HTTP, as a `Retriever`.

A restarting server, a lost connection, an overloaded server or half an answer is tried again, a
bounded number of times; whatever does not end in a whole answer raises `RetrievalError`. No error is
ever turned into a hit. Only the standard library is used.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import random
import socket
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from retrieval_index.types import Hit, RetrievalError
from retrieval_index.wire import parse_answer, render_request

VERSION_HEADER = "X-Index-Version"
_TRY_AGAIN = frozenset({429, 500, 502, 503, 504})


class _Failed(Exception):
    """One attempt came to nothing; `wait_s` is what the server asked for."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class RetrieverClient:
    """Searches on a server that speaks ``POST /retrieve``. Safe to use from several threads."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 6,
        backoff_s: float = 0.25,
        max_backoff_s: float = 8.0,
        batch_queries: int = 256,
        cache_entries: int = 4096,
        allow_swap: bool = False,
        sleep: Callable[[float], None] = time.sleep,
        seed: int | None = None,
    ) -> None:
        """Remember where the server is; nothing is sent yet.

        Args:
            url: as ``http://127.0.0.1:8000``; a path in front of /retrieve is kept.
            timeout_s: for one attempt, from the connection to the last byte.
            retries: attempts after the first.
            backoff_s: mean wait before the second attempt; doubles up to `max_backoff_s`, with jitter.
            batch_queries: queries in one request; longer batches are sent in pieces.
            cache_entries: answers kept for queries that come again; 0 keeps none.
            allow_swap: go on when the server changes its index. By default that is an error, since a
                training run whose passages change under it is not one run.

        Raises:
            ValueError: a URL without http(s) scheme or host, or numbers out of range.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"server URL {url!r} is not of the form http://host:port")
        if timeout_s <= 0 or retries < 0 or batch_queries < 1:
            raise ValueError("timeout_s and batch_queries must be positive, retries 0 or more")
        self.url = url.rstrip("/")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s, self._retries = timeout_s, retries
        self._backoff_s, self._max_backoff_s = backoff_s, max_backoff_s
        self._batch_queries, self._cache_entries = batch_queries, cache_entries
        self._allow_swap = allow_swap
        self._sleep, self._random = sleep, random.Random(seed)
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._process = os.getpid()
        self._lock = threading.Lock()  # of the cache and the version
        self._cache: OrderedDict[tuple[str, int], list[Hit]] = OrderedDict()
        self._version: str | None = None

    @property
    def version(self) -> str | None:
        """Version of the index that answered so far; None before the first answer."""
        return self._version

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Return the `top_k` best passages of each query; see `Retriever.search`.

        Raises:
            RetrievalError: no whole answer after all attempts, a request the server refuses, or an
                index that was swapped.
            TypeError, ValueError: not a batch of queries.
        """
        if isinstance(queries, str):
            raise TypeError("search takes a list of queries, got one string; write [query]")
        if top_k < 1:
            raise ValueError(f"top_k must be 1 or more, got {top_k}")
        known: dict[str, list[Hit]] = {}
        with self._lock:
            for query in queries:
                if (hits := self._cache.get((query, top_k))) is not None:
                    self._cache.move_to_end((query, top_k))
                    known[query] = hits
        missing = [query for query in dict.fromkeys(queries) if query not in known]
        for start in range(0, len(missing), self._batch_queries):
            piece = missing[start : start + self._batch_queries]
            known.update(zip(piece, self._ask(piece, top_k), strict=True))
        return [list(known[query]) for query in queries]

    def info(self) -> dict[str, Any]:
        """What the server says of its index: version, kind, passages, parameters, manifest."""
        info: dict[str, Any] = self._with_retries(lambda: self._fetch_json("/info"))
        self._check_version(info.get("version"))
        return info

    def wait_until_ready(self, timeout_s: float = 600.0, poll_s: float = 0.5) -> None:
        """Wait for a server that is starting.

        Raises:
            RetrievalError: it is not ready in time; says what it answered last.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._fetch_json("/ready")
                return
            except _Failed as error:
                if time.monotonic() + poll_s > deadline:
                    raise RetrievalError(f"{self.url} is not ready after {timeout_s:g} s: {error}") from error
            self._sleep(poll_s)

    def close(self) -> None:
        """Close the idle connections; the client may still be used."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> RetrieverClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- requests ---------------------------------------------------------------------------------

    def _ask(self, queries: list[str], top_k: int) -> list[list[Hit]]:
        body = render_request(queries, top_k)

        def attempt() -> list[list[Hit]]:
            content, version = self._exchange("POST", "/retrieve", body)
            try:
                answers = parse_answer(content, len(queries))
            except ValueError as error:
                raise _Failed(str(error)) from error
            self._check_version(version)
            return answers

        answers: list[list[Hit]] = self._with_retries(attempt)
        with self._lock:
            for query, hits in zip(queries, answers, strict=True):
                self._cache[query, top_k] = hits
            while len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
        return answers

    def _fetch_json(self, path: str) -> Any:
        content, _ = self._exchange("GET", path, None)
        try:
            return json.loads(content)
        except ValueError as error:
            raise _Failed(f"{path} answered no JSON") from error

    def _with_retries(self, attempt: Callable[[], Any]) -> Any:
        for number in range(self._retries + 1):
            try:
                return attempt()
            except _Failed as error:
                if number == self._retries:
                    raise RetrievalError(f"{self.url}: no answer after {number + 1} attempts; last: {error}") from error
                wait = min(self._max_backoff_s, self._backoff_s * 2**number)
                # Jitter, so that many clients do not come back at the same moment.
                self._sleep(max(wait * self._random.uniform(0.5, 1.5), min(error.wait_s, self._max_backoff_s)))
        raise AssertionError("unreachable")

    def _check_version(self, version: str | None) -> None:
        if version is None:
            return
        with self._lock:
            before, self._version = self._version, self._version or version
            if before in (None, version):
                return
            if self._allow_swap:
                self._cache.clear()
                self._version = version
                return
        raise RetrievalError(
            f"{self.url} serves another index than before (version {version}, was {before});"
            " start a new run, or allow it with allow_swap=True"
        )

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[bytes, str | None]:
        """One request and its answer: the body of a 200 and the version of the index.

        Raises:
            _Failed: worth another attempt.
            RetrievalError: not worth one.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            connection, reused = self._connection()
            try:
                response, content = self._transfer(connection, method, path, body, deadline)
                break
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                # A kept connection that the server closed meanwhile says nothing about the server.
                if reused and isinstance(error, ConnectionError):
                    continue
                raise _Failed(f"{type(error).__name__}: {error}") from error
            except BaseException:
                connection.close()  # interrupted half-way: the rest of the answer must not be read as the next
                raise
        status, headers = response.status, response.headers
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        if status == 200:
            return content, headers.get(VERSION_HEADER)
        message = f"{status} {content[:300].decode('utf-8', 'replace')}"
        if status in _TRY_AGAIN:
            raise _Failed(message, _seconds(headers.get("Retry-After")))
        raise RetrievalError(f"{self.url}{path} refuses the request: {message}")

    def _transfer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, deadline: float
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection.request(method, self._path + path, body, self._headers)
        connection.response_class = partial(_Response, deadline=deadline)  # type: ignore[assignment]
        response = connection.getresponse()
        pieces = []
        while piece := response.read1(1 << 20):
            pieces.append(piece)
        response.close()  # of the answer, not of the connection
        content = b"".join(pieces)
        length = response.headers.get("Content-Length")
        if length is not None and int(length) != len(content):
            raise http.client.IncompleteRead(content, int(length) - len(content))
        return response, content

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        if self._process != os.getpid():  # after a fork: two processes must not share a connection
            self._idle, self._process = deque(), os.getpid()
        try:
            connection = self._idle.pop()
        except IndexError:
            if self._secure:
                context = ssl.create_default_context()
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=context
                )
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            return connection, False
        if connection.sock is not None:
            connection.sock.settimeout(self._timeout_s)
        return connection, True


class _Response(http.client.HTTPResponse):
    """An answer that must have arrived by a deadline, its head too: a server can send bytes for ever."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, deadline))  # type: ignore[arg-type]


class _Timed(io.RawIOBase):
    """The bytes of a socket until a deadline (of time.monotonic())."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer took too long")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        self._raw.close()  # the socket counts on it
        super().close()


def _seconds(value: str | None) -> float:
    """Retry-After in seconds; 0 where it is absent or a date."""
    return float(value) if value is not None and value.isdigit() else 0.0
