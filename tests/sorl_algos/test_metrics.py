"""metrics.jsonl: one whole line an update, nothing twice after a resumption, null for what is not finite."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from sorl_algos.metrics import MetricsLog, read_metrics, write_text_atomically


def test_lines_are_plain_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "new" / "run", tensorboard=False)
    log.write(0, {"reward_mean": 0.25, "lr": torch.tensor(0.5), "steps": 3})  # type: ignore[dict-item]
    log.write(1, {"reward_mean": math.nan, "lr": math.inf})
    log.close()
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines == [
        {"update": 0, "reward_mean": 0.25, "lr": 0.5, "steps": 3.0},
        {"update": 1, "reward_mean": None, "lr": None},
    ]


def test_each_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    log.write(0, {"a": 1.0})
    assert read_metrics(log.path) == [{"update": 0, "a": 1.0}]
    log.close()


def test_a_resumed_run_drops_what_comes_after_its_checkpoint(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    for update in range(5):
        log.write(update, {"a": float(update)})
    log.close()
    with log.path.open("a") as file:
        file.write('{"update": 5, "a": 5.')  # cut by a crash
    resumed = MetricsLog(tmp_path, keep_updates=3, tensorboard=False)
    resumed.write(3, {"a": -3.0})
    resumed.close()
    assert read_metrics(log.path) == [
        {"update": 0, "a": 0.0},
        {"update": 1, "a": 1.0},
        {"update": 2, "a": 2.0},
        {"update": 3, "a": -3.0},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_reading_leaves_out_what_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 0, "a": 1}\n\n[1]\n{"a": 2}\n{"update": "x"}\nnonsense\n{"update": 1, "a": 3}')
    assert read_metrics(path) == [{"update": 0, "a": 1}, {"update": 1, "a": 3}]


def test_the_same_numbers_are_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path)
    for update in range(3):
        log.write(update, {"eval/dev/f1": update / 4})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/dev/f1")] == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_text_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text_atomically(path, "old")
    write_text_atomically(path, "neu é")
    assert path.read_text(encoding="utf-8") == "neu é" and len(list(tmp_path.iterdir())) == 1
