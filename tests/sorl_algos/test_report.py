"""The run report on made-up run directories: whole, partial, broken and hostile ones.

Run as a program it writes such directories and their reports: python -m tests.sorl_algos.test_report DIR
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sorl_algos.report import write_report
from sorl_algos.report_assets import chart
from sorl_algos.report_assets.markup import Html, number, signed, tag, visible
from sorl_algos.report_assets.runs import read_episodes, read_run
from sorl_env.trajectory import Trajectory, Turn, write_jsonl

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "br", "link", "img", "input", "hr"}
COUNTRIES = (
    "Peru Chile Norway Kenya Laos Nepal Malta Fiji Ghana Iceland Oman Qatar".split(),
    "Lima Santiago Oslo Nairobi Vientiane Kathmandu Valletta Suva Accra Reykjavik Muscat Doha".split(),
)
PROMPT = (
    "Answer the question. You may look things up: write <search>words to look for</search> and read what "
    "comes back between <information> and </information>. When you know, write <answer>the answer</answer>.\n"
    "Question: "
)


def make_run(
    path: Path,
    *,
    algorithm: str = "so_ppo",
    seed: int = 0,
    updates: int = 40,
    questions: int = 10,
    gain: float = 0.45,
) -> Path:
    """A run directory like the one that a training run leaves behind."""
    rng = random.Random(f"{algorithm} {seed}")
    path.mkdir(parents=True)
    config = {
        "config": {
            "run_dir": str(path),
            "algorithm": algorithm,
            "model": "base",
            "questions": "world:train",
            "seed": seed,
            "updates": updates,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "lr": 1e-4,
            "normalisation_threshold": 3.0,
        },
        "git_revision": "c9e36ab0f1d2e3c4b5a697887766554433221100",
        "versions": {"torch": "2.13.0", "transformers": "5.19.0"},
        "hardware": "2 CPU cores, 23 GB memory",
    }
    (path / "config.json").write_text(json.dumps(config))
    lines = [
        json.dumps({"update": -1, "eval/dev/exact_match": 0.2, "eval/dev/f1": 0.25, "eval/dev/searches": 0.9})
    ]
    for update in range(updates):
        lines.append(json.dumps(_metrics(update, updates, algorithm, gain, rng)))
        if update % 10 == 9:
            done = 0.21 + gain * _rise(update / updates)
            lines.append(
                json.dumps({"update": update, "eval/dev/exact_match": done, "eval/dev/f1": done + 0.05})
            )
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    sets = {
        "test": (400, 0.21, gain),
        "test_unseen": (200, 0.18, gain - 0.04),
        "test_empty_index": (400, 0.04, 0.01),
    }
    evaluations = [
        {
            "name": f"{name} {stage}",
            "stage": stage,
            "set": name,
            "n": n,
            "exact_match": _interval(start + grown * (stage == "after"), n),
            "f1": _interval(start + 0.06 + grown * (stage == "after"), n),
            "searches": {"mean": 1.1 + 0.5 * (stage == "after"), "low": 1.0, "high": 1.7},
        }
        for stage in ("before", "after")
        for name, (n, start, grown) in sets.items()
    ]
    (path / "evaluations.json").write_text(json.dumps(evaluations))
    for stage in ("before", "after"):
        rows = [_trajectory(index, stage, rng) for index in range(questions)]
        (path / f"trajectories_{stage}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _rise(share: float) -> float:
    return 1 / (1 + math.exp(-9 * (share - 0.45)))


def _interval(mean: float, n: int) -> dict[str, float]:
    half = 1.96 * math.sqrt(mean * (1 - mean) / n)
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _metrics(update: int, updates: int, algorithm: str, gain: float, rng: random.Random) -> dict[str, Any]:
    share = update / updates
    reward = 0.21 + gain * _rise(share) + rng.gauss(0, 0.035)
    clipped = abs(rng.gauss(0.03 + 0.05 * share, 0.01))
    spike = update > 3 and rng.random() < 0.06
    rho = rng.uniform(4, 30) if spike else abs(rng.gauss(1.3, 0.4))
    return {
        "update": update,
        "time_s": 9.5 * (update + 1),
        "reward_mean": reward,
        "em_train": reward,
        "searches_mean": 0.9 + 0.7 * _rise(share) + rng.gauss(0, 0.05),
        "response_tokens_mean": 25 + 6 * share + rng.gauss(0, 1),
        "turns_mean": 2.1 + 0.4 * share,
        "valid_action_rate": min(1.0, 0.9 + 0.1 * share),
        "truncated_rate": 0.1 * (1 - share),
        "clip_fraction_token": clipped,
        "clip_fraction_turn": clipped * 0.45,
        "clip_fraction_sequence": clipped * 0.2,
        "rho": rho,
        "factor": 1.0 if rho <= 3 or algorithm == "ppo" else 1 / rho,
        "approx_kl": abs(rng.gauss(0.004, 0.001)),
        "ref_kl": 0.25 * share + abs(rng.gauss(0, 0.01)),
        "mismatch_kl": abs(rng.gauss(2e-7, 1e-7)),
        "entropy": 1.4 - 0.9 * share + rng.gauss(0, 0.03),
        "explained_variance": -6.0 * (update == 0) + 0.6 * _rise(share),
        "policy_loss": rng.gauss(0, 0.02),
        "value_loss": 0.2 * math.exp(-3 * share) + 0.02,
        "grad_norm": abs(rng.gauss(0.8, 0.2)),
        "critic_grad_norm": abs(rng.gauss(1.5, 0.4)),
        "lr": 1e-4 * min(1, (update + 1) / 3),
        "ratio_max": 1 + abs(rng.gauss(0.5, 0.3)),
        "ess": 0.97,
        "time_rollout_s": 6 + rng.random(),
        "time_update_s": 3 + rng.random(),
    }


def _trajectory(index: int, stage: str, rng: random.Random) -> dict[str, Any]:
    country, capital = (names[index % 12] for names in COUNTRIES)
    question = f"What is the capital of {country}?"
    after = stage == "after"
    right = (after and index % 5 != 3) or (not after and index % 4 == 0)
    found = (
        f"\n\n<information>Doc 1(Title: {country}) {country} is a country whose capital is {capital}. "
        "Its calling code, its currency and its neighbours are described elsewhere, "
        f"and its largest city is {capital} too.\n"
        f"Doc 2(Title: {capital}) {capital} lies in {country}. "
        + "It is known for its markets and its museums. " * 5
        + "</information>\n\n"
    )
    query = f"capital {country}" if after else "country"
    turns = [
        _turn(
            PROMPT + question + "\n",
            f"<search>{query}</search>",
            "search",
            rng,
            [["7", country], ["9", capital]],
        ),
        _turn(
            found,
            f"<think>The passage says it.</think> <answer>{capital if right else country}</answer>",
            "answer",
            rng,
        ),
    ]
    if not after and index % 3 == 1:
        turns[1] = _turn(found, "the capital the capital the", "cut", rng)
    stop = "length_limit" if turns[1]["action_kind"] == "cut" else "answered"
    return {
        "question": question,
        "answers": [capital, f"City of {capital}"],
        "question_id": f"world-{index:04d}",
        "reward": float(right and stop == "answered"),
        "stop": stop,
        "turns": turns,
    }


def _turn(
    observation: str, action: str, kind: str, rng: random.Random, retrieved: list[list[str]] | None = None
) -> dict[str, Any]:
    return {
        "observation_text": observation,
        "action_text": action,
        "action_kind": kind,
        "reward": 0.0,
        "ratio": math.exp(rng.gauss(0, 0.12)),
        "advantage": rng.gauss(0.1, 0.8),
        "retrieved": retrieved or [],
    }


class Outline(HTMLParser):
    """The page as a browser's parser sees it: elements, attributes, text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], "elements left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text.append(data)

    def count(self, tag: str, class_: str) -> int:
        return sum(
            name == tag and class_ in (found.get("class") or "").split() for name, found in self.elements
        )

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def report_of(*runs: Path) -> tuple[str, Outline]:
    path = write_report(list(runs), runs[0].parent / "report.html")
    page = path.read_text("utf-8")
    return page, Outline(page)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Outline]:
    return report_of(make_run(tmp_path_factory.mktemp("runs") / "so_ppo"))


