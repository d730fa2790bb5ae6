"""Compares two results question by question."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sorl_algos.evaluation.identity import differences
from sorl_algos.evaluation.statistics import mcnemar, paired_difference

# What two results must share unless one says that they need not, and what it is called.
MUST_MATCH = {"data": ("data", "sha256"), "prompt": ("prompt", "sha256")}


def compare(
    first: Mapping[str, Any], second: Mapping[str, Any], *, allow: Collection[str] = (), seed: int = 0
) -> dict[str, Any]:
    """For each score that both have: the two means, the paired difference (second - first), its interval and p values.

    Args:
        first, second: as `read_result` gives them.
        allow: of "data" and "prompt", what may differ. With other data only the questions that both played count.

    Returns:
        ``n``, ``left_out`` (questions of just one side), ``differs`` (dotted name, first, second), ``scores``: by name
        ``first``, ``second``, ``difference`` and, where every score is 0 or 1, ``only_first``, ``only_second`` (how
        often just one side scored) and ``mcnemar`` (exact p).

    Raises:
        ValueError: results that cannot be compared: other data or prompt, no question in common, or one whose text or
            gold answers differ.
    """
    for name in allow:
        if name not in MUST_MATCH:
            raise ValueError(f"unknown part {name!r}; {' and '.join(MUST_MATCH)} may be allowed to differ")
    one, two = first["identity"], second["identity"]
    if first["headline"] != second["headline"]:
        raise ValueError(f"the results score other kinds of questions: {first['headline']} and {second['headline']}")
    for name, (part, key) in MUST_MATCH.items():
        if name not in allow and one[part][key] != two[part][key]:
            raise ValueError(
                f"the results are of different {name}: {_named(one[part])} and {_named(two[part])}; "
                f"compare them all the same with --allow {name}"
            )
    rows = [_rows(result) for result in (first, second)]
    common = [question for question in rows[0] if question in rows[1]]
    if not common:
        raise ValueError("the results have no question in common")
    for question in common:
        if rows[0][question]["digest"] != rows[1][question]["digest"]:
            raise ValueError(f"question {question!r} has another text or other gold answers in the second result")
    names = [name for name in first["scores"] if name in second["scores"]]
    scores = {
        name: _score([rows[0][one][name] for one in common], [rows[1][one][name] for one in common], seed)
        for name in names
    }
    return {
        "n": len(common),
        "left_out": [len(part) - len(common) for part in rows],
        "headline": first["headline"],
        "differs": [[name, was, now] for name, was, now in differences(one, two)],
        "scores": scores,
    }


def _score(first: list[float], second: list[float], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "first": sum(first) / len(first),
        "second": sum(second) / len(second),
        "difference": paired_difference(first, second, seed=seed),
    }
    if {*first, *second} <= {0.0, 1.0}:
        pairs = list(zip(first, second, strict=True))
        found["only_first"], found["only_second"] = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))
        found["mcnemar"] = mcnemar(found["only_first"], found["only_second"])
    return found


def _rows(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    columns = result["per_question"]
    return {one: {name: columns[name][place] for name in columns} for place, one in enumerate(columns["id"])}


def _named(part: Mapping[str, Any]) -> str:
    size = f", {part['questions']} questions" if "questions" in part else ""
    return f"{part.get('name')!r} ({part['sha256'][:12]}{size})"
