"""What the environment writes back: passages between ``<information>`` tags, and hints.

Passage text is not trusted. Before it is shown,

- white space is collapsed, so that a passage is one line and cannot forge a ``Doc`` header;
- ``<`` becomes ``‹`` wherever it could open a tag or a special token of a chat template, that is unless a
  blank, a digit or ``=`` follows (``p < 0.05`` and ``x<3`` stay as they are); fullwidth look-alikes likewise;
- bracketed control words of chat templates (``[INST]`` and so on) get round brackets;
- control characters vanish, lone surrogates become U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from retrieval_index.types import Hit

OPEN, CLOSE = "<information>", "</information>"
NOTHING_FOUND = "No passage found."

_TAG_WORDS = 2  # the wrapper's tags count one word each
_FEWEST_WORDS_A_PASSAGE = 8

_OPENING = re.compile(r"[<＜﹤](?![\s=]|\d(?!x))")
_CHAT_WORD = re.compile(
    r"\[(/?(?:INST|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|AVAILABLE_TOOLS|SYSTEM_PROMPT|ARGS|CALL_ID|THINK|"
    r"IMG|IMG_BREAK|IMG_END|AUDIO|PREFIX|MIDDLE|SUFFIX))\]"
)
_CONTROLS = dict.fromkeys([*range(0x00, 0x20), *range(0x7F, 0xA0)])
_SURROGATE = re.compile("[\ud800-\udfff]")


def escape(text: str) -> str:
    """``text`` on one line, unable to forge a tag, a header or a special token (rules above)."""
    line = " ".join(text.split())
    if line.isascii() and "<" not in line and "[" not in line and line.isprintable():
        return line  # the common case, several times faster
    line = _SURROGATE.sub("\ufffd", line.translate(_CONTROLS))
    return _CHAT_WORD.sub(r"(\1)", _OPENING.sub("‹", line))


def render_observation(hits: Sequence[Hit], max_words: int | None = None) -> str:
    """The observation after a search.

    Form: ``\\n\\n<information>Doc 1(Title: T) text\\nDoc 2(Title: U) text</information>\\n\\n``; a passage
    without title has no ``(Title: …)``. ``max_words`` bounds the words between blank lines, the two tags
    counting one
    each: passages share it evenly and what a short one leaves over goes to the longer ones; where that would
    leave a passage fewer than 8 words the last passages are dropped instead. The closing tag is never cut.
    """
    lines = [_passage_line(number, hit) for number, hit in enumerate(hits, start=1)] or [NOTHING_FOUND]
    if max_words is not None:
        lines = _fit(lines, max_words - _TAG_WORDS)
    return "\n\n" + OPEN + "\n".join(lines) + CLOSE + "\n\n"


def cut_block(body: str, max_words: int, separator: str = "") -> str:
    """``body`` cut to ``max_words`` words, tags included, and wrapped; the body is escaped first."""
    words = escape(body).split(" ")[: max(0, max_words - _TAG_WORDS)]
    return separator.join([OPEN, " ".join(words), CLOSE])


def hint(reason: str, allowed: Sequence[str]) -> str:
    """The observation after a turn without an action: what was wrong, and the forms that are allowed."""
    return f"\n\nNot a valid action: {reason}. Write {' or '.join(allowed)}.\n\n"


def budget_note(searches_left: int, words_left: int | None = None) -> str:
    """A line that tells the agent how many searches it still has, and how many words where they are limited."""
    words = "" if words_left is None else f" Words left: {words_left}."
    return f"Searches left: {searches_left}.{words}\n\n"


def _passage_line(number: int, hit: Hit) -> str:
    title, text = escape(hit.passage.title), escape(hit.passage.text)
    header = f"Doc {number}(Title: {title})" if title else f"Doc {number}"
    return f"{header} {text}" if text else header


def _fit(lines: Sequence[str], budget: int) -> list[str]:
    """The lines cut so that together they have at most ``budget`` words."""
    budget = max(budget, 1)
    words = [line.split(" ") for line in lines]
    if sum(map(len, words)) <= budget:
        return list(lines)
    words = words[: max(1, min(len(words), budget // _FEWEST_WORDS_A_PASSAGE))]
    shares = fair_shares([len(line) for line in words], budget)
    return [" ".join(line[:share]) for line, share in zip(words, shares, strict=True)]


def fair_shares(wanted: Sequence[int], budget: int) -> list[int]:
    """How ``budget`` units are shared: evenly, nobody getting more than wanted, the odd ones to the first.

    >>> fair_shares([10, 2, 10], 12)
    [5, 2, 5]
    """
    shares = [0] * len(wanted)
    left = min(budget, sum(wanted))
    for place, index in enumerate(sorted(range(len(wanted)), key=lambda i: (wanted[i], -i))):
        shares[index] = min(wanted[index], left // (len(wanted) - place))
        left -= shares[index]
    return shares
