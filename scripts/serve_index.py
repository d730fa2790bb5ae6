"""Serve an index over HTTP: POST /retrieve, GET /health /ready /info /metrics.

    python scripts/serve_index.py indexes/wiki --port 8000

/ready answers 503 until the index is loaded. SIGHUP opens the index again (after a rebuild) and goes
over to it without dropping a request; SIGTERM and Ctrl-C finish what was begun.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from retrieval_index.manifest import read_manifest

TOKEN_VARIABLE = "SORL_RETRIEVAL_TOKEN"


@dataclass(frozen=True)
class Arguments:
    """Serve an index. A bearer token is asked for where the variable SORL_RETRIEVAL_TOKEN holds one."""

    index: tyro.conf.Positional[Path]
    """Directory of the index."""
    host: str = "127.0.0.1"
    """Address to listen on; the default can be reached from this machine alone."""
    port: int = 8000
    backend: Literal["auto", "numpy", "numba"] = "auto"
    """How BM25 is searched."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Dense: where FAISS searches."""
    encoder_device: str | None = None
    """Dense and re-ranking: where the model runs, cpu or cuda:0; a GPU by default where there is one."""
    nprobe: int | None = None
    """Dense, ivf-pq: lists looked at."""
    ef_search: int | None = None
    """Dense, hnsw: how widely the graph is searched."""
    threads: int = 1
    """Lucene: searches side by side."""
    batch_queries: int = 256
    """Queries searched together at most."""
    pending_queries: int = 32_768
    """Waiting queries above which requests are answered with 429."""
    queue_timeout_s: float = 30.0
    """How long a request may wait for its turn."""
    cache_entries: int = 20_000
    """Answers kept for queries that come again."""
    max_queries: int = 1024
    """Queries in one request at most."""
    max_top_k: int = 1000
    max_body_bytes: int = 4 << 20
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compare every file's SHA-256 with the manifest before serving."""


def run(arguments: Arguments) -> int:
    manifest = read_manifest(arguments.index)  # a wrong path is told before a port is opened

    from retrieval_index.server import ServerSettings, create_app, index_opener, serve
    from retrieval_index.wire import Limits

    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not _is_loopback(arguments.host):
        logging.warning("listening on %s without a token; set %s to ask for one", arguments.host, TOKEN_VARIABLE)
    settings = ServerSettings(
        limits=Limits(body_bytes=arguments.max_body_bytes, queries=arguments.max_queries, top_k=arguments.max_top_k),
        batch_queries=arguments.batch_queries,
        pending_queries=arguments.pending_queries,
        queue_timeout_s=arguments.queue_timeout_s,
        cache_entries=arguments.cache_entries,
        token=token,
    )
    opener = index_opener(
        arguments.index,
        verify=arguments.verify,
        backend=arguments.backend,
        device=arguments.device,
        encoder_device=arguments.encoder_device,
        nprobe=arguments.nprobe,
        ef_search=arguments.ef_search,
        threads=arguments.threads,
    )
    logging.info(
        "%s: %s passages, http://%s:%d/retrieve",
        arguments.index,
        f"{manifest.passages:,}",
        arguments.host,
        arguments.port,
    )
    return serve(create_app(opener, settings), host=arguments.host, port=arguments.port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    logging.basicConfig(level=logging.INFO, format="serve_index: %(message)s")
    try:
        return run(arguments)
    except ModuleNotFoundError as error:
        print(f"serve_index: {error.name} is not installed; pip install {error.name}", file=sys.stderr)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"serve_index: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
