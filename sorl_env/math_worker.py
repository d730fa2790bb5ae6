"""The process behind ``math_answers``: reads pairs ``[prediction, gold]`` as JSON lines, writes true or
false.

Run as a script. It has no timeout of its own; the process that started it ends it when a pair takes too long.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import sys

_MOST_MEMORY = 4 << 30


def latex(text: str) -> str:
    """Plain spellings (``sqrt(2)``, ``2*pi``, ``x**2``) in the LaTeX that the parser reads."""
    text = text.replace("**", "^").replace("*", r"\cdot ")
    text = re.sub(r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|log|ln|exp|infty)(?![A-Za-z])", r"\\\1", text)
    return re.sub(r"\\sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)


def main() -> None:
    from math_verify import parse, verify  # type: ignore[import-untyped, unused-ignore]

    logging.disable(logging.CRITICAL)
    if sys.platform == "linux":  # elsewhere the limit is not honoured, or refused
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _MOST_MEMORY if hard == resource.RLIM_INFINITY else min(_MOST_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    print("ready", flush=True)
    for line in sys.stdin:
        prediction, gold = (parse(f"\\boxed{{{latex(text)}}}", parsing_timeout=None) for text in json.loads(line))
        equal = bool(prediction and gold) and verify(gold, prediction, timeout_seconds=None)
        print("true" if equal else "false", flush=True)


if __name__ == "__main__":
    main()
