"""The two files of an evaluated set: a line for each question while it runs, and the result when it is whole.

``NAME.questions.jsonl``: first the identity (all that decides the numbers), then a line for each session that worked
on it and one for each episode. It is only ever appended to, whole batches at a time, and synced: after a crash a last
line that was cut is dropped, and so is a batch of which a part is there.

``NAME.json``: the identity, where it was made, mean and interval of every score, stop reasons, and every question's
scores, which is what comparisons read.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_algos.evaluation.statistics import interval

SCHEMA = 1
HEADLINE = {"open": "exact_match", "choice": "choice_accuracy", "math": "math_equal"}
_OF_KIND = {
    "open": ("exact_match", "f1", "contains"),
    "choice": ("choice_accuracy", "unparseable"),
    "math": ("math_equal",),
}
_OF_ALL = ("searches", "turns", "valid_action_rate", "answered", "action_tokens")


class QuestionLog:
    """The lines of ``NAME.questions.jsonl``.

    Args:
        path: the file, made if it is not there.
        identity: compared with the one in the file.

    ``rows``: the episodes that are there, by (sample, question id).

    Raises:
        ValueError: a file with another identity (names the first difference), or a damaged one.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: dict[tuple[int, str], dict[str, Any]] = {}
        self.sessions: list[dict[str, Any]] = []
        identity = json.loads(json.dumps(identity))
        lines = _whole_lines(path) if path.exists() else []
        if lines and "identity" in lines[0]:
            self._check(lines[0]["identity"], identity)
            for line in lines[1:]:
                if "session" in line:
                    self.sessions.append(line["session"])
                else:
                    self.rows[line["sample"], line["id"]] = line
        elif lines:
            raise ValueError(f"{path} is no file of an evaluation; give another --output")
        self.identity = identity

    def _check(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        from sorl_algos.evaluation.identity import differences

        for name, was, now in differences(old, new):
            raise ValueError(
                f"{self.path} holds results with {name}={was!r}, this evaluation has {now!r}; "
                "give another --output, or --restart to start anew"
            )

    def begin(self, session: Mapping[str, Any], keep: Iterable[tuple[int, str]]) -> None:
        """Writes the file anew with the rows to keep, and a line for this session if the last one was another."""
        wanted = set(keep)
        self.rows = {key: row for key, row in self.rows.items() if key in wanted}
        if not self.sessions or self.sessions[-1] != dict(session):
            self.sessions.append(dict(session))
        lines: list[dict[str, Any]] = [{"identity": self.identity}, *({"session": one} for one in self.sessions)]
        lines += self.rows.values()
        write_atomically(self.path, "".join(_line(line) for line in lines))

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds a batch of episodes; it is on disk when this returns."""
        with self.path.open("ab") as file:
            file.write("".join(_line(row) for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows |= {(row["sample"], row["id"]): row for row in rows}


def episode_row(trajectory: Any, question: Any, sample: int, answer: str | None) -> dict[str, Any]:
    """What is kept of one episode."""
    kinds = [turn["action_kind"] for turn in trajectory.info["turns"]]
    return {
        "id": question.id,
        "sample": sample,
        "scores": dict(trajectory.info["scores"]),
        "stop": trajectory.stop,
        "searches": int(trajectory.info["searches"]),
        "turns": len(trajectory.turns),
        "valid_turns": sum(kind in ("search", "answer") for kind in kinds),
        "action_tokens": sum(len(turn.action_ids) for turn in trajectory.turns),
        "answer": answer,
        "gold": list(question.answers),
        "question": question.text,
        "action_texts": [turn.action_text for turn in trajectory.turns],
        "retrieved": [turn["retrieved_ids"] for turn in trajectory.info["turns"]],
    }


def scores_of(row: Mapping[str, Any], kind: str) -> dict[str, float]:
    """The numbers of one episode: those of its kind of question ("open", "choice", "math"), and those of all."""
    given = dict(row["scores"])
    if kind == "math" and "exact_match" in given:
        given["math_equal"] = given["exact_match"]
    found = {name: float(given.get(name, 0.0)) for name in _OF_KIND[kind]}
    return found | {
        "searches": float(row["searches"]),
        "turns": float(row["turns"]),
        "valid_action_rate": row["valid_turns"] / row["turns"],
        "answered": float(row["stop"] == "answered"),
        "action_tokens": float(row["action_tokens"]),
    }


def make_result(
    log: QuestionLog, questions: Sequence[Any], digests: Sequence[str], *, kind: str, samples: int, seed: int
) -> dict[str, Any]:
    """The result of a log that holds every episode. A question played several times counts with its mean."""
    names = (*_OF_KIND[kind], *_OF_ALL)
    columns: dict[str, list[float]] = {name: [] for name in names}
    for question in questions:
        played = [scores_of(log.rows[sample, question.id], kind) for sample in range(samples)]
        for name in names:
            columns[name].append(sum(scores[name] for scores in played) / samples)
    stops = Counter(log.rows[sample, question.id]["stop"] for question in questions for sample in range(samples))
    return {
        "schema": SCHEMA,
        "identity": log.identity,
        "sessions": log.sessions,
        "headline": HEADLINE[kind],
        "n": len(questions),
        "scores": {name: interval(values, seed=seed) for name, values in columns.items()},
        "stops": dict(sorted(stops.items())),
        "per_question": {"id": [one.id for one in questions], "digest": [one[:16] for one in digests], **columns},
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Atomic; one line for each column of the questions' scores."""
    head = json.dumps({**result, "per_question": None}, indent=1, ensure_ascii=True, allow_nan=False)
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in result["per_question"].items()]
    columns = ",\n  ".join(lines)
    write_atomically(path, head.replace('"per_question": null', '"per_question": {\n  ' + columns + "\n }") + "\n")


def read_result(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ValueError: no result, an unfinished one, or one of another format.
    """
    if not path.is_file():
        unfinished = path.with_suffix(".questions.jsonl").exists()
        hint = "the evaluation has not finished; run its command again" if unfinished else "no such file"
        raise ValueError(f"{path}: {hint}")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        known = result["schema"] == SCHEMA and {"identity", "scores", "per_question"} <= set(result)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no result of scripts/evaluate.py") from None
    if not known:
        raise ValueError(f"{path} is a result of format {result['schema']!r}, this version reads {SCHEMA}")
    return result


def write_atomically(path: Path, text: str) -> None:
    """Writes beside the file, syncs, renames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False) + "\n"


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that end; the last one of a file that a crash cut does not."""
    raw = path.read_bytes()
    lines = []
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            lines.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}, line {number}: damaged; give another --output, or --restart") from None
        if not isinstance(lines[-1], dict):
            raise ValueError(f"{path} is no file of an evaluation; give another --output")
    return lines
