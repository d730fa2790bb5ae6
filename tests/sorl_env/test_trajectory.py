"""Turns and trajectories: invariants, masks, JSONL both ways."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env.actions import CutText
from sorl_env.trajectory import Trajectory, Turn, iter_jsonl, read_jsonl, write_jsonl

HEAD = '{"question_id": "q", "group_id": 0, "policy_version": 0, "stop": "answered", "turns":'


def turn(observation: tuple[int, ...] = (1,), action: tuple[int, ...] = (2,), **changes: Any) -> Turn:
    values: dict[str, Any] = {
        "observation_ids": observation,
        "action_ids": action,
        "action_logprobs": (-0.5,) * len(action),
        "reward": 0.0,
        "observation_text": "o",
        "action_text": "a",
    }
    return Turn(**values | changes)


def trajectory(*turns: Turn, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {"question_id": "q", "group_id": 0, "policy_version": 3, "stop": "answered"}
    return Trajectory(turns=turns or (turn(),), **values | changes)


# every character, surrogate halves included
any_text = st.text(st.characters(codec=None), max_size=12)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
turns = st.builds(
    lambda ids, actions, texts, reward, truncated: Turn(
        ids, [a for a, _ in actions], [p for _, p in actions], reward, *texts, truncated
    ),
    st.lists(st.integers(0, 200_000), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 200_000), st.floats(-50, 0)), min_size=1, max_size=4),
    st.tuples(any_text, any_text),
    st.floats(-10, 10),
    st.booleans(),
)
trajectories = st.builds(
    Trajectory,
    st.lists(turns, min_size=1, max_size=3),
    any_text,
    any_text | st.integers(),
    st.integers(0, 9),
    st.sampled_from(["answered", "turn_limit", "length_limit", "retrieval_error"]),
    st.dictionaries(any_text, plain_values, max_size=3),
)


def test_mask_and_turn_ids_come_from_the_segments() -> None:
    # prompt 11..13, action 21 22, observation 31..33, action 41..43
    record = trajectory(turn((11, 12, 13), (21, 22)), turn((31, 32, 33), (41, 42, 43), reward=1.0))
    assert record.prompt_ids == (11, 12, 13)
    assert record.token_ids() == [11, 12, 13, 21, 22, 31, 32, 33, 41, 42, 43]
    assert record.loss_mask()[3:] == [True, True, False, False, False, True, True, True]
    assert record.turn_ids() == [-1, -1, -1, 0, 0, -1, -1, -1, 1, 1, 1]
    assert record.logprobs() == [0.0] * 3 + [-0.5] * 2 + [0.0] * 3 + [-0.5] * 3
    assert record.reward == 1.0
    assert record.action_texts == ("a", "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_logprobs": (-1.0, -1.0)}, "1 action tokens but 2 logprobs"),
        ({"action": ()}, "no action token"),
        ({"observation": ()}, "no observation token"),
        ({"observation": (-1,)}, "negative token id"),
        ({"action_logprobs": (float("nan"),)}, "not finite"),
        ({"action_logprobs": (float("-inf"),)}, "not finite"),
        ({"reward": float("inf")}, "reward inf"),
    ],
)
def test_broken_turns(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turn(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": "done"}, "unknown stop 'done'; known: answered"),
        ({"group_id": 1.5}, "group_id"),
        ({"group_id": True}, "group_id"),
        ({"info": {"x": float("nan")}}, r"info\['x'\] is nan"),
        ({"info": {"x": [object()]}}, r"info\['x'\]\[0\] is a object"),
        ({"info": {3: 1}}, "keys must be texts"),
    ],
)
def test_broken_trajectories(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trajectory(**changes)
    with pytest.raises(ValueError, match="no turn"):
        Trajectory((), "q", 0, 0, "answered")


def test_numpy_values_become_plain() -> None:
    made = turn(np.array([1, 2]), np.array([3]), action_logprobs=np.array([-0.25], dtype=np.float32))  # type: ignore[arg-type]
    assert made.observation_ids == (1, 2) and type(made.observation_ids[0]) is int
    record = trajectory(made, info={"ids": ("a", "b"), "n": np.int64(3), "v": np.array([1.5])}, group_id=np.int64(4))
    assert record.info == {"ids": ["a", "b"], "n": 3, "v": [1.5]} and type(record.group_id) is int
    assert type(turn(action_text=CutText("x")).action_text) is str


def test_records_cross_processes() -> None:
    record = trajectory(info={"a": [1]})
    assert pickle.loads(pickle.dumps(record)) == record
    hash(record)


@given(st.lists(trajectories, max_size=3))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, records: list[Trajectory]) -> None:
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    assert write_jsonl(path, records) == len(records)
    assert read_jsonl(path) == records
    assert path.read_bytes().count(b"\n") == len(records) == len(path.read_text(encoding="ascii").splitlines())


def test_hard_texts_keep_one_record_a_line(tmp_path: Path) -> None:
    texts = [
        "café \u2028 🧪",
        "cut \ufffd",
        "tab\tand\nnewline",
        "\x00\x1f\x85",
        "\ud83d",
        "\ud83d\ude00",
        "\ufeff",
    ]
    records = [trajectory(turn(action_text=text, observation_text=text)) for text in texts]
    for name in ("t.jsonl", "t.jsonl.gz"):
        write_jsonl(tmp_path / name, records)
        assert read_jsonl(tmp_path / name) == records
        assert list(iter_jsonl(tmp_path / name)) == records
    assert records[5].turns[0].action_text == "😀"
    assert (tmp_path / "t.jsonl").read_bytes().count(b"\n") == len(texts)
    packed = (tmp_path / "t.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "t.jsonl").read_bytes()


def test_writing_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "run" / "t.jsonl"
    write_jsonl(path, [trajectory()])

    def broken() -> Any:
        yield trajectory(question_id="other")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_jsonl(path, broken())
    assert [record.question_id for record in read_jsonl(path)] == ["q"]
    assert [entry.name for entry in path.parent.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: expected a JSON object"),
        ('{"schema": 99}', "line 2: trajectory has schema 99"),
        ("{}", "line 2: trajectory lacks the field 'question_id'"),
        (HEAD + " []}", "no turn"),
        (HEAD + ' [{"x": 1}]}', "malformed"),
    ],
)
def test_broken_files_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [trajectory()])
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(line + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl") as caught:
        read_jsonl(path)
    assert message in str(caught.value)
