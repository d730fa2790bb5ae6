"""An audit of recorded trajectories: does training read what the policy sampled?

It looks at rows of plain data and goes on after a fault, so that a broken file is described whole. Counted are

- turns whose text, encoded again, gives other ids than were sampled (re-tokenisation drift: harmless as long as
  nothing encodes text for training, and a measure of what would go wrong if something did);
- turns whose ids, decoded, give another text than was recorded;
- mask runs that touch: an action with no observation token before it, so that two turns look like one;
- action tokens without a log-probability, with one that is not finite, or with one above 0;
- log-probabilities of exactly 0, the mark of tokens that a program added (a certain token also has it);
- rows that break any other invariant of a trajectory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sorl_env.trajectory import from_row
from sorl_env.verl_rows import trajectory_from_verl


class Tokenizer(Protocol):
    """What is asked of a tokenizer (those of transformers answer it)."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


_EXAMPLES = 5

FAULTS = {
    "touching": "mask runs that touch the run before",
    "no_logprob": "action tokens without a log-probability",
    "bad_logprob": "log-probabilities that are not finite or above 0",
    "other_text": "turns whose ids decode to another text than the one recorded",
    "broken": "rows that are no trajectory",
}
REMARKS = {
    "drift": "turns whose text encodes to other ids than were sampled",
    "zero_logprob": "log-probabilities of exactly 0",
}


@dataclass(slots=True)
class Audit:
    """What was counted. ``found`` has the keys of FAULTS and REMARKS; ``examples`` up to five places of each."""

    trajectories: int = 0
    turns: int = 0
    tokens: int = 0
    action_tokens: int = 0
    decoded: bool = False
    found: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """No fault (remarks do not count)."""
        return not any(self.found[name] for name in FAULTS)

    def lines(self) -> list[str]:
        """The report, one finding a line."""
        report = [
            f"{self.trajectories:,} trajectories, {self.turns:,} turns, {self.tokens:,} tokens, "
            f"{self.action_tokens:,} of them sampled"
        ]
        for name, meaning in (FAULTS | REMARKS).items():
            if name in ("drift", "other_text") and not self.decoded:
                report.append(f"{'-':>8}  {meaning} (needs the tokenizer)")
                continue
            places = "; ".join(self.examples.get(name, ()))
            report.append(f"{self.found[name]:>8,}  {meaning}" + (f": {places}" if places else ""))
        return report

    def note(self, name: str, place: str, count: int = 1) -> None:
        if count:
            self.found[name] += count
            examples = self.examples.setdefault(name, [])
            if len(examples) < _EXAMPLES:
                examples.append(place)


def audit(rows: Iterable[Mapping[str, Any]], tokenizer: Tokenizer | None = None) -> Audit:
    """Audit rows of a trajectory file (``trajectory_files.raw_rows``), ours or verl's.

    tokenizer: the one that sampled them; None leaves drift and texts unchecked.
    """
    result = Audit(decoded=tokenizer is not None)
    for number, row in enumerate(rows, start=1):
        result.trajectories += 1
        place = f"row {number} ({row.get('question_id') or row.get('uid')})"
        if "response_mask" in row:
            _verl_row(result, row, place)
        else:
            _own_row(result, row, place, tokenizer)
    return result


def _own_row(result: Audit, row: Mapping[str, Any], place: str, tokenizer: Tokenizer | None) -> None:
    before = sum(result.found[name] for name in FAULTS)
    for index, turn in enumerate(row.get("turns") or ()):
        where = f"{place}, turn {index + 1}"
        observed, sampled = list(turn.get("observation_ids") or ()), list(turn.get("action_ids") or ())
        result.turns += 1
        result.tokens += len(observed) + len(sampled)
        result.action_tokens += len(sampled)
        result.note("touching", where, int(not observed))
        _logprobs(result, list(turn.get("action_logprobs") or ()), len(sampled), where)
        if tokenizer is not None:
            text = tokenizer.decode(sampled, skip_special_tokens=True)
            result.note("other_text", where, int(text != turn.get("action_text", "")))
            again = tokenizer.encode(tokenizer.decode(sampled, skip_special_tokens=False), add_special_tokens=False)
            result.note("drift", where, int(list(again) != sampled))
    if sum(result.found[name] for name in FAULTS) == before:
        try:
            from_row(row)
        except (ValueError, TypeError, AttributeError) as error:
            result.note("broken", f"{place}: {error}")


def _verl_row(result: Audit, row: Mapping[str, Any], place: str) -> None:
    mask = [bool(sampled) for sampled in row["response_mask"]]
    logprobs = list(row.get("rollout_log_probs") or ())
    runs = sum(here and not before for before, here in zip([False, *mask], mask, strict=False))
    result.turns += runs
    result.tokens += len(row.get("prompts") or ()) + len(mask)
    result.action_tokens += sum(mask)
    turns = row.get("action_texts")
    if turns is not None:  # how many turns there were is known: fewer runs means that some touch
        result.note("touching", place, max(0, len(turns) - runs))
    given = [logprob for logprob, sampled in zip(logprobs, mask, strict=False) if sampled]
    _logprobs(result, given, sum(mask), place)
    if len(logprobs) >= len(mask):
        try:
            trajectory_from_verl(row)
        except (ValueError, KeyError, TypeError) as error:
            result.note("broken", f"{place}: {error}")


def _logprobs(result: Audit, logprobs: Sequence[Any], wanted: int, where: str) -> None:
    numbers = [value for value in logprobs[:wanted] if isinstance(value, (int, float))]
    result.note("no_logprob", where, wanted - len(numbers))
    result.note("bad_logprob", where, sum(not math.isfinite(value) or value > 0 for value in numbers))
    result.note("zero_logprob", where, sum(value == 0 for value in numbers))