def test_a_whole_run_has_every_part(whole: tuple[str, Outline]) -> None:
    _, page = whole
    ids = {found["id"] for _, found in page.elements if "id" in found}
    assert {"results", "curves", "trajectories", "configuration"} <= ids
    assert "so_ppo 0.21 → 0.66" in page.words.replace("\xa0", " ")  # 0.21 before, 0.21 + 0.45 after: make_run
    assert "6.3" in page.words  # 40 updates of 9.5 s are 380 s
    assert "This report is partial" not in page.words
    for title in (
        "Reward",
        "Held-out exact match",
        "Clip fraction per level",
        "rho of the normalisation",
        "Factor of the normalisation",
        "approx_kl",
        "Entropy",
        "Explained variance",
        "Response length",
        "Searches per episode",
    ):
        assert title in page.text
    assert "threshold 3" in page.text


def test_every_metric_has_its_chart(whole: tuple[str, Outline]) -> None:
    # 26 training metrics of make_run, 3 of them in one chart; exact match, F1 and searches of dev: 26 - 2 + 3
    assert whole[1].count("svg", "chart") == 27


def test_turns_share_a_chart_and_each_instrument_has_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {f"{name}_turn/{turn}": 0.1 * turn for turn in range(3) for name in ("clip_fraction", "ratio_max")}
        line |= {"excess_norm": 0.5, "tag_fault_rate": 0.01, "loop_rate": 0.0, "advantage_variance": 0.2}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, page = report_of(run)
    # beside the 27: clip fraction and largest ratio by turn, C norm, tags and loops together, advantage variance
    assert page.count("svg", "chart") == 27 + 5
    for words in ("Clip fraction by turn", "ratio_max by turn", "turn 3", "Norm of the clipping bias", "loops"):
        assert words in page.text
    assert not any(name.startswith("clip_fraction_turn/") for name in page.text)


