"""The record of an episode: token ids as they were sampled, with the text beside them. JSONL in and out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sorl_env.episode import STOP_REASONS
from sorl_env.files import atomic_text, numbered_lines

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: the tokens the environment added, then the tokens the policy sampled.

    Args:
        observation_ids: token ids of the observation, at least one (so that masks keep turns apart).
        action_ids: token ids as sampled, at least one.
        action_logprobs: log-probability of each action token (nats) under the policy that sampled it.
        reward: what this turn earned.
        observation_text, action_text: the same as text, for people and environments; training reads ids only.
        truncated: the engine cut the action at its length limit.

    Sequences become tuples of int or float. Raises ValueError where the lengths or values do not fit.
    """

    observation_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    action_logprobs: tuple[float, ...]
    reward: float
    observation_text: str
    action_text: str
    truncated: bool = False

    def __post_init__(self) -> None:
        _set(
            self,
            observation_ids=tuple(map(int, self.observation_ids)),
            action_ids=tuple(map(int, self.action_ids)),
        )
        _set(self, action_logprobs=tuple(map(float, self.action_logprobs)), reward=float(self.reward))
        _set(self, observation_text=joined(self.observation_text), action_text=joined(self.action_text))
        _set(self, truncated=bool(self.truncated))
        if len(self.action_ids) != len(self.action_logprobs):
            raise ValueError(
                f"turn has {len(self.action_ids)} action tokens but {len(self.action_logprobs)} logprobs; "
                "keep the engine's own ids and logprobs"
            )
        if not self.action_ids:
            raise ValueError("turn has no action token; an engine must sample at least one")
        if not self.observation_ids:
            raise ValueError("turn has no observation token; without one its mask would run into the turn before")
        if min(self.observation_ids) < 0 or min(self.action_ids) < 0:
            raise ValueError("turn holds a negative token id; padding has no place in a trajectory")
        if not all(map(math.isfinite, self.action_logprobs)):
            raise ValueError("turn holds a logprob that is not finite; a sampled token has a finite one")
        if not math.isfinite(self.reward):
            raise ValueError(f"turn has reward {self.reward}; it must be finite")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode.

    Args:
        turns: at least one.
        question_id: which question was played.
        group_id: episodes of one group share it (GRPO compares within groups).
        policy_version: number of updates behind the policy that sampled it.
        stop: one of STOP_REASONS.
        info: anything else that JSON can hold; tuples become lists, numpy scalars plain numbers.

    The token row is observation and action of turn 0, then of turn 1, and so on: nothing is encoded again, so
    the prompt of a turn starts with all the tokens of the turns before it.
    """

    turns: tuple[Turn, ...]
    question_id: str
    group_id: str | int
    policy_version: int
    stop: str
    info: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _set(self, turns=tuple(self.turns), policy_version=int(self.policy_version))
        _set(self, question_id=joined(self.question_id))
        _set(self, group_id=plain(self.group_id, "group_id"))
        if isinstance(self.group_id, bool) or not isinstance(self.group_id, (str, int)):
            raise ValueError(f"group_id must be a text or a whole number, got {self.group_id!r}")
        if not self.turns:
            raise ValueError(f"trajectory of question {self.question_id!r} has no turn; it needs at least one")
        if self.stop not in STOP_REASONS:
            raise ValueError(f"unknown stop {self.stop!r}; known: {', '.join(STOP_REASONS)}")
        _set(self, info=plain(self.info, "info"))

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def action_texts(self) -> tuple[str, ...]:
        return tuple(turn.action_text for turn in self.turns)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The first observation: what stood before the policy's first token."""
        return self.turns[0].observation_ids

    def token_ids(self) -> list[int]:
        """All tokens, (T,)."""
        return [token for turn in self.turns for token in (*turn.observation_ids, *turn.action_ids)]

    def loss_mask(self) -> list[bool]:
        """(T,): True exactly on sampled tokens."""
        return [turn_id >= 0 for turn_id in self.turn_ids()]

    def turn_ids(self) -> list[int]:
        """(T,): the turn's number on its action tokens, -1 on observations."""
        ids: list[int] = []
        for number, turn in enumerate(self.turns):
            ids += [-1] * len(turn.observation_ids) + [number] * len(turn.action_ids)
        return ids

    def logprobs(self) -> list[float]:
        """(T,): the sampler's log-probabilities on action tokens, 0.0 on observations."""
        row: list[float] = []
        for turn in self.turns:
            row += [0.0] * len(turn.observation_ids)
            row += turn.action_logprobs
        return row


def to_row(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as plain data; keys are the field names, and ``schema``."""
    return {
        "schema": SCHEMA,
        "question_id": trajectory.question_id,
        "group_id": trajectory.group_id,
        "policy_version": trajectory.policy_version,
        "stop": trajectory.stop,
        "info": dict(trajectory.info),
        "turns": [
            {
                "observation_ids": list(turn.observation_ids),
                "action_ids": list(turn.action_ids),
                "action_logprobs": list(turn.action_logprobs),
                "reward": turn.reward,
                "observation_text": turn.observation_text,
                "action_text": turn.action_text,
                "truncated": turn.truncated,
            }
            for turn in trajectory.turns
        ],
    }


def from_row(row: Mapping[str, Any]) -> Trajectory:
    """The inverse of ``to_row``.

    Raises ValueError for a missing field, another schema or a broken invariant.
    """
    schema = row.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise ValueError(f"trajectory has schema {schema!r}, this version reads {SCHEMA}")
    try:
        fields = {name: row[name] for name in ("question_id", "group_id", "policy_version", "stop")}
        return Trajectory(turns=tuple(Turn(**turn) for turn in row["turns"]), info=row.get("info", {}), **fields)
    except KeyError as error:
        raise ValueError(f"trajectory lacks the field {error}") from None
    except TypeError as error:
        raise ValueError(f"trajectory is malformed: {error}") from None


def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory]) -> int:
    """Write one trajectory a line (ASCII, so that any reader splits lines alike) and return how many.

    Atomic: the file appears complete or not at all. ``.gz`` is packed.
    """
    count = 0
    with atomic_text(Path(path)) as stream:
        for trajectory in trajectories:
            stream.write(json.dumps(to_row(trajectory), allow_nan=False, separators=(",", ":")) + "\n")
            count += 1
    return count


def read_jsonl(path: str | Path) -> list[Trajectory]:
    """The trajectories of a file. Raises ValueError, naming file and line, for one that is broken."""
    return list(iter_jsonl(path))


def iter_jsonl(path: str | Path) -> Iterator[Trajectory]:
    """Like ``read_jsonl``, one at a time."""
    path = Path(path)
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"expected a JSON object, got {type(row).__name__}")
            yield from_row(row)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def joined(text: str) -> str:
    """``text`` as a plain str, in which adjacent surrogate halves are joined to the character they encode.

    JSON cannot tell the two forms apart; a lone half stays.
    """
    if not isinstance(text, str):
        raise TypeError(f"expected a text, got {type(text).__name__}")
    text = str.__str__(text)
    if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def plain(value: Any, where: str) -> Any:
    """``value`` in JSON's own types. Raises ValueError, naming the place, for what JSON cannot hold."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return joined(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; only finite numbers can be stored")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; keys must be texts")
        return {joined(key): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ValueError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def _set(record: object, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(record, name, value)  # frozen dataclasses offer no other way to convert a field
