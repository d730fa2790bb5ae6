"""Make one index of several: fuse their rankings, or re-rank one with a cross-encoder.

    python scripts/compose_index.py hybrid indexes/bm25 indexes/dense --output indexes/hybrid --weights 1 2
    python scripts/compose_index.py rerank indexes/hybrid --output indexes/best --model minilm

The result is a directory with a manifest that names its parts; it opens and is served like any other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from retrieval_index.compose import compose_hybrid, compose_rerank


@dataclass(frozen=True)
class Arguments:
    """Fuse indexes of one corpus, or re-rank one."""

    how: tyro.conf.Positional[Literal["hybrid", "rerank"]]
    parts: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of the indexes."""
    output: Path
    """Directory of the new one."""
    weights: tuple[float, ...] | None = None
    """hybrid: one for each part (1 by default)."""
    k: float = 60.0
    """hybrid: how little the first ranks stand out."""
    depth: int | None = None
    """How far down the parts' rankings are read (hybrid 100, rerank 50)."""
    model: str = "minilm"
    """rerank: minilm, bge, medcpt, a hub name or a directory."""


def run(arguments: Arguments) -> str:
    if arguments.how == "hybrid":
        made = compose_hybrid(
            arguments.output,
            arguments.parts,
            weights=arguments.weights,
            k=arguments.k,
            depth=arguments.depth or 100,
        )
    elif len(arguments.parts) != 1:
        raise ValueError(f"rerank takes one index, got {len(arguments.parts)}")
    else:
        made = compose_rerank(arguments.output, arguments.parts[0], model=arguments.model, depth=arguments.depth or 50)
    return f"{arguments.output} is ready: {made.kind} over {made.passages:,} passages"


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    try:
        print(run(arguments), file=sys.stderr)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"compose_index: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
