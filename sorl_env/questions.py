"""Questions and sets of them: loading, selection, seeded order that a trainer can resume."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

from sorl_env.files import numbered_lines

_ANSWER_FIELDS = ("golden_answers", "answers", "answer")
_TEXT_FIELDS = ("question", "problem")
_USED_FIELDS = frozenset(("id", "kind", *_TEXT_FIELDS))


@dataclass(frozen=True, slots=True)
class Question:
    """One question with every accepted answer. ``kind`` groups questions ("open", "choice", "two_hop", …)."""

    id: str
    text: str
    answers: tuple[str, ...]
    kind: str = "open"
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"a question's id must be a text that is not empty, got {self.id!r}")
        if not isinstance(self.text, str) or not self.text.strip():
            raise ValueError(f"question {self.id!r} has no text")
        answers: object = self.answers
        if isinstance(answers, str):
            raise ValueError(f"question {self.id!r}: answers must be a sequence of texts, not one text")
        object.__setattr__(self, "answers", tuple(self.answers))
        if not any(isinstance(answer, str) and answer.strip() for answer in self.answers):
            raise ValueError(f"question {self.id!r} has no answer; give it at least one that is not blank")


class UnknownQuestion(KeyError):
    """No question has this id."""

    def __str__(self) -> str:
        return str(self.args[0])


class QuestionSet(Sequence[Question]):
    """An immutable sequence of questions with unique ids.

    Orders are made from hashes of the ids, not from a random generator: the same on every machine and
    version, and little disturbed when questions are added or removed.
    """

    def __init__(self, questions: Iterable[Question], name: str = "questions") -> None:
        self._questions = tuple(questions)
        self.name = name
        self._by_id = {question.id: question for question in self._questions}
        if len(self._by_id) != len(self._questions):
            seen: set[str] = set()
            double = next(q.id for q in self._questions if q.id in seen or seen.add(q.id))  # type: ignore[func-returns-value]
            raise ValueError(f"{name}: id {double!r} occurs twice; ids must be unique")
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._by_id)

    def by_id(self, question_id: str) -> Question:
        """The question with this id. Raises UnknownQuestion (a KeyError) that names ids that look alike."""
        try:
            return self._by_id[question_id]
        except (KeyError, TypeError):
            lowered = {known.lower(): known for known in list(self._by_id)[:5000]}  # enough for a hint
            near = difflib.get_close_matches(str(question_id).lower(), lowered, n=3)
            meant = f"; did you mean {', '.join(repr(lowered[name]) for name in near)}?" if near else ""
            raise UnknownQuestion(f"no question {question_id!r} among the {len(self)} of {self.name}{meant}") from None

    def select(self, ids: Iterable[str]) -> QuestionSet:
        """The questions with these ids, in that order."""
        return QuestionSet((self.by_id(question_id) for question_id in ids), self.name)

    def filter(self, kind: str | None = None, where: Callable[[Question], bool] | None = None) -> QuestionSet:
        """The questions of this kind and for which ``where`` holds, in their order. May be empty."""
        return QuestionSet(
            (q for q in self._questions if (kind is None or q.kind == kind) and (where is None or where(q))),
            self.name,
        )

    def order(self, seed: int) -> QuestionSet:
        """All questions in the order that belongs to ``seed``."""
        return QuestionSet((self._questions[index] for index in self._epoch(seed, 0)), self.name)

    def sample_by_hash(self, limit: int, seed: int = 0) -> QuestionSet:
        """At most ``limit`` questions chosen by hash, in their original order.

        A larger limit adds to the choice of a smaller one.
        """
        if limit < 0:
            raise ValueError(f"limit must not be negative, got {limit}")
        kept = sorted(self._epoch(seed, 0)[:limit])
        return QuestionSet((self._questions[index] for index in kept), self.name)

    def batch(self, seed: int, start: int, count: int) -> tuple[Question, ...]:
        """Questions ``start`` to ``start + count - 1`` of the endless stream of ``seed``.

        The stream is one reshuffled pass after another. It depends on the arguments alone, so a position is
        all that a trainer has to remember. Raises ValueError for an empty set or a negative number.
        """
        if not self._questions:
            raise ValueError(f"{self.name} is empty: there is nothing to draw from")
        if start < 0 or count < 0:
            raise ValueError(f"start and count must not be negative, got {start} and {count}")
        drawn = []
        for position in range(start, start + count):
            epoch, index = divmod(position, len(self._questions))
            drawn.append(self._questions[self._epoch(seed, epoch)[index]])
        return tuple(drawn)

    def stream(self, seed: int, start: int = 0) -> Iterator[Question]:
        """The endless stream that ``batch`` cuts from, beginning at position ``start``."""
        while True:
            yield self.batch(seed, start, 1)[0]
            start += 1

    def _make_epoch(self, seed: int, epoch: int) -> tuple[int, ...]:
        salt = f"{int(seed)}:{epoch}:".encode()

        def key(index: int) -> bytes:
            return blake2b(salt + self._questions[index].id.encode("utf-8", "surrogatepass"), digest_size=16).digest()

        return tuple(sorted(range(len(self._questions)), key=key))

    @overload
    def __getitem__(self, index: int) -> Question: ...
    @overload
    def __getitem__(self, index: slice) -> QuestionSet: ...
    def __getitem__(self, index: int | slice) -> Question | QuestionSet:
        if isinstance(index, slice):
            return QuestionSet(self._questions[index], self.name)
        return self._questions[index]

    def __len__(self) -> int:
        return len(self._questions)

    def __iter__(self) -> Iterator[Question]:
        return iter(self._questions)

    def __contains__(self, item: object) -> bool:
        return isinstance(item, Question) and self._by_id.get(item.id) == item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuestionSet) and self._questions == other._questions

    def __hash__(self) -> int:
        return hash(self._questions)

    def __repr__(self) -> str:
        return f"QuestionSet({self.name!r}, {len(self)} questions)"

    def __reduce__(self) -> tuple[type[QuestionSet], tuple[tuple[Question, ...], str]]:
        return QuestionSet, (self._questions, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuestionSet:
        return self  # immutable; gymnasium copies every keyword argument of an environment


def load_questions(path: str | Path, *, kind: str | None = None) -> QuestionSet:
    """Questions from a JSONL file (``.gz`` unpacked), one object a line.

    Fields: ``id``; ``question`` (or ``problem``); ``golden_answers``, ``answers`` or ``answer``: a text, a
    number, a list of them, or ``{"value": …, "aliases": […]}``; optional ``kind`` ("choice" where the row has
    ``options``, otherwise "open"; the argument overrules both). Everything else goes into ``metadata``.
    A broken line, a missing field, a double id or a row without answers raises ValueError with file, line and
    remedy.
    """
    path = Path(path)
    questions: list[Question] = []
    first_line: dict[str, int] = {}
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: not valid JSON ({error}); every line must be one JSON object") from None
        question = question_from_row(row, where, kind)
        if question.id in first_line:
            raise ValueError(
                f"{where}: id {question.id!r} is on line {first_line[question.id]} already; make ids unique"
            )
        first_line[question.id] = number
        questions.append(question)
    if not questions:
        raise ValueError(f"{path}: holds no question; expected one JSON object a line")
    return QuestionSet(questions, path.name)


def question_from_row(row: Any, where: str, kind: str | None = None) -> Question:
    """A Question from one decoded row; ``where`` names file and line in the ValueError of a bad one."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    question_id = row.get("id")
    if isinstance(question_id, bool) or not isinstance(question_id, (str, int)) or question_id == "":
        raise ValueError(f"{where}: field 'id' is missing or empty; give every question its own id")
    text = next((row[name] for name in _TEXT_FIELDS if row.get(name)), None)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: field 'question' is missing or empty (id {question_id!r})")
    source = next((name for name in _ANSWER_FIELDS if row.get(name) is not None), None)
    if source is None:
        raise ValueError(f"{where}: no field 'golden_answers', 'answers' or 'answer' (id {question_id!r})")
    answers = _answers(row[source], f"{where}: field {source!r} (id {question_id!r})")
    return Question(
        id=str(question_id),
        text=text.strip(),
        answers=answers,
        kind=kind or str(row.get("kind") or ("choice" if row.get("options") else "open")),
        metadata={name: value for name, value in row.items() if name not in _USED_FIELDS and name != source},
    )


def _answers(value: Any, where: str) -> tuple[str, ...]:
    """Distinct answers that are not blank, in their order."""
    if isinstance(value, dict) and "value" in value:
        value = [value["value"], *(value.get("aliases") or ())]
    given = value if isinstance(value, list) else [value]
    answers: dict[str, None] = {}
    for answer in given:
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
            raise ValueError(f"{where} must hold texts or numbers, got {type(answer).__name__}")
        if isinstance(answer, float) and not math.isfinite(answer):
            raise ValueError(f"{where} holds {answer}, which is no number")
        if str(answer).strip():
            answers[str(answer).strip()] = None
    if not answers:
        raise ValueError(f"{where} holds no answer; remove the row or give it at least one answer that is not blank")
    return tuple(answers)
