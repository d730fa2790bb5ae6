"""Counters of the server in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        lines, below = [], 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {below}"]


class ServerMetrics:
    """What the server counts."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()  # answers of /retrieve by HTTP status
        self.queries = 0
        self.request_seconds = Histogram(SECONDS)
        self.batch_seconds = Histogram(SECONDS)
        self.batch_queries = Histogram(SIZES)

    def on_batch(self, queries: int, seconds: float) -> None:
        """Count one batch."""
        self.batch_queries.add(queries)
        self.batch_seconds.add(seconds)

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All of it; `gauges` holds further values by name, with their descriptions."""
        statuses = [
            f'retrieval_requests_total{{status="{status}"}} {count}' for status, count in sorted(self.statuses.items())
        ]
        blocks = [
            _block("retrieval_requests_total", "Answers of /retrieve by HTTP status.", "counter", statuses),
            _block(
                "retrieval_queries_total",
                "Queries answered.",
                "counter",
                [f"retrieval_queries_total {self.queries}"],
            ),
        ]
        for name, about, histogram in (
            ("retrieval_request_seconds", "Time from request to answer.", self.request_seconds),
            ("retrieval_batch_seconds", "Time of one batch in the index.", self.batch_seconds),
            ("retrieval_batch_queries", "Distinct queries in one batch.", self.batch_queries),
        ):
            blocks.append(_block(name, about, "histogram", histogram.lines(name)))
        for name, (about, value) in gauges.items():
            blocks.append(_block(name, about, "gauge", [f"{name} {value:g}"]))
        return "".join(blocks)


def _block(name: str, about: str, kind: str, lines: Sequence[str]) -> str:
    return "\n".join([f"# HELP {name} {about}", f"# TYPE {name} {kind}", *lines, ""])
