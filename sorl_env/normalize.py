"""Answer normalisation: the steps of SQuAD's script, made aware of Unicode."""

from __future__ import annotations

import string
import unicodedata

_ARTICLES = frozenset(("a", "an", "the"))
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
# letters and accents that are typed as an apostrophe, and minus signs: NFKC leaves them or makes them accents
_VARIANTS = str.maketrans(dict.fromkeys("\u00b4\u02b9\u02bb\u02bc\u02bd\u02c8\u2032\u2035\u2212\u02d7\u2043", "'"))
_PASSES = 4


def normalize_answer(text: str, *, articles: bool = False) -> str:
    """Lower case, without punctuation, articles and superfluous blanks; applying it twice changes nothing.

    ``articles`` keeps a, an and the (``Vitamin A`` is no ``vitamin``).

    Steps, in SQuAD's order: NFKC and case folding; punctuation away (ASCII's and Unicode's, dashes, quotes
    and apostrophes of every kind, format characters; currency and other symbols beyond ASCII stay); the words
    a, an, the away; single blanks. A step that would leave nothing is not taken, so that ``A`` stays ``a``
    and ``%`` stays ``%``.
    """
    for _ in range(_PASSES):
        result = _one_pass(text, articles)
        # removing a character can bring an accent next to a letter, which then composes
        if text.isascii() or result == text:
            return result
        text = result
    return text


def answer_tokens(text: str) -> list[str]:
    """The words of the normalised text."""
    return normalize_answer(text).split()


def _one_pass(text: str, articles: bool) -> str:
    if text.isascii():
        folded = text.lower()
        bare = folded.translate(_ASCII_PUNCTUATION)
    else:
        folded = unicodedata.normalize("NFKC", text.translate(_VARIANTS)).casefold()
        bare = "".join(char for char in folded if not _is_punctuation(char))
    words = bare.split() or folded.split()
    kept = words if articles else [word for word in words if word not in _ARTICLES]
    return " ".join(kept or words)


def _is_punctuation(char: str) -> bool:
    category = unicodedata.category(char)
    return category[0] == "P" or category == "Cf" or char in string.punctuation
