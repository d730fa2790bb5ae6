"""Train a re-ranker for an index: a cross-encoder made of an encoder, on questions that nothing is measured with.

    python scripts/train_reranker.py train.jsonl --index indexes/bm25 --exclude test/*.jsonl --output models/reranker
    python scripts/compose_index.py rerank indexes/bm25 --model models/reranker --output indexes/best

Questions have `question` and `golden_answers` or `positive_ids` a line. Each is searched in the index; the first hit
that answers it is learnt as right, others as wrong. --dry-run says what there is to learn and how long it would take.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from index_console import duration

from retrieval_index import open_index
from retrieval_index.rerank import CrossEncoderScorer
from retrieval_index.reranker_data import (
    TrainingList,
    TrainingQuestion,
    load_questions,
    make_lists,
    split_held_out,
    without,
)
from retrieval_index.reranker_training import RerankerSettings, check_model_output, step_seconds, train_reranker


@dataclass(frozen=True)
class Arguments:
    """Train a re-ranker."""

    questions: tyro.conf.Positional[tuple[Path, ...]]
    """Files of training questions."""
    index: Path
    """Directory of the index whose hits are to be put in order."""
    output: Path
    """Directory of the model; it must not be there yet."""
    exclude: tuple[Path, ...] = ()
    """Files of questions that must stay unseen: training questions near any of them are dropped."""
    similarity: float = 0.7
    """Share of common words from which two questions count as near."""
    held_out: float = 0.05
    """Share of the training questions that is kept for checking the model at the end."""
    depth: int = 50
    """Hits looked at for each question."""
    negatives: int = 7
    """Wrong passages of each question at most."""
    settings: Annotated[RerankerSettings, tyro.conf.arg(name="")] = field(default_factory=RerankerSettings)
    dry_run: bool = False
    """Say what there is to learn and how long it would take, then stop."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def kept_questions(arguments: Arguments) -> list[TrainingQuestion]:
    questions = load_questions(arguments.questions)
    unseen = [question.text for question in load_questions(arguments.exclude)] if arguments.exclude else []
    kept = without(questions, unseen, similarity=arguments.similarity)
    say(f"{len(questions):,} questions, {len(questions) - len(kept)} dropped as near one of {len(unseen):,} excluded")
    return kept


def mined(arguments: Arguments, questions: list[TrainingQuestion]) -> tuple[list[TrainingList], list[TrainingList]]:
    index = open_index(arguments.index)
    found = []
    for name, part in zip(("train", "held out"), split_held_out(questions, arguments.held_out), strict=True):
        lists, counts = make_lists(
            part, index, depth=arguments.depth, negatives=arguments.negatives, seed=arguments.settings.seed
        )
        pairs = sum(len(row.texts) for row in lists)
        reasons = ", ".join(
            f"{key.replace('_', ' ')} {count}" for key, count in asdict(counts).items() if key != "lists"
        )
        say(f"{name}: {len(lists):,} lists of {pairs:,} pairs from {len(part):,} questions (left out: {reasons})")
        found.append(lists)
    return found[0], found[1]


def places(model: Path, lists: list[TrainingList]) -> list[int]:
    """Place (from 0) of the right passage of each list in the model's order; a tie counts against it."""
    scores = CrossEncoderScorer(str(model)).score([(row.question, text) for row in lists for text in row.texts])
    own = iter(scores)
    ranked = [[next(own) for _ in row.texts] for row in lists]
    return [sum(score >= row[0] for score in row[1:]) for row in ranked]


def share_first(found: list[int]) -> str:
    return f"{sum(place == 0 for place in found) / len(found):.3f}"


def run(arguments: Arguments) -> int:
    settings = arguments.settings
    check_model_output(arguments.output)
    train, held_out = mined(arguments, kept_questions(arguments))
    updates = settings.updates(len(train))
    if arguments.dry_run:
        seconds = step_seconds(train, settings)
        say(f"{updates:,} updates of {seconds:.1f} s (measured): about {duration(updates * seconds)}")
        return 0
    say(f"training {settings.encoder}: {updates:,} updates of {settings.batch_lists} lists")
    files = {"questions": [path.name for path in arguments.questions], "excluded": [p.name for p in arguments.exclude]}
    numbers = {key: getattr(arguments, key) for key in ("similarity", "held_out", "depth", "negatives")}
    done = train_reranker(train, arguments.output, settings, notes={**files, **numbers}, progress=True)
    say(f"{done.path} is ready: {done.steps:,} updates in {duration(done.seconds)}, mean loss {done.loss:.3f}")
    if held_out:
        before, after = [row.place for row in held_out], places(arguments.output, held_out)
        say(
            f"held out, right passage first of its list: {share_first(before)} in the index's order,"
            f" {share_first(after)} in the model's ({len(held_out)} lists)"
        )
        print(json.dumps({"held_out": len(held_out), "before": share_first(before), "after": share_first(after)}))
    return 0


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    try:
        return run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        say(f"train_reranker: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
