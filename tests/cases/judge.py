"""Does what our code gave meet what a case expects? Knows the shapes of expectations, no values.

An op answers with a mapping of facts. Every key of the expectation is looked up in it:

- a key with an ending names a relation: ``query_len_at_most``, ``exit_code_not``, ``error_names``, …
- a text that is expected where the op gives true or false is a property, which must hold;
- remarks in brackets at the end of a text are for people;
- ``any_of`` needs one of its alternatives; ``never`` is what no answer may be; ``why`` and its kin are prose.

An expected key that the op does not report is a failure: nothing passes unseen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROSE = {"why", "assume", "rule", "documented", "documented_policy", "handled_like", "tol"}
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Raised:
    """What an op answers when the product refused: the kind of error and its message."""

    error: BaseException

    def facts(self) -> dict[str, Any]:
        message = str(self.error)
        return {"raises": type(self.error).__name__, "message": message, "error": message, "exit_code": 2}


def problems(expected: Mapping[str, Any], answer: Mapping[str, Any] | Raised) -> list[str]:
    """What is wrong with an answer, one line a finding; empty if the case passes."""
    facts = answer.facts() if isinstance(answer, Raised) else answer
    tolerance = float(expected.get("tol", TOLERANCE))
    found = []
    for key, wanted in expected.items():
        if key in PROSE:
            continue
        if key == "any_of":
            found += _any_of(wanted, facts, tolerance)
        elif key == "never":
            found += _never(wanted, expected, facts, tolerance)
        else:
            found += _one(key, wanted, facts, tolerance)
    found += [f"{place} is {number}" for place, number in _numbers(facts) if not math.isfinite(number)]
    return found


def _any_of(choices: Sequence[Any], facts: Mapping[str, Any], tolerance: float) -> list[str]:
    tried = []
    for choice in choices:
        if isinstance(choice, str):
            if choice == facts.get("outcome"):
                return []
            tried.append(f"outcome {facts.get('outcome')!r} is not {choice!r}")
        elif not set(choice) - PROSE:
            tried.append("a policy in prose")  # the op has to raise, or to give another alternative
        else:
            wrong = problems(choice | {"tol": tolerance}, facts)
            if not wrong:
                return []
            tried.append("; ".join(wrong))
    return ["no alternative holds: " + " | ".join(tried)]


def _never(unwanted: Any, expected: Mapping[str, Any], facts: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    given = [facts[key] for key in expected if key in facts]
    listed = unwanted if isinstance(unwanted, list) else [unwanted]
    for value in (unwanted, *listed):
        if not isinstance(value, str) and any(same(value, fact, tolerance) for fact in given):
            yield f"gave {value}, which it never may"


def _one(key: str, wanted: Any, facts: Mapping[str, Any], tolerance: float) -> list[str]:
    for ending, relation in _RELATIONS.items():
        if key.endswith(ending) and key not in facts:
            name = key.removesuffix(ending) or "message"
            if name not in facts:
                return [f"{name!r} is not reported"]
            return [] if relation(facts[name], wanted) else [f"{key}: {facts[name]!r:.200} against {wanted!r}"]
    if key not in facts:
        return [f"{key!r} is not reported (got {', '.join(map(str, facts))})"]
    return [] if same(wanted, facts[key], tolerance) else [f"{key}: expected {wanted!r}, got {facts[key]!r:.300}"]


def _has_all(text: Any, words: Any) -> bool:
    return all(re.search(rf"(?<![\w.]){re.escape(str(word))}(?!\.?\w)", str(text)) for word in words)


_RELATIONS = {
    "_at_most": lambda value, limit: value <= limit,
    "_at_least": lambda value, limit: value >= limit,
    "_under_s": lambda value, limit: value < limit,
    "_starts_with": lambda value, start: value.startswith(start),
    "_ends_with_after_strip": lambda value, end: value.strip().endswith(end),
    "ends_with_after_strip": lambda value, end: value.strip().endswith(end),
    "_not": lambda value, other: value != other,
    "_names": _has_all,
    "suggests": _has_all,
    "_pairs": lambda value, pairs: any(same(pair, value, 1e-5) for pair in pairs),
}


def same(wanted: Any, got: Any, tolerance: float) -> bool:
    """Equality with a tolerance for numbers; an expected mapping may hold fewer keys than the one given."""
    if isinstance(wanted, str):
        if isinstance(got, bool):
            return got  # a property in words, which the op has checked
        return isinstance(got, str) and _said(wanted) == _said(got)
    if isinstance(wanted, bool) or wanted is None:
        return got is wanted or (isinstance(got, bool) and got == wanted)
    if isinstance(wanted, (int, float)):
        return isinstance(got, (int, float)) and not isinstance(got, bool) and abs(got - wanted) <= tolerance
    if isinstance(wanted, Mapping):
        if isinstance(got, (int, float)):  # a number, and conditions on it
            values = [value for value in wanted.values() if not isinstance(value, bool)]
            return math.isfinite(got) and any(same(value, got, tolerance) for value in values)
        return isinstance(got, Mapping) and all(
            key in got and same(value, got[key], tolerance) for key, value in wanted.items()
        )
    if isinstance(wanted, Sequence):
        if isinstance(got, Mapping):  # names of facts that must all hold
            return all(got.get(name) is True for name in wanted)
        return (
            isinstance(got, Sequence)
            and not isinstance(got, str)
            and len(got) == len(wanted)
            and all(same(mine, given, tolerance) for mine, given in zip(wanted, got, strict=True))
        )
    return False


def _said(text: str) -> str:
    return re.sub(r"\s*\([^()]*\)$", "", text)


def _numbers(facts: Any, place: str = "answer") -> Iterator[tuple[str, float]]:
    if isinstance(facts, float):
        yield place, facts
    elif isinstance(facts, Mapping):
        for key, value in facts.items():
            yield from _numbers(value, f"{place}[{key!r}]")
    elif isinstance(facts, (list, tuple)):
        for index, value in enumerate(facts):
            yield from _numbers(value, f"{place}[{index}]")
