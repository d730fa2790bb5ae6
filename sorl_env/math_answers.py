"""Are two mathematical answers equal?

Numbers (integers, decimals, fractions, with signs, leading zeros and thousands commas), letters and lists of
them are compared here, exactly. Everything else goes to math-verify (sympy) in a worker process, because
symbolic work cannot be stopped from within: a pair that takes longer than its time is unequal, and the worker
is replaced. That works in any thread and in any process. math-verify is needed only for such pairs.

- An answer in ``\\boxed{…}`` is taken out of it, braces matched; the last box counts. A box that was not
  closed is a response that was cut off: no answer.
- A list (``7, 12``) is an unordered set of which all members are required and no others allowed; in round or
  square brackets the order counts.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

TIMEOUT_S = 5.0
_START_S = 60.0  # importing sympy on a busy machine
_LONGEST = 1000
_MOST_KNOWN = 20_000

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_RATIO = re.compile(r"([+-]?\d+)/(\d+)")
_FRACTION = re.compile(r"([+-]?)\\frac(?:\{([+-]?\d+)\}|(\d))(?:\{([+-]?\d+)\}|(\d))")
_ASSIGNMENT = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?=(?=[^=])")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|~|\\(?:quad|qquad|left|right|displaystyle)(?![A-Za-z])")


def math_equal_score(prediction: str, gold: str) -> float:
    """1.0 if the answer in ``prediction`` equals ``gold``, otherwise 0.0."""
    return float(math_equal_texts(prediction, gold))


def math_equal_texts(prediction: str, gold: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the two answers are equal; False for a prediction without one. Takes at most about
    ``timeout_s``.

    Raises ImportError, with the remedy, if the pair needs math-verify and it is not installed.
    """
    predicted, wanted = boxed(prediction), boxed(gold)
    if predicted is None or wanted is None:
        return False
    return _equal(clean(predicted), clean(wanted), timeout_s)


