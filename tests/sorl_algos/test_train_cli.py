"""The command line: bad input is one line that names thing and remedy, exit status 2, and nothing is written."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """scripts/train.py as a module; it finds its neighbours through the path, as when it is run."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("train")
    sys.path.remove(str(ROOT / "scripts"))


def refused(script: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that these arguments are refused with."""
    with pytest.raises(SystemExit) as end:
        script.checked(lambda: script.parse(list(arguments)))
    written = capsys.readouterr()
    assert end.value.code == 2 and written.out == ""
    [line] = written.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_options_change_a_preset(script: Any) -> None:
    config, dry = script.parse(["quickstart", "--lr", "1e-6", "--dry-run", "--algorithm", "ppo"])
    assert (config.lr, config.algorithm, dry is None) == (1e-6, "ppo", False) and isinstance(config.lr, float)
    assert script.parse(["smoke"]) == (script.PRESETS["smoke"][1], None)
    config, _ = script.parse(["quickstart", "--index", "None", "--threshold", "2", "--level", "sequence"])
    assert (config.index, config.threshold, config.level) == (None, 2.0, "sequence")


def test_the_environments_options_are_options(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "dialect": "tool_call", "chat_style": "chat", "system_prompt": "Be brief.", "prompt": "tools",
        "reward": "0.9*exact_match + 0.1*format", "invalid_penalty": 0.1, "search_cost": 0.05, "max_turn_words": 50,
        "max_total_words": 300, "max_query_chars": 80, "options_in_query": False, "last_turn_answers": True,
    }  # fmt: skip
    arguments = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    config, _ = script.parse(["quickstart", "--tell-budget", "--max-observation-words", "None", *arguments])
    assert {name: getattr(config, name) for name in given} == given
    assert config.tell_budget and config.max_observation_words is None
    assert (script.parse(["medical"])[0].env, script.parse(["math"])[0].env) == ("MedicalQA-v0", "MathQA-v0")
    with pytest.raises(SystemExit):
        script.parse(["quickstart", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in shown for name in given) and "without a valid action" in shown


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["no preset given; known:", "quickstart"]),
        (["quikstart"], ["unknown preset 'quikstart'; known:", "quickstart"]),
        (["quickstart", "--algorithm", "sopo"], ["unknown algorithm 'sopo'", "known:", "so_ppo"]),
        (["quickstart", "--learnign-rate", "1"], ["--learnign-rate", "--help"]),
        (["quickstart", "--crtic-lr", "1"], ["--crtic-lr", "did you mean --critic-lr"]),
        (["quickstart", "--lr", "fast"], ["--lr", "'fast'"]),
        (["quickstart", "--updates", "0"], ["updates is 0; it must be greater than 0"]),
        (
            ["quickstart", "--questions-per-update", "3", "--group-size", "4", "--minibatch-sequences", "6",
             "--algorithm", "grpo"],
            ["minibatch_sequences (6)", "group_size (4)", "split over two optimiser steps"],
        ),
        (
            ["quickstart", "--questions-per-update", "6", "--minibatch-sequences", "4"],
            ["6 episodes", "minibatches of 4", "choose a divisor"],
        ),
        (["quickstart", "--algorithm", "grpo"], ["group_size is 1", "at least 2"]),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(
    arguments: list[str], parts: list[str], script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(script, capsys, *arguments)
    assert all(part in line for part in parts), line


def test_help_is_help(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        script.checked(lambda: script.parse(["quickstart", "--help"]))
    assert end.value.code == 0 and "--max-grad-norm" in capsys.readouterr().out


def test_bad_files_are_one_line(script: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "questions.jsonl"
    broken.write_text('{"id": "a", "question": "Q?", "answers": ["x"]}\n{"id": "b", "question": \n')
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("nothing to see")
    for make, parts in (
        (lambda: script.load_questions(str(broken)), [str(broken), "line 2", "one JSON object"]),
        (lambda: script.load_questions("nowhere.jsonl"), ["nowhere.jsonl does not exist", "world:train"]),
        (lambda: script.load_questions("world:trian"), ["unknown split 'trian'; known: train"]),
        (lambda: script.load_retriever(tmp_path / "nowhere"), ["no index at", "scripts/build_index.py"]),
        (lambda: script.load_retriever(foreign), [str(foreign), "scripts/build_index.py"]),
    ):
        with pytest.raises(SystemExit) as end:
            script.checked(make)
        [line] = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and line.startswith("error: ")
        assert all(part in line for part in parts), line


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "train.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_unknown_model_is_found_out_before_anything_is_written(tmp_path: Path) -> None:
    found = run(tmp_path, "quickstart", "--index", "None", "--model", "bass", "--run-dir", "new")
    assert found.returncode == 2
    [line] = found.stderr.splitlines()
    assert line.startswith("error: unknown model 'bass'; known: base, smollm2")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_and_writes_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, "quickstart", "--index", "None", "--updates", "7", "--dry-run")
    assert found.returncode == 0 and found.stderr == ""
    assert "7 updates of 64 episodes, 14 optimiser steps; nothing was trained or written" in found.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_column_of_the_table_can_be_overridden(script: Any) -> None:
    columns = {
        "advantages": "leave_one_out", "level": "sequence", "normalisation": "coefficient_ratio", "threshold": "2.5",
        "scope": "sequence", "trigger_level": "turn", "pooling": "sum", "reduction": "sequence_mean_token_sum_norm",
        "loss": "clipped", "dual_clip": "3.0", "norm_length": "64.0",
    }  # fmt: skip
    options = [part for name, value in columns.items() for part in (f"--{name.replace('_', '-')}", value)]
    config, _ = script.parse(["quickstart_group", "--algorithm", "grpo", *options])
    row = config.algorithm_row()
    assert {field.name for field in dataclasses.fields(row)} <= columns.keys()
    for name in ("advantages", "level", "pooling", "reduction", "loss"):
        assert getattr(row, name) == columns[name]
    assert (row.dual_clip, row.norm_length) == (3.0, 64.0)
    found = row.normalisation
    assert (found.threshold, found.scope, found.level) == (2.5, "sequence", "turn")
