"""Which option did an answer choose? Strict: what does not say so plainly chooses nothing.

An answer counts as a letter if all of it is one (``B``, ``(c)``, ``Option D.``), if it starts with one
(``B) Metformin``), or if it says so (``the correct answer is (B)``), where the last saying wins. An article
is no letter, two letters are no answer, and neither is a letter that no option has.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from sorl_env.normalize import normalize_answer
from sorl_env.questions import Question

_MARKUP = re.compile(r"[*_`$\\]+")
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_WHOLE = re.compile(
    r"(?:the\s+)?(?:(?:final|correct|best|right)\s+)?(?:(?:answer|option|choice)\s*(?:is|:)?\s*)?"
    r"[(\[]?([A-Za-z])[)\]]?\s*[.:]?",
    re.IGNORECASE,
)
_LEADING = re.compile(r"(?:[(\[]([A-Za-z])[)\]]|([A-Z])[):]|([A-Z])\.(?=\s+[A-Z0-9]))\s*[.:]?\s*\S")
_SAYING = re.compile(
    r"\b(?:answers?|option|choice)\b(?:\s*(?::|=|\b(?:is|are|was|(?:would|should|must|will)\s+be)\b))+\s*",
    re.IGNORECASE,
)
# a bracketed letter may be small, a bare one may not: "the answer is a virus"
_LETTER = r"(?:[(\[][A-Za-z][)\]]|[A-Z](?![\w'’]))"
_SAID = re.compile(rf"(?:option\s+|choice\s+)?({_LETTER})", re.IGNORECASE)
_MORE = re.compile(rf"\s*(?:,|/|&|\+|;|\band\b|\bor\b)\s*(?:\band\b\s*|\bor\b\s*)?(?:option\s+)?{_LETTER}")
_LABEL = re.compile(r"\b(yes|no|maybe)\b", re.IGNORECASE)


def letter_of(text: str, allowed: Sequence[str]) -> str | None:
    """The letter that ``text`` states, one of ``allowed`` (capitals), or None."""
    text = _bare(text)
    if not text:
        return None
    whole = _WHOLE.fullmatch(text)
    if whole:
        return _one_of(whole.group(1), allowed)
    said = [letter for saying in _SAYING.finditer(text) if (letter := _said(text, saying.end())) is not None]
    if said:
        return _one_of(said[-1], allowed)
    lines = [line for line in text.splitlines() if line.strip()]
    leading = [match for line in lines if (match := _LEADING.match(line.strip()))]
    if len(leading) == 1 and _LEADING.match(text):
        return _one_of(next(filter(None, leading[0].groups())), allowed)
    return None


def choice_of(text: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that ``text`` chooses, by letter or by the option's own text, or None.

    A text counts only if it equals exactly one option's: first letter for letter, save case and blanks, then
    after ``normalize_answer`` with articles kept, unless a digit is in it (``1.5`` is not ``15``). A bare
    letter, bracketed or not, is read as a letter even where some option's text is that letter.
    """
    letters = tuple(options)
    bare = _bare(text)
    if not _WHOLE.fullmatch(bare):
        chosen = _by_text(bare, options)
        if chosen is None:
            sayings = list(_SAYING.finditer(bare))
            if sayings and _said(bare, sayings[-1].end()) is None:
                chosen = _by_text(bare[sayings[-1].end() :].split("\n")[0], options)
        if chosen is not None:
            return chosen
    letter = letter_of(text, letters)
    if letter is None and {option.strip().lower() for option in options.values()} <= {"yes", "no", "maybe"}:
        label = yes_no_maybe(text)
        return None if label is None else _by_text(label, options)
    return letter


def yes_no_maybe(text: str) -> str | None:
    """The label that stands in ``text`` as a whole word, or None if there is none or more than one."""
    found = {label.lower() for label in _LABEL.findall(text)}
    return found.pop() if len(found) == 1 else None


def gold_letter(index: int, n_options: int, index_base: int) -> str | None:
    """The letter of a gold index counted from ``index_base``; None for -1, the mark of a hidden label.

    Raises ValueError for an index outside the options.
    """
    if index == -1:
        return None
    place = index - index_base
    if not 0 <= place < n_options:
        raise ValueError(f"gold index {index} (counted from {index_base}) is outside the {n_options} options")
    return string.ascii_uppercase[place]


def options_of(question: Question) -> dict[str, str]:
    """A question's options by letter. Raises ValueError, naming the question, if it has none."""
    given: Any = question.metadata.get("options")
    if isinstance(given, (list, tuple)):
        given = dict(zip(string.ascii_uppercase, given, strict=False))
    if not isinstance(given, Mapping) or len(given) < 2:
        raise ValueError(f"question {question.id!r} has no options; metadata['options'] must map letters to texts")
    return {str(letter).strip().upper(): str(option) for letter, option in given.items()}


def gold_of(question: Question) -> str:
    """The letter of the right option. Raises ValueError if no answer of the question is an option."""
    options = options_of(question)
    for answer in question.answers:
        if answer.strip().upper() in options:
            return answer.strip().upper()
        chosen = _by_text(answer, options)
        if chosen is not None:
            return chosen
    raise ValueError(f"question {question.id!r}: none of its answers {question.answers} is one of its options")


def without_options(query: str, question: Question) -> str:
    """``query`` without the texts of the question's options; "" where no word is left.

    An option that stands in the question itself stays. MIRAGE prescribes searching by the question alone, so
    that retrieval does not already choose.
    """
    asked = f" {normalize_answer(question.text, articles=True)} "
    for option in sorted(options_of(question).values(), key=len, reverse=True):
        words = re.findall(r"\w+", option)
        if words and f" {normalize_answer(option, articles=True)} " not in asked:
            pattern = r"(?<!\w)" + r"\W+".join(map(re.escape, words)) + r"(?!\w)"
            query = re.sub(pattern, " ", query, flags=re.IGNORECASE)
    query = " ".join(query.split())
    return query if re.search(r"\w", query) else ""


def _bare(text: str) -> str:
    """Without mark-up, and on one form of every character."""
    text = unicodedata.normalize("NFKC", text)
    text = _MARKUP.sub("", _WRAPPED.sub(r" \1 ", text))
    return text.strip().strip("\"'“”‘’").strip()


def _said(text: str, start: int) -> str | None:
    """The letter that a saying ends in: None if it is none, "" if there are several."""
    match = _SAID.match(text, start)
    if match is None:
        return None
    letter = match.group(1)
    if len(letter) == 1 and (letter.islower() or (re.match(r"\s+[a-z]", text[match.end() :]) and letter in "AI")):
        return None  # an article or a pronoun
    return "" if _MORE.match(text, match.end()) else letter.strip("()[]")


def _one_of(letter: str, allowed: Sequence[str]) -> str | None:
    return letter.upper() if letter.upper() in allowed else None


def _by_text(text: str, options: Mapping[str, str]) -> str | None:
    def plain(value: str) -> str:
        return " ".join(unicodedata.normalize("NFKC", value).casefold().split()).rstrip(".")

    same = [letter for letter, option in options.items() if plain(option) == plain(text)]
    if not same and not any(char.isdigit() for char in text):
        wanted = normalize_answer(text, articles=True)
        same = [
            letter for letter, option in options.items() if wanted and normalize_answer(option, articles=True) == wanted
        ]
    return same[0] if len(same) == 1 else None
