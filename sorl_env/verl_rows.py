"""verl's two kinds of rows, both ways: training rows (questions) and rollout rows (trajectories).

Training rows: ``data_source, prompt[{role, content}], ability, reward_model{style, ground_truth{target[]}},
extra_info{split, index, …}``; ours put the question itself into ``extra_info``, so nothing is lost.

Rollout rows carry the names of verl's batches: ``prompts``, ``responses``, ``response_mask``,
``rollout_log_probs``, ``token_level_scores`` (a turn's reward on its last sampled token), ``uid``. Turns are the runs
of ones in ``response_mask``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from sorl_env.episode import question_block
from sorl_env.prompts import prompt_text
from sorl_env.question_forms import plain_row
from sorl_env.questions import Question, question_from_row
from sorl_env.trajectory import Trajectory, Turn

_ABILITY = {"math": "math", "choice": "medical"}

QUESTION_SCHEMA: dict[str, Any] = {
    "data_source": "text",
    "prompt": [{"role": "text", "content": "text"}],
    "ability": "text",
    "reward_model": {"style": "text", "ground_truth": {"target": ["text"]}},
    "extra_info": {
        "split": "text", "index": "whole", "question_id": "text", "question": "text", "kind": "text",
        "metadata": "text",
    },
}  # fmt: skip


def question_to_verl(
    question: Question, *, data_source: str, split: str, index: int, prompt: str | Path = "search_r1"
) -> dict[str, Any]:
    """A training row of verl; ``prompt`` as in EpisodeRules."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt_text(prompt, question_block(question))}],
        "ability": _ABILITY.get(question.kind, "fact-reasoning"),
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
        "extra_info": {
            "split": split,
            "index": index,
            "question_id": question.id,
            "question": question.text,
            "kind": question.kind,
            "metadata": json.dumps(dict(question.metadata), sort_keys=True),
        },
    }


def question_from_verl(row: Mapping[str, Any]) -> Question:
    """The question of a training row: the very one, if ``question_to_verl`` wrote it; otherwise as well as the
    row tells it. Raises ValueError for a row that lacks what it needs.
    """
    return question_from_row(plain_row(row, "verl", 0), "verl row")


def trajectory_to_verl(trajectory: Trajectory) -> dict[str, Any]:
    """A rollout row: what verl keeps of an episode, and beside it what it has no name for."""
    prompt = len(trajectory.prompt_ids)
    scores = [0.0] * len(trajectory.token_ids())
    end = 0
    for turn in trajectory.turns:
        end += len(turn.observation_ids) + len(turn.action_ids)
        scores[end - 1] = turn.reward
    return {
        "prompts": list(trajectory.prompt_ids),
        "responses": trajectory.token_ids()[prompt:],
        "response_mask": [int(sampled) for sampled in trajectory.loss_mask()[prompt:]],
        "rollout_log_probs": trajectory.logprobs()[prompt:],
        "token_level_scores": scores[prompt:],
        "uid": json.dumps(trajectory.group_id),
        "question_id": trajectory.question_id,
        "policy_version": trajectory.policy_version,
        "stop": trajectory.stop,
        "observation_texts": [turn.observation_text for turn in trajectory.turns],
        "action_texts": [turn.action_text for turn in trajectory.turns],
        "truncated": [turn.truncated for turn in trajectory.turns],
        "info": dict(trajectory.info),
    }


def trajectory_from_verl(row: Mapping[str, Any]) -> Trajectory:
    """A trajectory from a rollout row, ours or one with the tensors alone (then without texts).

    Zeros after the last sampled token are padding; a score on a token that was not sampled counts for the turn before
    it. Raises ValueError where lengths do not fit, or nothing was sampled.
    """
    mask, responses = list(row["response_mask"]), list(row["responses"])
    columns = {name: list(row[name]) for name in ("rollout_log_probs", "token_level_scores")}
    for name, column in {"response_mask": mask, **columns}.items():
        if len(column) != len(responses):
            raise ValueError(f"verl row has {len(responses)} response tokens but {len(column)} of {name}")
    turns: list[Turn] = []
    waiting, place = list(row["prompts"]), 0
    for sampled, run in groupby(mask, key=bool):
        size = len(list(run))
        here = slice(place, place + size)
        place += size
        if not sampled:
            waiting += responses[here]
            earned = math.fsum(columns["token_level_scores"][here])
            if earned and not turns:
                raise ValueError("verl row has a score before its first sampled token, so it belongs to no turn")
            if earned:  # verl puts an episode's score on its last token, which a tool may have written
                turns[-1] = replace(turns[-1], reward=turns[-1].reward + earned)
            continue
        number = len(turns)
        turns.append(
            Turn(
                observation_ids=tuple(waiting),
                action_ids=tuple(responses[here]),
                action_logprobs=tuple(columns["rollout_log_probs"][here]),
                reward=sum(columns["token_level_scores"][here]),
                observation_text=_of(row, "observation_texts", number, ""),
                action_text=_of(row, "action_texts", number, ""),
                truncated=_of(row, "truncated", number, False),
            )
        )
        waiting = []
    uid = row.get("uid", "")
    return Trajectory(
        turns=tuple(turns),
        question_id=row.get("question_id", str(uid)),
        group_id=_group(uid),
        policy_version=row.get("policy_version", 0),
        stop=row.get("stop", "answered"),
        info=row.get("info") or {},
    )


def _of(row: Mapping[str, Any], name: str, number: int, otherwise: Any) -> Any:
    given = row.get(name) or ()
    return given[number] if number < len(given) else otherwise


def _group(uid: Any) -> str | int:
    try:
        read = json.loads(uid)
    except (TypeError, ValueError):
        return uid if isinstance(uid, int) else str(uid)
    return read if isinstance(read, (str, int)) and not isinstance(read, bool) else str(uid)
