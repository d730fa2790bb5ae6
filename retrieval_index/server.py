"""Serve an index over HTTP: /retrieve, /health, /ready, /info, /metrics.

/retrieve answers 200, or 422 with the field that is wrong, or 429 / 503 with Retry-After when it is
overloaded, not ready or the index failed; with a token set, 401. It has no other answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from retrieval_index.batching import Batcher, Overloaded
from retrieval_index.manifest import MANIFEST_FILE, Manifest, read_manifest
from retrieval_index.opening import open_index
from retrieval_index.server_metrics import ServerMetrics
from retrieval_index.types import RetrievalError, Retriever
from retrieval_index.wire import BadRequest, Limits, parse_request, render_answer

VERSION_HEADER = "X-Index-Version"
RETRY_AFTER_S = 1
LOG = logging.getLogger("retrieval_index.server")

# Gives a retriever and what /info says of it; called at the start and at each swap, in a thread.
OpenIndex = Callable[[], tuple[Retriever, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the server allows. `limits` are those of one request."""

    limits: Limits = field(default_factory=Limits)
    batch_queries: int = 256
    pending_queries: int = 32_768
    queue_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    cache_entries: int = 20_000
    token: str | None = None


def index_opener(path: str | os.PathLike[str], *, verify: bool = False, **options: Any) -> OpenIndex:
    """How the server opens a directory, with `OpenOptions`: one search warms it up before it is ready."""

    def open_it() -> tuple[Retriever, dict[str, Any]]:
        retriever = open_index(path, verify=verify, **options)
        retriever.search(["warm up"], 1)
        return retriever, index_info(path)

    return open_it


