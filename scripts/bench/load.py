"""Load on a server: many clients on connections of their own, each asking again as soon as it is answered.

Plain sockets and asyncio, so that the clients take as little of the machine as can be.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from retrieval_index import RetrieverClient

SERVE = Path(__file__).resolve().parents[1] / "serve_index.py"
SERVE_CONSTANT = Path(__file__).with_name("constant_server.py")


@dataclass(frozen=True, slots=True)
class Load:
    """What a number of clients saw."""

    clients: int
    queries_a_second: float
    p50_ms: float
    p99_ms: float
    errors: int


@contextmanager
def server(*command: str | Path) -> Iterator[int]:
    """A server in a process of its own, ready; gives its port. ``command``: a script and its arguments but the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, *map(str, command), "--port", str(port)])
    try:
        with RetrieverClient(f"http://127.0.0.1:{port}") as client:
            client.wait_until_ready(timeout_s=300)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def requests(queries: Sequence[str], top_k: int, a_request: int) -> list[bytes]:
    """POST /retrieve for the queries, so many in each."""
    made = []
    for start in range(0, len(queries) - a_request + 1, a_request):
        body = json.dumps({"queries": list(queries[start : start + a_request]), "topk": top_k}).encode()
        head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        made.append(head.encode() + body)
    return made


CONSTANT = [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"]


def measure(port: int, pool: Sequence[bytes], *, clients: int, a_request: int, seconds: float) -> Load:
    """Let the clients ask for some seconds; every request is taken in turn, so that no cache answers early."""
    return asyncio.run(_measure(port, pool, clients, a_request, seconds))


async def _measure(port: int, pool: Sequence[bytes], clients: int, a_request: int, seconds: float) -> Load:
    waits: list[float] = []
    errors = 0
    turn = iter(range(1 << 62))
    stop = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while (begun := time.perf_counter()) < stop:
                writer.write(pool[next(turn) % len(pool)])
                if await _answer(reader) == 200:
                    waits.append(time.perf_counter() - begun)
                else:
                    errors += 1
        except (OSError, asyncio.IncompleteReadError, ValueError):
            errors += 1
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    passed = time.perf_counter() - started
    waits.sort()
    at = [
        1000 * waits[min(len(waits) - 1, int(len(waits) * share))] if waits else float("nan") for share in (0.5, 0.99)
    ]
    return Load(clients, len(waits) * a_request / passed, at[0], at[1], errors)


async def _answer(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head[9:12])
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    )
    await reader.readexactly(length)
    return status
