"""Ways to reach a server in tests: its application directly, or over a socket."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from retrieval_index import Hit, Passage, RetrievalError

INFO = {"version": "v1", "kind": "fake", "passages": 1, "parameters": {}, "manifest": {}}


class EchoRetriever:
    """Answers every query with `top_k` passages that repeat it; can be slow or broken on purpose."""

    def __init__(self, name: str = "v1", seconds: float = 0.0, gate: threading.Event | None = None) -> None:
        self.name, self.seconds, self.gate = name, seconds, gate
        self.batches: list[list[str]] = []

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        if self.gate is not None:
            assert self.gate.wait(20)
        time.sleep(self.seconds)
        if "fail" in queries:
            raise RetrievalError("the index is broken")
        if "crash" in queries:
            raise ZeroDivisionError("a fault of the index")
        return [
            [Hit(Passage(f"{self.name}-{n}", "Title", query), 1.0 / (n + 1)) for n in range(top_k)] for query in queries
        ]

    def open(self) -> tuple[EchoRetriever, dict[str, Any]]:
        return self, INFO | {"version": self.name}


class Calls:
    """An application with its life-span running, called without a network."""

    def __init__(self, app: Any, root_path: str = "") -> None:
        self.app, self._root_path = app, root_path

    async def __call__(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        sent: list[dict[str, Any]] = []
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return incoming.pop(0) if incoming else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": self._root_path,
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self.app(scope, receive, send)
        answer = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], answer, b"".join(message.get("body", b"") for message in sent[1:])


async def until_ready(call: Calls) -> None:
    while (await call("GET", "/ready"))[0] != 200:
        await asyncio.sleep(0.005)


def with_app(app: Any, work: Callable[[Calls], Any], *, ready: bool = True) -> Any:
    """Run `work` on the application between its start and its stop; wait for it to be ready first."""

    async def run() -> Any:
        async with app.router.lifespan_context(app):
            call = Calls(app)
            if ready:
                await until_ready(call)
            return await work(call)

    return asyncio.run(run())


@contextmanager
def running(app: Any, port: int = 0) -> Iterator[str]:
    """Serve the application on a port of this machine, in a thread; gives the URL."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