def boxed(text: str) -> str | None:
    """The content of the last ``\\boxed``; all of ``text`` if there is no box; None for one that was not
    closed.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return text
    start = boxes[-1].end()
    if start >= len(text):
        return None
    if text[start] != "{":
        return text[start:].split(maxsplit=1)[0].rstrip(".,$")  # \boxed 2
    depth = 0
    for place in range(start, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[start + 1 : place]
    return None


def clean(text: str) -> str:
    """One spelling for what means the same: no dollar signs, spacing commands, text wrappers or ``x =``."""
    text = text.strip().strip("$").strip().removeprefix("\\(").removesuffix("\\)")
    text = text.replace("−", "-").replace("{,}", ",").replace("\\%", "").removesuffix("%")
    text = _SPACING.sub("", _TEXT.sub(r" \1 ", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")))
    text = re.sub(r"\^\{?\\circ\}?|\\degree|°", "", text).strip().rstrip(".").strip()
    if re.fullmatch(r"\(\s*[A-Za-z]\s*\)", text):
        text = text[1:-1].strip()  # a lettered choice
    without_blanks = re.sub(r"\s+", "", text)
    assigned = _ASSIGNMENT.match(without_blanks)
    if assigned and "," not in without_blanks:
        text = without_blanks[assigned.end() :]
    return _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)


def number(text: str) -> Fraction | None:
    """The exact value of a plain number, decimal or fraction, or None for anything else."""
    text = re.sub(r"\s+", "", text)
    if len(text) > _LONGEST:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    ratio = _RATIO.fullmatch(text)
    if ratio and int(ratio.group(2)):
        return Fraction(int(ratio.group(1)), int(ratio.group(2)))
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        sign, long_top, short_top, long_bottom, short_bottom = fraction.groups()
        bottom = int(long_bottom or short_bottom)
        return None if bottom == 0 else Fraction(int(f"{long_top or short_top}"), bottom) * (-1 if sign == "-" else 1)
    return None


def members(text: str) -> tuple[bool, list[str]]:
    """Whether the order counts, and the parts of a list at its commas (``and`` and ``or`` too) outside
    brackets.
    """
    text = text.strip()
    ordered = False
    inner = _inside(text)
    if inner is not None and len(_split(inner)) > 1:
        ordered, text = text[0] != "\\", inner
    return ordered, _split(text)


def _equal(predicted: str, wanted: str, timeout_s: float) -> bool:
    if not predicted or not wanted:
        return False
    if re.sub(r"\s+", "", predicted) == re.sub(r"\s+", "", wanted):
        return True
    values = number(predicted), number(wanted)
    if values[0] is not None and values[1] is not None:
        return values[0] == values[1]
    in_order, parts = members(predicted)
    wanted_in_order, wanted_parts = members(wanted)
    if max(len(parts), len(wanted_parts)) > 1:
        if len(parts) != len(wanted_parts) or (in_order and wanted_in_order and predicted[0] != wanted[0]):
            return False
        deadline = time.monotonic() + timeout_s
        return _all_paired(parts, wanted_parts, in_order or wanted_in_order, deadline)
    if max(len(predicted), len(wanted)) > _LONGEST:
        return False
    if all(re.fullmatch(r"[A-Za-z][A-Za-z ]*", text) for text in (predicted, wanted)):
        return predicted.lower() == wanted.lower() if len(wanted) > 1 else predicted == wanted
    return _WORKER.equal(predicted, wanted, timeout_s)


def _all_paired(parts: list[str], wanted: list[str], ordered: bool, deadline: float) -> bool:
    """Whether every wanted part has a part of its own that equals it."""
    left = list(parts)
    for part in wanted:
        for place in [0] if ordered else range(len(left)):
            time_left = deadline - time.monotonic()
            if time_left > 0 and _equal(clean(left[place]), clean(part), time_left):
                del left[place]
                break
        else:
            return False
    return True


def _inside(text: str) -> str | None:
    """What one pair of brackets around the whole text holds."""
    for opening, closing in (("(", ")"), ("[", "]"), ("\\{", "\\}"), ("(", "]"), ("[", ")")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            inner = text[len(opening) : -len(closing)]
            depth = 0
            for char in inner:
                depth += (char in "([{") - (char in ")]}")
                if depth < 0:
                    return None
            return inner
    return None


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[(\[{]|[)\]}]|[,;]|\b(?:and|or)\b", text):
        token = match.group()
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


class _Worker:
    """A process that compares expressions, started when first needed, replaced when it takes too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._known: dict[tuple[str, str], bool] = {}
        self.timeouts = 0

    def equal(self, predicted: str, wanted: str, timeout_s: float) -> bool:
        with self._lock:
            known = self._known.get((predicted, wanted))
            if known is not None:
                return known
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([predicted, wanted]).encode() + b"\n")
                process.stdin.flush()
                reply = _read_line(process.stdout.fileno(), timeout_s)
            except BrokenPipeError:
                reply = b""
            if reply is None:
                self.timeouts += 1
            if not reply:  # too late, or the process died of this pair
                self.stop()
                return False
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            return self._known.setdefault((predicted, wanted), reply.strip() == b"true")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def forget(self) -> None:
        """In a forked child: the process belongs to the parent, and a lock may be held by a thread that is
        gone.
        """
        self._lock, self._process = threading.Lock(), None

    def _start(self) -> subprocess.Popen[bytes]:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("this answer needs math-verify to be compared; run: pip install math-verify==0.9.0")
        script = Path(__file__).with_name("math_worker.py")
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        self._process = process
        if _read_line(process.stdout.fileno(), _START_S) != b"ready\n":
            self.stop()
            raise RuntimeError("the math worker did not start; does `python -c 'import math_verify'` work?")
        return process


def _read_line(descriptor: int, timeout_s: float) -> bytes | None:
    """A line, "" at the end of the stream, or None if the time ran out."""
    line, deadline = b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        piece = os.read(descriptor, 4096)
        if not piece:
            return b""
        line += piece
    return line


_WORKER = _Worker()
atexit.register(_WORKER.stop)
os.register_at_fork(after_in_child=_WORKER.forget)
