"""What a run directory holds, read with patience: what is missing or broken becomes a note, not an error."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

CONFIG, METRICS, EVALUATIONS = "config.json", "metrics.jsonl", "evaluations.json"
ALARMS = "alarms.jsonl"
TRAJECTORIES = {"before": "trajectories_before.jsonl", "after": "trajectories_after.jsonl"}

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % bootstrap interval (None where it was not computed)."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def spread(self) -> bool:
        """Whether the interval is known."""
        return self.low is not None and self.high is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """Low and high end; the mean stands in for an end that is not known."""
        low, high = self.low, self.high
        return self.mean if low is None else low, self.mean if high is None else high


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one question set at one stage ("before" or "after" training)."""

    stage: str
    set_name: str
    n: int | None
    scores: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """One turn as text: the observation came before the action, `retrieved` came of the action's search."""

    observation_text: str
    action_text: str
    action_kind: str | None = None
    ratio: float | None = None
    advantage: float | None = None
    reward: float | None = None
    retrieved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """One episode as the page and the terminal show it."""

    question: str
    answers: tuple[str, ...]
    question_id: str
    reward: float | None
    stop: str
    turns: tuple[ShownTurn, ...]


@dataclass(frozen=True, slots=True)
class AlarmLine:
    """A reason of the collapse alarm that began to stand at an update."""

    update: float
    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, as far as its directory tells."""

    path: Path
    config: Mapping[str, Any]
    metrics: Mapping[str, Points]
    minutes: float | None
    evaluations: Mapping[tuple[str, str], Evaluation] = field(default_factory=dict)
    episodes: Mapping[str, list[ShownEpisode]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    alarms: tuple[AlarmLine, ...] = ()

    @property
    def updates(self) -> int:
        """Number of updates with a metrics line of training (evaluation-only lines do not count)."""
        seen = {x for name, points in self.metrics.items() if not name.startswith("eval/") for x, _ in points}
        return len(seen)


Named = tuple[str, Run]  # a run and what the page calls it


def read_run(run_dir: Path) -> Run:
    """Read a run directory.

    Raises ValueError if it is no directory or nothing in it was written by a training run.
    """
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a directory; give the directory of a training run")
    present = [name for name in (METRICS, EVALUATIONS, *TRAJECTORIES.values()) if (run_dir / name).is_file()]
    if not present:
        raise ValueError(
            f"{run_dir} holds no training run: no {METRICS}, no {EVALUATIONS}, no trajectories are in it; "
            "give the directory that a training run wrote"
        )
    notes: list[str] = []
    config = _read_json(run_dir / CONFIG, dict, notes) or {}
    metrics, minutes = _read_metrics(run_dir / METRICS, notes)
    evaluations = _read_evaluations(run_dir / EVALUATIONS, notes)
    episodes = {stage: _read_stage(run_dir / name, notes) for stage, name in TRAJECTORIES.items()}
    began = (run_dir / CONFIG).is_file() and config  # a run that was stopped before its first update
    if not (metrics or evaluations or any(episodes.values()) or began):
        raise ValueError(
            f"{run_dir} holds no training run: nothing in {', '.join(present)} comes from one; "
            "give the directory that a training run wrote"
        )
    alarms = _read_alarms(run_dir / ALARMS, notes)
    return Run(run_dir, config, metrics, minutes, evaluations, episodes, tuple(notes), alarms)


def read_episodes(path: Path) -> tuple[list[ShownEpisode], list[int]]:
    """Episodes of a trajectory file, and the numbers (from 1) of the lines that are not one."""
    episodes, broken = [], []
    for line_number, row in _json_lines(path):
        turns = row.get("turns") if row is not None else None
        if row is None or not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            broken.append(line_number)
        else:
            episodes.append(_episode(row, turns))
    return episodes, broken


def find(config: Mapping[str, Any], *names: str) -> str | None:
    """The first setting called one of `names`, outermost first; a group of settings answers with its name."""
    for name in names:
        level: list[Mapping[str, Any]] = [config]
        while level:
            for group in level:
                value = group.get(name)
                if isinstance(value, Mapping):
                    value = value.get("name")
                if value is not None and not isinstance(value, (Mapping, list, tuple)) and str(value):
                    return str(value)
            level = [value for group in level for value in group.values() if isinstance(value, Mapping)]
    return None


def find_number(config: Mapping[str, Any], *names: str) -> float | None:
    """Like `find`, for a finite number."""
    try:
        return _finite(float(find(config, *names) or "nan"))
    except ValueError:
        return None


def _episode(row: Mapping[str, Any], turns: list[Mapping[str, Any]]) -> ShownEpisode:
    info = row.get("info")
    info = info if isinstance(info, dict) else {}
    answers = row.get("answers") or info.get("answers") or ()
    notes = info.get("turns")  # a recorded Trajectory keeps what its environment said of each turn there
    if isinstance(notes, list) and len(notes) == len(turns) and all(isinstance(note, dict) for note in notes):
        turns = [{**note, **turn} for note, turn in zip(notes, turns, strict=True)]
    rewards = [_finite(turn.get("reward")) or 0.0 for turn in turns]
    return ShownEpisode(
        question=_text(row.get("question") or info.get("question")),
        answers=tuple(map(_text, answers)) if isinstance(answers, (list, tuple)) else (_text(answers),),
        question_id=_text(row.get("question_id")),
        reward=_finite(row["reward"]) if "reward" in row else sum(rewards),
        stop=_text(row.get("stop")),
        turns=tuple(_turn(turn) for turn in turns),
    )


def _turn(turn: Mapping[str, Any]) -> ShownTurn:
    retrieved = turn.get("retrieved", turn.get("retrieved_ids"))
    hits = retrieved if isinstance(retrieved, list) else []
    titles = [hit[-1] if isinstance(hit, list) and hit else hit for hit in hits]
    kind = turn.get("action_kind")
    return ShownTurn(
        observation_text=_text(turn.get("observation_text")),
        action_text=_text(turn.get("action_text")),
        action_kind=kind if isinstance(kind, str) else None,
        ratio=_finite(turn.get("ratio")),
        advantage=_finite(turn.get("advantage")),
        reward=_finite(turn.get("reward")),
        retrieved=tuple(map(_text, titles)),
    )


def _read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, Points], float | None]:
    if not path.is_file():
        notes.append(f"There is no {METRICS}: the curves are missing.")
        return {}, None
    series: dict[str, dict[float, float]] = {}
    gaps: dict[str, int] = {}
    broken: list[int] = []
    times: list[float] = []
    for line_number, row in _json_lines(path):
        update = _finite(row.get("update")) if row is not None else None
        if row is None or update is None:
            broken.append(line_number)
            continue
        for name, value in row.items():
            measured = _finite(value)
            if name == "time_s" and measured is not None:
                times.append(measured)
            elif name not in ("update", "time_s") and measured is not None:
                series.setdefault(name, {})[update] = (
                    measured  # a resumed run may repeat updates: the last one counts
                )
            elif name not in ("update", "time_s") and (value is None or isinstance(value, float)):
                gaps[name] = gaps.get(name, 0) + 1
    if broken:
        notes.append(_left_out(path, broken))
    if gaps:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(gaps.items()))
        notes.append(f"No finite value, shown as gaps: {listed}.")
    return {name: sorted(points.items()) for name, points in series.items()}, _minutes(times)


def _minutes(times: list[float]) -> float | None:
    """Minutes of training from the clock of the metrics lines; a resumed run may start its clock again."""
    if not times:
        return None
    if min(times) > 1e8:  # seconds since 1970
        return (max(times) - min(times)) / 60
    ends = [now for now, after in pairwise(times) if after < now]
    return (sum(ends) + times[-1]) / 60


def _read_evaluations(path: Path, notes: list[str]) -> dict[tuple[str, str], Evaluation]:
    found: dict[tuple[str, str], Evaluation] = {}
    for row in _read_json(path, list, notes) or []:
        if not isinstance(row, dict):
            continue
        scores = {}
        for name, value in row.items():
            if isinstance(value, dict) and (mean := _finite(value.get("mean"))) is not None:
                scores[name] = Interval(mean, _finite(value.get("low")), _finite(value.get("high")))
        stage, set_name = _text(row.get("stage")), _text(row.get("set"))
        if scores and set_name:
            n = _finite(row.get("n"))
            found[set_name, stage] = Evaluation(stage, set_name, None if n is None else int(n), scores)
    return found


def _read_alarms(path: Path, notes: list[str]) -> tuple[AlarmLine, ...]:
    if not path.is_file():
        return ()
    found, broken = [], []
    for line_number, row in _json_lines(path):
        update = _finite(row.get("update")) if row is not None else None
        if row is None or update is None:
            broken.append(line_number)
        else:
            found.append(AlarmLine(update, _text(row.get("rule")), _text(row.get("text"))))
    if broken:
        notes.append(_left_out(path, broken))
    return tuple(sorted(found, key=lambda line: line.update))


def _read_stage(path: Path, notes: list[str]) -> list[ShownEpisode]:
    if not path.is_file():
        return []
    episodes, broken = read_episodes(path)
    if broken:
        notes.append(_left_out(path, broken))
    return episodes


def _read_json(path: Path, kind: type, notes: list[str]) -> Any:
    if not path.is_file():
        notes.append(f"There is no {path.name} (yet).")
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
    except (ValueError, RecursionError):
        notes.append(f"{path.name} is not valid JSON and is left out.")
        return None
    if not isinstance(value, kind):
        notes.append(f"{path.name} holds no JSON {'object' if kind is dict else 'list'} and is left out.")
        return None
    return value


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Line numbers from 1 with the line's object, None for a line that holds none (one cut half-way, say)."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", errors="replace") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield line_number, row if isinstance(row, dict) else None


def _finite(value: object) -> float | None:
    """The value as a float, None unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
        return None
    return float(value) if math.isfinite(value) else None


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _left_out(path: Path, lines: list[int]) -> str:
    if len(lines) == 1:
        return f"{path.name}: line {lines[0]} could not be read and is left out."
    listed = ", ".join(map(str, lines[:5])) + (", …" if len(lines) > 5 else "")
    return f"{path.name}: {len(lines)} lines ({listed}) could not be read and are left out."
