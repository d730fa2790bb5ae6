"""Trajectory files by their ending: ``.jsonl`` and ``.jsonl.gz`` (see ``trajectory``), ``.parquet`` (here).

A parquet row holds what a line of JSONL holds, in typed columns; ``group_id`` and ``info`` are JSON texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sorl_env.files import numbered_lines
from sorl_env.parquet import read_rows, write_rows
from sorl_env.trajectory import Trajectory, from_row, read_jsonl, to_row, write_jsonl
from sorl_env.verl_rows import trajectory_from_verl, trajectory_to_verl

SCHEMA: dict[str, Any] = {
    "schema": "whole",
    "question_id": "text",
    "group_id": "text",
    "policy_version": "whole",
    "stop": "text",
    "info": "text",
    "turns": [
        {
            "observation_ids": ["whole"],
            "action_ids": ["whole"],
            "action_logprobs": ["number"],
            "reward": "number",
            "observation_text": "text",
            "action_text": "text",
            "truncated": "yes_no",
        }
    ],
}
VERL_SCHEMA: dict[str, Any] = {
    "prompts": ["whole"],
    "responses": ["whole"],
    "response_mask": ["whole"],
    "rollout_log_probs": ["number"],
    "token_level_scores": ["number"],
    "uid": "text",
    "question_id": "text",
    "policy_version": "whole",
    "stop": "text",
    "observation_texts": ["text"],
    "action_texts": ["text"],
    "truncated": ["yes_no"],
    "info": "text",
}


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory], *, verl: bool = False) -> int:
    """Write a file and return how many it holds. Atomic.

    verl: parquet with verl's rollout rows. Raises ValueError for another ending.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        make, schema = (trajectory_to_verl, VERL_SCHEMA) if verl else (to_row, SCHEMA)
        return write_rows(path, (_with_texts(make(one)) for one in trajectories), schema)
    if verl or not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"cannot write {path}: use .jsonl, .jsonl.gz or .parquet (verl's rows: .parquet alone)")
    return write_jsonl(path, trajectories)


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """The trajectories of a file, verl's rollout rows among them.

    Raises ValueError, naming file and row, for one that is broken.
    """
    if Path(path).suffix != ".parquet":
        return read_jsonl(path)
    made = []
    for number, row in enumerate(raw_rows(path), start=1):
        try:
            made.append(trajectory_from_verl(row) if "response_mask" in row else from_row(row))
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from None
    return made


def raw_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a file as plain data, unchecked: for an audit, which must not stop at the first fault."""
    path = Path(path)
    if path.suffix == ".parquet":
        for row in read_rows(path):
            info = json.loads(row["info"]) if isinstance(row.get("info"), str) else row.get("info") or {}
            group = {"group_id": json.loads(row["group_id"])} if isinstance(row.get("group_id"), str) else {}
            yield row | {"info": info} | group
        return
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
        yield row


def _with_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    group = {"group_id": json.dumps(row["group_id"])} if "group_id" in row else {}
    return {**row, **group, "info": json.dumps(row["info"], allow_nan=False)}
