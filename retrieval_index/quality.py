"""How good a retriever is: test collections, answers found, overlap with another retriever."""

from __future__ import annotations

import csv
import json
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from retrieval_index.types import Hit, RetrievalError, Retriever

Judgements = dict[str, dict[str, int]]  # query id -> passage id -> how relevant


def load_queries(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read queries, ``{"id", "text"}`` a line.

    Raises:
        ValueError: a line that is not one; names file and line.
    """
    queries: dict[str, str] = {}
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                name, text = str(row["id"]), row["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f'{path}, line {number}: {{"id", "text"}} is wanted ({error!r})') from error
            if name in queries:
                raise ValueError(f"{path}, line {number}: query id {name} was used before")
            queries[name] = text
    return queries


def load_judgements(path: str | os.PathLike[str]) -> Judgements:
    """Read judgements: a header, then query id, passage id and score, parted by tabs (BEIR's form).

    Raises:
        ValueError: a line that is not one; names file and line.
    """
    judgements: Judgements = {}
    with open(path, encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t"), start=1):
            if number == 1 or not row:
                continue
            try:
                query, passage, score = row
                judgements.setdefault(query, {})[passage] = int(score)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: query, passage and whole score are wanted") from error
    return judgements


def measure(
    retriever: Retriever,
    queries: Mapping[str, str],
    judgements: Judgements,
    measures: Sequence[str] = ("nDCG@10", "R@100", "AP", "RR@10"),
    *,
    depth: int = 1000,
) -> dict[str, float]:
    """Means over the judged queries, worked out by ir-measures (trec_eval's definitions).

    The order of the hits counts, not their scores: equal scores are not shuffled as trec_eval would.

    Args:
        measures: names as ir-measures has them.
        depth: hits taken for each query.

    Raises:
        RuntimeError: ir-measures is not installed.
        ValueError: no judged query, a judged query without text, or an unknown measure.
    """
    try:
        import ir_measures  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise RuntimeError("measuring quality needs ir-measures: pip install ir-measures") from error
    if not judgements:
        raise ValueError("there is no judged query")
    if missing := [name for name in judgements if name not in queries]:
        raise ValueError(f"{len(missing)} judged queries have no text, the first is {missing[0]}")
    try:
        wanted = {name: ir_measures.parse_measure(name) for name in measures}
    except (NameError, ValueError, SyntaxError) as error:
        raise ValueError(f"unknown measure among {', '.join(measures)}: {error}") from error
    names = list(judgements)
    answers = retriever.search([queries[name] for name in names], depth)
    qrels = [
        ir_measures.Qrel(query, passage, score)
        for query, judged in judgements.items()
        for passage, score in judged.items()
    ]
    run = [
        ir_measures.ScoredDoc(name, hit.passage.id, float(-rank))
        for name, hits in zip(names, answers, strict=True)
        for rank, hit in enumerate(hits)
    ]
    found = ir_measures.calc_aggregate(wanted.values(), qrels, run)
    return {name: float(found[own]) for name, own in wanted.items()}


def answer_recall(
    retriever: Retriever, questions: Iterable[tuple[str, Sequence[str]]], depths: Sequence[int] = (1, 3, 5, 10)
) -> dict[int, float]:
    """Share of the questions for which some hit down to each depth holds an answer.

    Args:
        questions: question and gold answers. Leave yes/no questions out: any text holds "no".

    Raises:
        ValueError: no question.
    """
    asked = list(questions)
    if not asked:
        raise ValueError("there is no question")
    hits = retriever.search([question for question, _ in asked], max(depths))
    ranks = [first_with_answer(own, answers) for own, (_, answers) in zip(hits, asked, strict=True)]
    return {depth: sum(rank is not None and rank < depth for rank in ranks) / len(ranks) for depth in depths}


def first_with_answer(hits: Sequence[Hit], answers: Sequence[str]) -> int | None:
    """Place (from 0) of the first hit that holds an answer as whole words; None if there is none."""
    wanted = [words for answer in answers if (words := normal_words(answer)).strip()]
    for rank, hit in enumerate(hits):
        text = normal_words(f"{hit.passage.title} {hit.passage.text}")
        if any(words in text for words in wanted):
            return rank
    return None


def normal_words(text: str) -> str:
    """Lower case, decomposed, punctuation to spaces, articles dropped; one space around every word."""
    text = unicodedata.normalize("NFD", text.lower())
    text = "".join(" " if unicodedata.category(letter)[0] in "PS" else letter for letter in text)
    return f" {' '.join(word for word in text.split() if word not in ('a', 'an', 'the'))} "


def overlap(retriever: Retriever, exact: Retriever, queries: Sequence[str], top_k: int) -> float:
    """Mean share of the `exact` retriever's hits that `retriever` finds too (recall of an approximation).

    Queries without exact hits are left out.

    Raises:
        RetrievalError: no query has an exact hit, so there is nothing to compare.
    """
    shares = []
    for own, right in zip(retriever.search(queries, top_k), exact.search(queries, top_k), strict=True):
        if right:
            wanted = {hit.passage.id for hit in right}
            shares.append(len(wanted & {hit.passage.id for hit in own}) / len(wanted))
    if not shares:
        raise RetrievalError("the exact retriever found nothing for any query; there is nothing to compare")
    return sum(shares) / len(shares)