def test_alarms_are_told_and_marked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    alarms = [
        {"update": 21, "rule": "entropy_explosion", "text": "entropy is 2.1, it was 0.7"},
        {"update": 21, "rule": "loops", "text": "loop_rate is 0.3, it was <0>"},
        {"update": 99, "rule": "reward_fall", "text": "after the curves"},
    ]
    (run / "alarms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in alarms) + '{"update": 3')
    _, page = report_of(run)
    assert "The collapse alarm went off" in page.text and page.count("aside", "alarmed") == 1
    assert "update 21: entropy is 2.1, it was 0.7" in page.words and "it was <0>" in page.words
    assert "alarms.jsonl: line 4 could not be read" in page.words
    # one line in each chart but that of the searches, which were scored before update 0 alone; 99 is off all axes
    assert page.count("line", "alarm") == page.count("svg", "chart") - 1
    assert "alarm at update 21: entropy is 2.1, it was 0.7; loop_rate is 0.3" in page.words
    assert "at update 21" in page.words
    other = make_run(tmp_path / "other", algorithm="ppo")
    _, both = report_of(run, other)
    assert both.count("aside", "alarmed") == 1 and "so_ppo, alarm at update 21" in both.words
    assert report_of(other)[1].count("line", "alarm") == 0


def test_all_ten_questions_are_there_twice(whole: tuple[str, Outline]) -> None:
    page = whole[1]
    assert page.count("article", "card") == 10
    assert page.count("section", "side") == 20
    assert page.count("div", "turn") == 40
    assert page.count("span", "chip") == 60  # reward, stop reason and searches of each
    for index in range(10):
        assert f"What is the capital of {COUNTRIES[0][index]}?" in page.text


def test_the_page_asks_the_network_for_nothing(whole: tuple[str, Outline]) -> None:
    text, page = whole
    assert "://" not in text
    assert "@import" not in text and "url(" not in text
    assert not {"link", "img", "iframe", "object", "form"} & {name for name, _ in page.elements}
    assert all((found["href"] or "").startswith("#") for _, found in page.elements if "href" in found)
    assert all("src" not in found for _, found in page.elements)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", questions=2)
    evil = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'& \x1b[31m \ud800"
    row = _trajectory(0, "after", random.Random(0)) | {"question": evil, "answers": [evil], "stop": evil}
    row["question_id"] = evil
    for turn in row["turns"]:
        turn |= {
            "observation_text": evil,
            "action_text": evil,
            "retrieved": [["1", evil]],
            "action_kind": evil,
        }
    (run / "trajectories_after.jsonl").write_text(json.dumps(row) + "\n")
    config = {"algorithm": evil, "model": evil, evil: evil, "hardware": evil}
    (run / "config.json").write_text(json.dumps(config))
    evaluation = {"stage": "after", "set": evil, "n": 3, "exact_match": {"mean": 0.5}, evil: {"mean": 1}}
    (run / "evaluations.json").write_text(json.dumps([evaluation]))
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"update": 1, evil: 1.0, f"eval/{evil}/exact_match": 0.5}) + "\n")
    text, page = report_of(run)
    assert len(page.scripts) == 1 and "alert" not in page.scripts[0]
    assert "img" not in {name for name, _ in page.elements}
    assert not [key for _, found in page.elements for key in found if key.startswith("on")]
    assert page.words.count("<script>alert(1)</script>") > 10
    assert "\x1b" not in text


