"""Scoring rules of two published projects, faults included, for numbers that can be compared with theirs.

Search-R1 (its exact-match reward): the last ``<answer>…</answer>`` anywhere, thoughts and retrieved text
included; SQuAD's ASCII normalisation, so that an answer made of articles or punctuation alone is empty, and
equal to any other such answer. The example in Search-R1's own prompt counts as an answer there, so a whole
transcript needs two.

MIRAGE (its answer extraction for multiple choice): a fixed list of patterns, tried in turn; where none fits,
the answer is read as ``A``. Letters after D are not known to it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from sorl_env.actions import CutText, answer_of
from sorl_env.choices import gold_of
from sorl_env.questions import Question

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BETWEEN_TURNS = "\n\n<information></information>\n\n"

# in this order, the first that is found decides
_MIRAGE = tuple(
    re.compile(pattern)
    for pattern in (
        r"^\s*([ABCD])$", r"^\s*([ABCD]) or", r"^\s*([ABCD]) and", r"^\s*([ABCD])/", r"^\s*([ABCD]),",
        r"[Oo]ption ([ABCD])", r":\s*([ABCD])", r"^\s*([ABCD])\.", r'^\s*([ABCD])"', r"^\s*([ABCD]):",
    )
)  # fmt: skip


def search_r1_legacy(action_texts: Sequence[str], question: Question) -> float:
    """Search-R1's score of an episode played here, where passages cannot forge an answer."""
    found = _ANSWER.findall(_BETWEEN_TURNS.join(action_texts))
    return _search_r1_match(found[-1], question.answers) if found else 0.0


def search_r1_legacy_score(transcript: str, answers: Sequence[str]) -> float:
    """Search-R1's score of a whole transcript that begins with its prompt, which holds one example answer."""
    found = _ANSWER.findall(transcript)
    return _search_r1_match(found[-1], answers) if len(found) > 1 else 0.0


def mirage_legacy(action_texts: Sequence[str], question: Question) -> float:
    """MIRAGE's score: the letter its patterns find in the answer (or else in the last turn) equals the gold
    one.
    """
    answer = answer_of(action_texts)
    if answer is None:
        whole = [text for text in action_texts if not isinstance(text, CutText)]
        answer = whole[-1] if whole else ""
    return float(mirage_letter(answer) == gold_of(question))


def mirage_letter(text: str) -> str:
    """The letter that MIRAGE's patterns find; "A" where they find none."""
    for pattern in _MIRAGE:
        found = pattern.search(text)
        if found:
            return found.group(1)
    return "A"


def squad_normalize(text: str) -> str:
    """SQuAD's own normalisation: lower case, ASCII punctuation and articles away, single blanks."""
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def _search_r1_match(prediction: str, answers: Sequence[str]) -> float:
    wanted = squad_normalize(prediction.strip())
    return float(any(squad_normalize(answer) == wanted for answer in answers))
