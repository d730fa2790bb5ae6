"""The sets that search agents are measured on, by name: seven of questions, five of medicine, AIME.

A name is looked up as a file of a data directory, as ``scripts/prepare_data.py NAME --output DATA/NAME.jsonl`` makes
it. Nothing is downloaded here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from sorl_env.question_sets import PUBLIC_SETS, read_questions
from sorl_env.questions import QuestionSet

GROUPS: dict[str, tuple[str, ...]] = {
    "qa": ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"),
    "medical": ("medqa", "medmcqa", "pubmedqa", "mmlu_medical", "bioasq"),
    "aime": ("aime_2024", "aime_2025"),
}
_ALSO_CALLED = {  # other names that the same sets go by
    "medqa": ("medqa_usmle",),
    "mmlu_medical": ("mmlu_med", "mmlu"),
    "bioasq": ("bioasq_yn",),
    "aime_2024": ("aime2024", "aime24"),
    "aime_2025": ("aime2025", "aime25"),
    "math_500": ("math500",),
}
_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet", ".json")
ENVIRONMENTS = {"open": "SearchQA-v0", "choice": "MedicalQA-v0", "math": "MathQA-v0"}


def expand(names: list[str] | tuple[str, ...]) -> list[str]:
    """The names with groups (``GROUPS``) replaced by their sets. Raises ValueError for a name given twice."""
    all_names = [one for name in names for one in GROUPS.get(name, (name,))]
    twice = [name for name, count in Counter(all_names).items() if count > 1]
    if twice:
        raise ValueError(f"set {twice[0]!r} is given twice; name each set once")
    return all_names


def find_set(name: str, data: Path | None = None) -> tuple[str, QuestionSet, Path | None, Counter[str]]:
    """Short name, questions, file and rows left out (by reason) of a set.

    Args:
        name: ``world:SPLIT``, ``medical:SPLIT``, ``math:SPLIT`` (bundled, no file), a path, or a name that the data
            directory holds, in itself or in a folder of it. ``NAME:MARK`` (``pubmedqa:official_test``) takes the rows
            of a file in which the field MARK is true.
        data: that directory.

    Raises ValueError for a name that is none of these; the message says where was looked and what makes the file.
    """
    bundled, colon, split = name.partition(":")
    if colon and bundled in ("world", "medical", "math"):
        return name.replace(":", "_"), _bundled(bundled, split), None, Counter()
    whole, _, mark = (name, "", "") if Path(name).is_file() else name.partition(":")
    path = Path(whole) if Path(whole).is_file() else _search(whole, data)
    questions, left_out = read_questions(path, kind=PUBLIC_SETS[whole].kind if whole in PUBLIC_SETS else None)
    short = path.name.partition(".")[0] if path == Path(whole) else whole
    if mark:
        marked = questions.filter(where=lambda question: question.metadata.get(mark) is True)
        if not len(marked):
            raise ValueError(
                f'no row of {path} has "{mark}": true; name the whole set, {whole}, or a file whose rows are marked'
            )
        left_out[f"not marked {mark}"] = len(questions) - len(marked)
        short, questions = f"{short}_{mark}", marked
    return short, questions, path, left_out


def environment_of(questions: QuestionSet) -> str:
    """The environment that plays these questions. Raises ValueError for a mixture."""
    kinds = {question.kind if question.kind in ("choice", "math") else "open" for question in questions}
    if len(kinds) != 1:
        raise ValueError(f"{questions.name} mixes questions of kinds {', '.join(sorted(kinds))}; play them apart")
    return ENVIRONMENTS[kinds.pop()]


def _bundled(name: str, split: str) -> QuestionSet:
    if name == "world":
        from sorl_env.world import world_questions

        return world_questions(split)
    if name == "medical":
        from sorl_env.medical import medical_questions

        return medical_questions(split)
    from sorl_env.math_problems import math_questions

    return math_questions(split)


def _search(name: str, data: Path | None) -> Path:
    if "/" in name or name.endswith(_ENDINGS):
        raise ValueError(f"question file {name} does not exist")
    if data is None:
        raise ValueError(f"set {name!r} needs a directory of question files: give --data DIR")
    if not data.is_dir():
        raise ValueError(f"data directory {data} does not exist; {_how_to_make(name, data)}")
    for stem in (name, *_ALSO_CALLED.get(name, ())):
        for ending in _ENDINGS:
            for path in (data / f"{stem}{ending}", *sorted(data.glob(f"*/{stem}{ending}"))):
                if path.is_file():
                    return path
    raise ValueError(f"{data} holds no file of set {name!r}; {_how_to_make(name, data)}")


def _how_to_make(name: str, data: Path) -> str:
    known = [*dict.fromkeys((*(one for group in GROUPS.values() for one in group), *PUBLIC_SETS))]
    if name in PUBLIC_SETS:
        return f"make it with: python scripts/prepare_data.py {name} --output {data}/{name}.jsonl"
    if name in known:
        return f"its makers hand it out as a file: python scripts/prepare_data.py FILE --output {data}/{name}.jsonl"
    return f"known sets: {', '.join(known)}; groups: {', '.join(GROUPS)}; or world:test, medical:test, a file"
