"""The question sets that come along, by name and split: ``world:train``, ``medical:dev``, ``math:test``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sorl_env.math_problems import math_questions
from sorl_env.medical import medical_questions
from sorl_env.questions import QuestionSet, load_questions
from sorl_env.world import world_questions

BUNDLED: dict[str, Callable[[str], QuestionSet]] = {
    "world": world_questions,
    "medical": medical_questions,
    "math": math_questions,
}
HELD_OUT = {"world": ("test", "test_unseen"), "medical": ("test",), "math": ("test",)}


def open_questions(spec: str, *, kind: str | None = None) -> QuestionSet:
    """The questions of ``NAME:SPLIT`` or of a JSONL file; ``kind`` is that of all questions of a file.

    Raises ValueError for an unknown split, a file that is not there or one that is broken.
    """
    name, colon, split = spec.partition(":")
    if colon and name in BUNDLED:
        return BUNDLED[name](split)
    if not Path(spec).is_file():
        known = ", ".join(f"{name}:train" for name in BUNDLED)
        raise ValueError(f"question file {spec} does not exist; give a JSONL file, or {known}")
    return load_questions(spec, kind=kind)


def held_out(spec: str) -> dict[str, QuestionSet]:
    """The test splits of the bundled set that ``spec`` names one split of; none for a file."""
    name, colon, _ = spec.partition(":")
    return {split: BUNDLED[name](split) for split in HELD_OUT.get(name, ())} if colon else {}