def test_no_other_script_may_run(whole: tuple[str, Outline]) -> None:
    policy = next(found["content"] for _, found in whole[1].elements if "http-equiv" in found)
    assert policy is not None and "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]


def test_several_runs_share_charts_and_table(tmp_path: Path) -> None:
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "b", algorithm="ppo", gain=0.3)
    _, page = report_of(*runs)
    assert page.count("svg", "chart") == 27  # as many as one run has
    reward = next(found for name, found in page.elements if found.get("aria-label") == "Reward")
    lines = json.loads(reward["data-chart"] or "")["series"]
    assert [line["label"] for line in lines] == ["so_ppo", "ppo"]
    assert [len(line["x"]) for line in lines] == [40, 40]
    assert "2 of them different" in page.words  # run_dir and algorithm
    assert page.count("article", "card") == 20
    anchors = [found["id"] for _, found in page.elements if "id" in found]
    assert len(anchors) == len(set(anchors))


def test_runs_of_one_algorithm_are_told_apart(tmp_path: Path) -> None:
    _, page = report_of(make_run(tmp_path / "seed0"), make_run(tmp_path / "seed1", seed=1))
    assert "seed0" in page.text and "seed1" in page.text
    _, page = report_of(tmp_path / "seed0", tmp_path / "seed0")
    assert "(1)" in page.words and "(2)" in page.words


def test_many_runs_are_told_as_means(tmp_path: Path) -> None:
    gains = {"so_ppo": (0.40, 0.44), "ppo": (0.20, 0.24)}
    runs = [
        make_run(tmp_path / f"{name}{seed}", algorithm=name, seed=seed, gain=gain, updates=20, questions=1)
        for name, pair in gains.items()
        for seed, gain in enumerate(pair)
    ]
    words = report_of(*runs)[1].words.replace("\xa0", " ")
    # 0.21 before in all; the mean of 0.61 and 0.65, of 0.41 and 0.45
    assert "so_ppo 0.21 → 0.63 (mean of 2 runs), ppo 0.21 → 0.43 (mean of 2 runs)" in words


def test_tick_labels_name_the_places_where_they_stand() -> None:
    # 0.97 alone: 0.873 to 1.067 in steps of 0.05
    svg = chart.line_chart([chart.Series("x", [(0, 0.97), (9, 0.97)])], title="x")
    assert re.findall(r">(0\.8\d|0\.9\d|1\.\d\d)</text>", svg) == [
        "0.85",
        "0.90",
        "0.95",
        "1.00",
        "1.05",
        "1.10",
    ]


def test_a_hundred_updates_of_two_runs_stay_under_a_megabyte(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, algorithm=name, updates=100) for name in ("ppo", "so_ppo")]
    assert len(report_of(*runs)[0].encode()) < 1_000_000


def test_an_interrupted_run_gives_a_partial_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()[:14]
    cut = [*lines, '{"update": 13, "entropy": 1.0, "reward_mean": NaN, "rho": null}', '{"update": 14, "rewa']
    (run / "metrics.jsonl").write_text("\n".join(cut))
    for name in ("evaluations.json", "trajectories_before.jsonl", "trajectories_after.jsonl"):
        (run / name).unlink()
    _, page = report_of(run)
    # Of the 14 whole lines kept two are evaluations (of update -1 and 9); one line of training was added.
    assert "The run has 13 of its 40 updates" in page.words
    assert "metrics.jsonl: line 16 could not be read" in page.words
    assert "reward_mean (1)" in page.words and "rho (1)" in page.words
    assert "No evaluation has been written yet" in page.words
    assert "No trajectories have been written yet" in page.words


