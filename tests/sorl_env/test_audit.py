"""The audit finds each fault that was put into a file, and nothing in a sound one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sorl_env.audit import audit
from sorl_env.trajectory import Trajectory, Turn, to_row
from sorl_env.trajectory_files import raw_rows, read_trajectories, write_trajectories
from sorl_env.verl_rows import trajectory_from_verl, trajectory_to_verl
from tests.tokenizers import byte_level

SCRIPT = Path(__file__).parents[2] / "scripts" / "show_trajectories.py"


def made(tokenizer: Any = None) -> Trajectory:
    encode = (lambda text: tokenizer.encode(text, add_special_tokens=False)) if tokenizer else (lambda text: [7] * 3)
    texts = [("Question: x", "<search>hello</search>"), ("\n<b>found</b>", "<answer>hello</answer>")]
    turns = []
    for number, (seen, said) in enumerate(texts):
        ids = encode(said)
        turns.append(Turn(encode(seen), ids, [-0.5] * len(ids), float(number), seen, said))
    return Trajectory(turns, "q1", 4, 2, "answered", {"turns": [{"retrieved_ids": ["p"]}, {}]})


def broken(**changes: Any) -> dict[str, Any]:
    row = to_row(made())
    row["turns"][1] |= changes
    return row


def test_a_sound_file() -> None:
    tokenizer = byte_level()
    report = audit([to_row(made(tokenizer))] * 2, tokenizer)
    assert report.sound and report.found.total() == 0
    assert (report.trajectories, report.turns) == (2, 4)
    assert report.lines()[0].startswith("2 trajectories, 4 turns")


@pytest.mark.parametrize(
    ("row", "name", "count"),
    [
        (broken(observation_ids=[]), "touching", 1),
        (broken(action_logprobs=[-0.5]), "no_logprob", 2),
        (broken(action_logprobs=[-0.5, None, -0.5]), "no_logprob", 1),
        (broken(action_logprobs=[-0.5, float("nan"), 0.25]), "bad_logprob", 2),
        (broken(action_logprobs=[-0.5, -0.5, 0.0]), "zero_logprob", 1),
        (to_row(made()) | {"stop": "tired"}, "broken", 1),
        (to_row(made()) | {"turns": []}, "broken", 1),
    ],
)
def test_each_fault_is_found_and_named(row: dict[str, Any], name: str, count: int) -> None:
    report = audit([to_row(made()), row])
    assert report.found == {name: count}
    assert report.sound is (name == "zero_logprob")
    assert "row 2 (q1)" in report.examples[name][0]


def test_drift_and_other_texts_need_the_tokenizer() -> None:
    tokenizer = byte_level()
    row = to_row(made(tokenizer))
    # "hello" is one piece when encoded; sampled letter by letter it is five
    letters = [tokenizer.convert_tokens_to_ids(char) for char in "hello"]
    row["turns"][1] |= {"action_ids": letters, "action_logprobs": [-1.0] * 5, "action_text": "hello"}
    report = audit([row], tokenizer)
    assert report.found == {"drift": 1} and report.sound
    row["turns"][1]["action_text"] = "goodbye"
    assert audit([row], tokenizer).found == {"drift": 1, "other_text": 1}
    assert audit([row]).found == {}
    assert any("needs the tokenizer" in line for line in audit([row]).lines())


def test_verl_rows_are_audited_too() -> None:
    row = trajectory_to_verl(made())
    assert audit([row]).sound
    touching = row | {"response_mask": [1] * len(row["response_mask"])}
    assert audit([touching]).found["touching"] == 1
    short = row | {"rollout_log_probs": row["rollout_log_probs"][:4]}
    assert audit([short]).found["no_logprob"] == 5 - sum(row["response_mask"][:4]) + 1
    bare = {
        name: row[name] for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "token_level_scores")
    }
    restored = trajectory_from_verl(bare | {"uid": "u", "response_mask": row["response_mask"]})
    assert restored.token_ids() == made().token_ids() and restored.reward == made().reward
    assert restored.group_id == "u"
    with pytest.raises(ValueError, match="9 response tokens but 2 of rollout_log_probs"):
        trajectory_from_verl(row | {"rollout_log_probs": [0.0, 0.0]})


def test_padding_behind_the_last_token_is_left_out() -> None:
    row = trajectory_to_verl(made())
    padded = row | {
        name: [*row[name], 0, 0] for name in ("responses", "response_mask", "rollout_log_probs", "token_level_scores")
    }
    assert trajectory_from_verl(padded) == made()


def test_a_score_on_a_token_that_was_not_sampled_is_kept() -> None:
    # verl puts an episode's score on its last token, which here a tool wrote: 0.25 more for the last turn
    row, columns = trajectory_to_verl(made()), ("responses", "response_mask", "rollout_log_probs")
    scores = row["token_level_scores"]
    longer = {name: [*row[name], 0] for name in columns} | {"token_level_scores": [*scores, 0.25]}
    assert trajectory_from_verl(row | longer).reward == made().reward + 0.25
    shifted = {name: [0, *row[name]] for name in columns} | {"token_level_scores": [1.0, *scores]}
    with pytest.raises(ValueError, match="before its first sampled token"):
        trajectory_from_verl(row | shifted)


def test_a_broken_row_is_named_when_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    write_trajectories(path, [made()])
    assert list(raw_rows(path)) == [to_row(made())]
    with pytest.raises(ValueError, match=r"use .jsonl, .jsonl.gz or .parquet"):
        write_trajectories(tmp_path / "t.csv", [made()])
    with pytest.raises(ValueError, match="parquet alone"):
        write_trajectories(tmp_path / "t.jsonl", [made()], verl=True)
    lines = tmp_path / "t.jsonl"
    lines.write_text(json.dumps(broken(action_logprobs=[])) + "\n")
    with pytest.raises(ValueError, match="line 1"):
        read_trajectories(lines)


def show(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_script_audits_and_writes_a_page(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectories(path, [made()])
    sound = show(path, "--audit")
    assert sound.returncode == 0 and "sound" in sound.stdout
    page = show(path, "--html", tmp_path / "page.html")
    assert page.returncode == 0, page.stderr
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;found&lt;/b&gt;" in html and "<b>found" not in html and "<script" not in html
    path.write_text(json.dumps(broken(observation_ids=[])) + "\n")
    faulty = show(path, "--audit")
    assert faulty.returncode == 1 and "NOT SOUND" in faulty.stdout and "turn 2" in faulty.stdout
