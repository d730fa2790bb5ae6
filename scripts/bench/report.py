"""What scripts/bench_retrieval.py prints."""

from __future__ import annotations

from bench import load

_PYSERINI = "pyserini's batch_search"


def report(rates: dict[str, float], loads: dict[str, list[load.Load]], batch: int) -> list[str]:
    """Both as Markdown."""
    lines = ["| in this process | queries/s |", "|---|---|"]
    lines += [f"| {name} | {value:,.0f} |" for name, value in rates.items()]
    lines += [
        "",
        "| through the server | clients | queries/s | p50 ms | p99 ms | errors |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in loads.items():
        for row in rows:
            numbers = f"{row.queries_a_second:,.0f} | {row.p50_ms:.1f} | {row.p99_ms:.1f} | {row.errors}"
            lines.append(f"| {name} | {row.clients} | {numbers} |")
    best = {name: max(row.queries_a_second for row in rows) for name, rows in loads.items()}
    ours = [name for name in rates if name.startswith("bm25 (")]
    lines.append("")
    lines += [
        f"{name}: {rates[name] / rates[name.replace('bm25', 'bm25s directly')]:.2f} of bm25s' own rate" for name in ours
    ]
    if _PYSERINI in rates:
        fastest = max(rates[name] for name in ours)
        lines.append(f"bm25 over pyserini's batch_search: {fastest / rates[_PYSERINI]:.1f}")
    whole = best[f"{batch} queries a request"] / rates[ours[-1]]
    lines.append(f"server with {batch} queries a request: {whole:.2f} of the rate in this process")
    for constant in ("one query a request, constant hits", "GET /health"):
        share = best["one query a request"] / best[constant]
        lines.append(f"server with one query a request: {share:.2f} of its rate with {constant}")
    return lines
