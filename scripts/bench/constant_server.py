"""The retrieval server over an index that answers everything with the same hits: what all but the search costs.

python scripts/bench/constant_server.py --port 8000
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from retrieval_index import Hit, Passage
from retrieval_index.server import ServerSettings, create_app, serve

TEXT = "A passage of a hundred words, give or take, as those of the corpora that are searched here. " * 6


class ConstantRetriever:
    """The same hits whatever is asked."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        hits = [Hit(Passage(str(number), "Title", TEXT), 1.0) for number in range(top_k)]
        return [hits for _ in queries]

    def open(self) -> tuple[ConstantRetriever, dict[str, Any]]:
        return self, {"version": "constant", "kind": "constant", "passages": 1, "parameters": {}, "manifest": {}}


if __name__ == "__main__":
    settings = ServerSettings(cache_entries=0)
    sys.exit(serve(create_app(ConstantRetriever().open, settings), port=int(sys.argv[sys.argv.index("--port") + 1])))