def index_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Version (a digest of the manifest) and manifest of an index, as /info gives them."""
    manifest: Manifest = read_manifest(path)
    text = (Path(path) / MANIFEST_FILE).read_bytes()
    return {
        "version": hashlib.sha256(text).hexdigest()[:16],
        "kind": manifest.kind,
        "passages": manifest.passages,
        "parameters": manifest.parameters,
        "manifest": json.loads(text),
    }


class _Service:
    """The state behind the routes."""

    def __init__(self, open_it: OpenIndex, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = ServerMetrics()
        self.batcher: Batcher | None = None
        self.info: dict[str, Any] = {}
        self.failure: str | None = None
        self._open = open_it
        self._swapping = asyncio.Lock()

    async def start(self) -> None:
        """Open the index, then search until cancelled."""
        try:
            retriever, self.info = await asyncio.to_thread(self._open)
        except Exception as error:  # whatever it is: a server that stays "loading" for ever says nothing
            self.failure = _reason(error)
            LOG.error("the index cannot be opened: %s", self.failure)
            return
        settings = self.settings
        self.batcher = Batcher(
            retriever,
            self.info["version"],
            batch_queries=settings.batch_queries,
            pending_queries=settings.pending_queries,
            timeout_s=settings.queue_timeout_s,
            cache_entries=settings.cache_entries,
            on_batch=self.metrics.on_batch,
        )
        try:
            await self.batcher.run()
        finally:
            self.batcher = None  # an application may be started again

    async def swap(self) -> None:
        """Open the index again and go over to it; on failure stay with the old one."""
        async with self._swapping:
            if self.batcher is None:
                return
            try:
                retriever, info = await asyncio.to_thread(self._open)
            except Exception as error:  # the old one goes on answering
                LOG.error("the index was not swapped: %s", _reason(error))
                return
            self.info = info
            self.batcher.swap(retriever, info["version"])
            LOG.info("index version %s is served", info["version"])

    async def retrieve(self, receive: Receive) -> Response:
        started = time.monotonic()
        try:
            response = await self._retrieve(receive)
        except asyncio.CancelledError:  # by the server, when a stop takes too long: no reason to answer 500
            response = _refusal(503, "the server is stopping", retry=True)
        self.metrics.statuses[response.status_code] += 1
        self.metrics.request_seconds.add(time.monotonic() - started)
        return response

    async def _retrieve(self, receive: Receive) -> Response:
        limits = self.settings.limits
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                body = await _read_body(receive, limits.body_bytes)
            wanted = parse_request(body, limits)
        except TimeoutError:
            return _refusal(422, "body: did not arrive in time", field="body")
        except ConnectionResetError:
            return Response(status_code=422)  # nobody reads it
        except BadRequest as error:
            return _refusal(422, str(error), field=error.field)
        if self.batcher is None:
            return self.not_ready()
        try:
            answers, version = await self.batcher.search(wanted.queries, wanted.top_k)
        except Overloaded as error:
            return _refusal(429, str(error), retry=True)
        except RetrievalError as error:
            LOG.error("a search failed: %s", error)
            return _refusal(503, str(error), retry=True)
        self.metrics.queries += len(answers)
        content = render_answer(answers, wanted.return_scores)
        return Response(content, media_type="application/json", headers={VERSION_HEADER: version})

    def not_ready(self) -> Response:
        """503, with the reason."""
        return _refusal(503, self.failure or "the index is being loaded", retry=True)

    def metrics_text(self) -> str:
        batcher = self.batcher
        return self.metrics.text(
            {
                "retrieval_ready": ("1 when the index is loaded.", float(batcher is not None)),
                "retrieval_pending_queries": (
                    "Queries waiting for a batch.",
                    batcher.pending if batcher else 0,
                ),
                "retrieval_cache_hits": (
                    "Queries answered from the cache.",
                    batcher.cache_hits if batcher else 0,
                ),
                "retrieval_passages": ("Passages of the index.", self.info.get("passages", 0)),
            }
        )


class _Application(FastAPI):
    """FastAPI with a straight way to /retrieve: its own way there costs as much as a search."""

    retrieve: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        straight = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == "/retrieve"
        await (self.retrieve if straight else super().__call__)(scope, receive, send)


def create_app(open_it: OpenIndex, settings: ServerSettings | None = None) -> FastAPI:
    """Make the application. The index is opened in the background after the start.

    `app.state.swap_soon()`, there once the application has started, opens the index again and goes
    over to it without dropping a request; any thread may call it, and `serve` does so at SIGHUP.
    `app.state.failed()` says why the index could not be opened, None otherwise.
    """
    settings = settings or ServerSettings()
    service = _Service(open_it, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        task = loop.create_task(service.start())
        app.state.swap_soon = lambda: asyncio.run_coroutine_threadsafe(service.swap(), loop)
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = _Application(title="retrieval_index", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.failed = lambda: service.failure

    def allowed(request: Request) -> bool:
        if settings.token is None:
            return True
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode("utf-8"), f"Bearer {settings.token}".encode())

    async def retrieve(request: Request) -> Response:
        return await service.retrieve(request.receive) if allowed(request) else _unauthorised()

    async def straight(scope: Scope, receive: Receive, send: Send) -> None:
        answer = await retrieve(Request(scope, receive))
        await answer(scope, receive, send)

    app.retrieve = straight

    async def health(_request: Request) -> Response:
        return _json({"status": "up"})

    async def ready(_request: Request) -> Response:
        return _json({"status": "ready"}) if service.batcher else service.not_ready()

    async def info(request: Request) -> Response:
        if not allowed(request):
            return _unauthorised()
        return _json(service.info) if service.batcher else service.not_ready()

    async def metrics(request: Request) -> Response:
        if not allowed(request):
            return _unauthorised()
        return Response(service.metrics_text(), media_type="text/plain; version=0.0.4")

    # For the other methods of /retrieve (405), and for an application that is mounted below a path.
    app.router.routes.append(Route("/retrieve", retrieve, methods=["POST"]))
    for path, endpoint in (("/health", health), ("/ready", ready), ("/info", info), ("/metrics", metrics)):
        app.add_route(path, endpoint, methods=["GET"])
    return app


def serve(app: FastAPI, *, host: str = "127.0.0.1", port: int = 8000) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish what was begun; SIGHUP swaps the index.

    Returns:
        0 after a clean stop, 2 if the index could not be opened.
    """
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=10
    )
    server = uvicorn.Server(config)

    # uvicorn stops cleanly, then raises the signal once more, which would end the process with an error.
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda _number, _frame: None)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: app.state.swap_soon())
        serving = loop.create_task(server.serve())
        while not serving.done():
            await asyncio.wait([serving], timeout=0.2)
            server.should_exit = server.should_exit or app.state.failed() is not None
        await serving

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop where it is installed
        runner.run(run())
    return 2 if app.state.failed() else 0


async def _read_body(receive: Receive, limit: int) -> bytes:
    pieces, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        piece, more = message.get("body", b""), message.get("more_body", False)
        size += len(piece)
        if size > limit:
            raise BadRequest("body", f"more than {limit} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _refusal(status: int, message: str, *, field: str | None = None, retry: bool = False) -> Response:
    content = {"error": message} if field is None else {"error": message, "field": field}
    return _json(content, status, {"Retry-After": str(RETRY_AFTER_S)} if retry else None)


def _reason(error: Exception) -> str:
    """The message; with the error's name in front where it was not written for users."""
    told = isinstance(error, (RuntimeError, OSError, ValueError)) and str(error)
    return str(error) if told else f"{type(error).__name__}: {error}"


def _unauthorised() -> Response:
    return _json({"error": "a bearer token is needed"}, 401, {"WWW-Authenticate": "Bearer"})


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    text = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
    return Response(text, status, media_type="application/json", headers=headers)