@pytest.mark.parametrize(
    "missing", ["config.json", "metrics.jsonl", "evaluations.json", "trajectories_before.jsonl"]
)
def test_each_part_may_be_missing_or_broken(tmp_path: Path, missing: str) -> None:
    run = make_run(tmp_path / "run")
    for content in (None, "", "{", "[1, 2", "null", "7", "\x00"):
        (run / missing).unlink(missing_ok=True)
        if content is not None:
            (run / missing).write_text(content)
        _, page = report_of(run)
        assert page.count("section", "side") in (0, 20)
        if missing != "trajectories_before.jsonl" or content not in (None, ""):
            assert "This report is partial" in page.words, content


def test_a_run_before_its_first_update_gives_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for path in run.iterdir():
        if path.name != "config.json":
            path.unlink()
    (run / "metrics.jsonl").write_text("")
    _, page = report_of(run)
    assert "No metrics have been written yet" in page.words


def test_no_run_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "qwen2"}')
    for directory in (tmp_path / "empty", foreign, tmp_path / "absent"):
        with pytest.raises(ValueError, match=re.escape(str(directory))):
            write_report(directory, tmp_path / "report.html")
    (foreign / "config.json").unlink()
    (foreign / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ValueError, match=r"nothing in metrics\.jsonl"):
        write_report(foreign, tmp_path / "report.html")
    with pytest.raises(ValueError, match="no run directory"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_only_the_page_is_left_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = set(run.iterdir())
    write_report(run, run / "deeper" / "report.html")
    assert set(run.iterdir()) - before == {run / "deeper"}
    assert [path.name for path in (run / "deeper").iterdir()] == ["report.html"]


def test_a_resumed_run_counts_each_update_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=4)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"update": 3, "time_s": 12.0, "reward_mean": 0.5}) + "\n")
    found = read_run(run)
    assert found.updates == 4
    assert found.metrics["reward_mean"][-1] == (3.0, 0.5)
    assert found.minutes == pytest.approx((4 * 9.5 + 12) / 60)  # the clock began again at the second start


