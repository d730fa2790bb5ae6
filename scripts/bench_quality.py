"""Measure how well indexes find: judged test collections, and answers of question sets.

    python scripts/bench_quality.py collection data/ir/scifact --indexes indexes/scifact-bm25 indexes/scifact-minilm
    python scripts/bench_quality.py answers data/qa/*.jsonl --indexes indexes/bm25 indexes/dense indexes/hybrid

A collection is a folder with queries_*.jsonl and qrels_*.tsv; a question set has `question` and `golden_answers` a
line, and yes/no questions are left out. Prints a table in Markdown; with --output also JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from retrieval_index import Retriever, open_index
from retrieval_index.quality import answer_recall, load_judgements, load_queries, measure

DEPTHS = (1, 3, 5, 10)


@dataclass(frozen=True)
class Arguments:
    """Measure how well indexes find."""

    what: tyro.conf.Positional[Literal["collection", "answers"]]
    files: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of collections, or files of questions."""
    indexes: tuple[Path, ...]
    """Directories of indexes over the corpus in question."""
    split: str = "test"
    """Of a collection: queries_SPLIT.jsonl and qrels_SPLIT.tsv."""
    measures: tuple[str, ...] = ("nDCG@10", "R@100", "AP", "P@30")
    """Of a collection, as ir-measures names them."""
    limit: int | None = None
    """Questions of each set at most."""
    output: Path | None = None
    """A JSON file for the figures."""


def questions(path: Path, limit: int | None) -> list[tuple[str, list[str]]]:
    rows = [json.loads(line) for line in path.open(encoding="utf-8") if line.strip()]
    asked = [(row["question"], row["golden_answers"]) for row in rows]
    return [own for own in asked if not {answer.lower().strip() for answer in own[1]} <= {"yes", "no"}][:limit]


def figures(arguments: Arguments, name: str, index: Retriever) -> list[tuple[str, str, dict[str, float]]]:
    found = []
    for path in arguments.files:
        if arguments.what == "collection":
            queries = load_queries(path / f"queries_{arguments.split}.jsonl")
            judgements = load_judgements(path / f"qrels_{arguments.split}.tsv")
            found.append((path.name, name, measure(index, queries, judgements, arguments.measures)))
        else:
            recall = answer_recall(index, questions(path, arguments.limit), DEPTHS)
            found.append((path.stem, name, {f"@{depth}": value for depth, value in recall.items()}))
    return found


def table(rows: list[tuple[str, str, dict[str, float]]]) -> str:
    names = list(rows[0][2])
    lines = [f"| set | index | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for own, index, values in sorted(rows, key=lambda row: row[0]):
        lines.append(f"| {own} | {index} | {' | '.join(f'{values[name]:.4f}' for name in names)} |")
    return "\n".join(lines)


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    rows = []
    try:
        for path in arguments.indexes:  # one at a time: memory
            rows += figures(arguments, path.name, open_index(path))
    except (KeyError, ValueError, OSError, RuntimeError) as error:
        print(f"bench_quality: {error}", file=sys.stderr)
        return 2
    if not rows:
        print("bench_quality: name at least one index and one set", file=sys.stderr)
        return 2
    print(table(rows))
    if arguments.output:
        lines = [{"set": own, "index": index, **values} for own, index, values in rows]
        arguments.output.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