def test_episodes_pair_by_question(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", questions=3)
    path = run / "trajectories_after.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[2], lines[0]]) + "\n")  # another order, one missing
    _, page = report_of(run)
    assert page.count("article", "card") == 3
    assert page.words.count("not recorded") == 1


def test_a_recorded_trajectory_can_be_shown(tmp_path: Path) -> None:
    turns = (
        Turn((1,), (2, 3), (-0.1, -0.2), 0.0, "Question: where?", "<search>x</search>"),
        Turn((4,), (5,), (-0.3,), 1.0, "<information>…</information>", "<answer>Lima</answer>"),
    )
    notes = [
        {"action_kind": "search", "retrieved_ids": ["7", "9"]},
        {"action_kind": "answer", "retrieved_ids": []},
    ]
    path = tmp_path / "recorded.jsonl.gz"
    write_jsonl(path, [Trajectory(turns, "q1", "g1", 0, "answered", {"turns": notes})])
    [episode], broken = read_episodes(path)
    assert broken == []
    assert (episode.question_id, episode.reward, episode.stop) == ("q1", 1.0, "answered")
    assert [turn.action_kind for turn in episode.turns] == ["search", "answer"]
    assert episode.turns[0].retrieved == ("7", "9")
    assert episode.turns[1].action_text == "<answer>Lima</answer>"


def script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_report_script(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=3, questions=1)
    done = script("report.py", run)
    assert (done.returncode, done.stdout.strip()) == (0, str(run / "report.html"))
    failed = script("report.py", tmp_path)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert (
        failed.stderr.startswith(f"report: {tmp_path} holds no training run")
        and failed.stderr.count("\n") == 1
    )


def test_trajectory_script(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", updates=3, questions=4) / "trajectories_after.jsonl"
    row = json.loads(path.read_text().splitlines()[0]) | {"question_id": "odd", "question": "[red]\x1b[2J?"}
    with path.open("a") as rows:
        rows.write(json.dumps(row) + "\n{\n")
    done = script("show_trajectories.py", path, "--no-prompt")
    assert done.returncode == 0
    assert done.stdout.count("turn 1") == 5 and "You may look things up" not in done.stdout
    assert "[red]␛[2J?" in done.stdout and "\x1b" not in done.stdout
    assert "left out 1 lines" in done.stderr
    wrong = script(
        "show_trajectories.py", path, "--only", "wrong"
    )  # make_run: index 3 of 5 is wrong after training
    assert wrong.stdout.count("turn 1") == 1 and COUNTRIES[0][3] in wrong.stdout
    nobody = script("show_trajectories.py", path, "--question-id", "nobody")
    assert nobody.returncode == 2 and "none of the 5 trajectories" in nobody.stderr


def test_running_mean_looks_back_only() -> None:
    points = [(0, 1.0), (1, 3.0), (2, 5.0), (3, 0.0)]
    # window 2: 1; (1 + 3) / 2; (3 + 5) / 2; (5 + 0) / 2
    assert chart.running_mean(points, 2) == [(0, 1.0), (1, 2.0), (2, 4.0), (3, 2.5)]


def test_thinning_keeps_the_spikes() -> None:
    points = [(float(x), 100.0 if x == 777 else -50.0 if x == 401 else 0.0) for x in range(5000)]
    kept = chart.thin_out(points)
    assert len(kept) <= chart.MOST_POINTS
    assert (777.0, 100.0) in kept and (401.0, -50.0) in kept
    assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("values", "floor", "ceiling", "expected"),
    [
        ([0.1, 0.9], 0.0, None, (0.0, 1.0)),  # step 0.5: 0.9 / 4 = 0.225 rounds up to 0.5
        ([3.0, 3.0], None, None, (2.7, 3.3)),  # constant: a tenth on both sides, step 0.2 of 0.6 / 4
        ([0.0], 0.0, None, (0.0, 1.0)),
        ([1e-7, 3e-7], 0.0, None, (0.0, 3e-7)),
        ([-2.0, 5.0], None, None, (-2.0, 6.0)),
    ],
)
def test_axis_ends_on_ticks(
    values: list[float], floor: float | None, ceiling: float | None, expected: tuple[float, float]
) -> None:
    low, high, step = chart.axis(values, floor=floor, ceiling=ceiling)
    assert low <= min(values) and max(values) <= high
    assert low / step == pytest.approx(round(low / step), abs=1e-6)
    assert (low, high) == pytest.approx(expected, rel=0.15, abs=1e-9)


def test_one_spike_does_not_flatten_the_rest() -> None:
    values = [1.0 + 0.01 * (x % 7) for x in range(100)] + [1000.0]
    _, high, _ = chart.axis(values, floor=None, ceiling=None)
    assert high < 2
    svg = chart.line_chart([chart.Series("rho", list(enumerate(values)))], title="rho")
    assert "1 off the scale, up to 1000" in svg


@pytest.mark.parametrize(
    "points", [[(0, 0.0)], [(5, -1.0), (5, 2.0)], [(0, 1e12), (1, -1e12)], [(0, 2.0)] * 50]
)
def test_charts_of_odd_series_have_finite_coordinates(points: list[tuple[float, float]]) -> None:
    svg = chart.line_chart([chart.Series("x", points)], title="x", floor=0.0)
    Outline(svg)
    assert not re.search(r"\b(nan|inf)\b", svg, re.IGNORECASE)


def test_markup_escapes_all_but_markup() -> None:
    assert tag("p", "a < b", Html("<b>x</b>"), None, ["&", ["'"]], title='"') == (
        '<p title="&quot;">a &lt; b<b>x</b>&amp;&#x27;</p>'
    )
    assert visible("a\x1b[0m\r\nb\ud800") == "a␛[0m\nb?"


def test_numbers_read_well() -> None:
    assert [number(value) for value in (3.0, -0.12345678, 2e-7, math.nan)] == ["3", "−0.1235", "2e-07", "–"]
    assert [signed(value) for value in (0.426, -0.1, 0.001, -0.001)] == ["+0.43", "−0.10", "0.00", "0.00"]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    one, two = make_run(target / "so_ppo"), make_run(target / "ppo", algorithm="ppo", gain=0.3)
    print(write_report(one, target / "one.html"), write_report([one, two], target / "two.html"))
