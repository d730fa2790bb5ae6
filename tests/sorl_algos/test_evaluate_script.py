"""scripts/evaluate.py and scripts/compare_results.py as commands, with the bundled model on the bundled world."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sorl_algos.evaluation.engines import DEFAULTS
from sorl_algos.evaluation.play import renderer_for
from tests.tokenizers import TOOLS, byte_level

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., Any]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    """The scripts as modules; they find their neighbours through the path, as when they are run."""
    sys.path.insert(0, str(ROOT / "scripts"))
    names = ("evaluate", "compare_results", "evaluation_inputs", "evaluation_plan")
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def run(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Command:
    def call(script: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        scripts[script].main()

    return call


def columns(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))["per_question"]


def refused(run: Command, capsys: pytest.CaptureFixture[str], script: str, *arguments: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run(script, *arguments)
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_the_bundled_model_on_the_bundled_world(
    run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("evaluate", "base", "world:test", "--limit", 10, "--output", tmp_path / "a", "--dry-run")
    assert "nothing was played or written" in capsys.readouterr().out and not (tmp_path / "a").exists()
    run("evaluate", "base", "world:test", "--limit", 10, "--output", tmp_path / "a")
    run("evaluate", "base", "world:test", "--limit", 10, "--output", tmp_path / "b", "--batch", 3, "--dtype", "float64")
    first = json.loads((tmp_path / "a" / "world_test.json").read_text())
    assert columns(tmp_path / "b" / "world_test.json") == first["per_question"]
    identity = first["identity"]
    assert identity["data"]["questions"] == 10 and len(identity["data"]["sha256"]) == 64
    assert identity["retrieval"]["index"]["passages"] == 6279 and identity["prompt"]["name"] == "short"
    assert identity["model"]["weights"].startswith("files:") and first["sessions"][0]["versions"]["torch"]
    assert identity["environment"]["rules"]["max_searches"] == 3 and identity["sampling"]["temperature"] == 0.0
    written = (tmp_path / "a" / "world_test.json").read_bytes()
    run("evaluate", "base", "world:test", "--limit", 10, "--output", tmp_path / "a")
    assert (tmp_path / "a" / "world_test.json").read_bytes() == written
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["sets"]["world_test"]["exact_match"] == first["scores"]["exact_match"]
    line = refused(run, capsys, "evaluate", "base", "world:test", "--limit", 11, "--output", tmp_path / "a")
    assert "holds results with data.questions=10, this evaluation has 11" in line and "--restart" in line


def plan_of(scripts: dict[str, Any], own: dict[str, Any], name: str = "world:dev", **given: Any) -> Any:
    arguments = scripts["evaluate"].Arguments(model="some/model", sets=(name,), limit=2, **given)
    [plan] = scripts["evaluation_plan"].make_plans(arguments, DEFAULTS | own)
    return plan


def test_a_run_is_played_in_its_own_style_with_its_own_system_message(scripts: dict[str, Any]) -> None:
    own = {"prompt": "short", "chat_style": "chat", "system_prompt": "Be brief."}
    plan = plan_of(scripts, own)
    assert (plan.style, plan.system) == ("chat", "Be brief.")
    tokenizer = byte_level(template=TOOLS)
    assert "<|system|>Be brief." in tokenizer.decode(renderer_for(plan, tokenizer).first("Q"))
    prompt = plan.identity["prompt"]
    assert (prompt["style"], prompt["system"]) == ("chat", "Be brief.")
    given = plan_of(scripts, own, style="continuation", system_prompt="Speak up.")
    assert (given.style, given.system) == ("continuation", "Speak up.")
    neither = plan_of(scripts, {"prompt": "short"})
    assert (neither.style, neither.system) == ("continuation", None) and "system" not in neither.identity["prompt"]
    hashes = {one.identity["prompt"]["sha256"] for one in (plan, given, neither)}
    assert len(hashes) == 3  # other messages are other prompts, which are not compared
    math = plan_of(scripts, own, "math:dev")  # a search agent's prompts are not for problems
    assert (math.style, math.system) == ("chat", None)


@pytest.mark.parametrize(
    ("own", "given", "prompt"),
    [
        ({}, {"retrieval": "none"}, "closed_book"),
        ({}, {"retrieval": "none", "name": "medical:dev"}, "closed_book"),
        ({}, {"retrieval": "empty"}, "search_r1"),
        ({"prompt": "short"}, {"retrieval": "none"}, "short"),  # a policy keeps what it was trained with
        ({}, {"retrieval": "none", "prompt": "short"}, "short"),
        ({}, {"retrieval": "none", "dialect": "tool_call"}, "tools"),
        ({"dialect": "tool_call"}, {"retrieval": "none"}, "tools"),
        ({}, {"retrieval": "none", "name": "math:dev"}, "math"),
    ],
)
def test_without_searches_the_prompt_speaks_of_none(
    scripts: dict[str, Any], own: dict[str, Any], given: dict[str, Any], prompt: str
) -> None:
    identity = plan_of(scripts, own, **given).identity
    assert identity["prompt"]["name"] == prompt
    assert (identity["environment"]["rules"]["max_searches"] == 0) is (given["retrieval"] == "none")


def test_a_prompt_file_goes_before_the_closed_book(scripts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Say: {question}")
    for own, given in (({"prompt_file": str(tmp_path / "p.txt")}, {}), ({}, {"prompt_file": tmp_path / "p.txt"})):
        assert plan_of(scripts, own, retrieval="none", **given).identity["prompt"]["name"] == "its own"


def test_controls_and_their_comparison(run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One set of questions under every control; each says what it is, and two are compared question by question."""
    modes = ("none", "empty", "random", "oracle")
    options = ("--limit", 6, "--output", tmp_path, "--only-with-passages", "--retrieval")
    for mode in modes:
        run("evaluate", "base", "world:test", "medical:test", *options, mode)
    found = {mode: json.loads((tmp_path / f"world_test.{mode}.json").read_text()) for mode in modes}
    assert {one["identity"]["retrieval"]["mode"] for one in found.values()} == set(found)
    assert len({one["identity"]["data"]["sha256"] for one in found.values()}) == 1
    assert found["none"]["scores"]["searches"]["mean"] == 0.0 and found["none"]["scores"]["turns"]["mean"] == 1.0
    logs = {mode: (tmp_path / f"world_test.{mode}.questions.jsonl").read_text().splitlines()[2:] for mode in modes}
    rows = {mode: [json.loads(line) for line in lines] for mode, lines in logs.items()}
    assert all(one == [] for row in rows["empty"] for one in row["retrieved"])
    from sorl_env.world import world_questions

    named = {question.id: question.metadata["supporting_ids"] for question in world_questions("test")}
    for mode, inside in (("oracle", True), ("random", False)):
        shown = [(row["id"], one) for row in rows[mode] for turn in row["retrieved"] for one in turn]
        assert shown and all((one in named[question]) == inside for question, one in shown)
    assert (tmp_path / "medical_test.oracle.json").is_file()
    capsys.readouterr()
    paths = (tmp_path / "world_test.empty.json", tmp_path / "world_test.oracle.json")
    run("compare_results", *paths, "--output", tmp_path / "comparison.json")
    shown_text = capsys.readouterr().out
    assert 'retrieval.mode: "empty" | "oracle"' in shown_text and "6 questions in common" in shown_text
    compared = json.loads((tmp_path / "comparison.json").read_text())["scores"]["exact_match"]
    assert compared["second"] == found["oracle"]["scores"]["exact_match"]["mean"]
    line = refused(run, capsys, "compare_results", paths[0], tmp_path / "medical_test.oracle.json")
    assert "the results score other kinds of questions" in line


def test_a_recording_takes_the_place_of_the_index(
    run: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from retrieval_index import build_bm25
    from sorl_env.world import CORPUS_PATH, world_questions

    build_bm25([CORPUS_PATH], tmp_path / "index")
    rows = [
        {"id": one.id, "question": one.text, "golden_answers": list(one.answers)}
        for one in world_questions("test").sample_by_hash(4)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("evaluate", "base", tmp_path / "mine.jsonl", "--recording", tmp_path / "r.jsonl")
    assert "recording" in refused(run, capsys, *command, "--output", tmp_path / "a")
    run(*command, "--output", tmp_path / "a", "--index", tmp_path / "index")
    run(*command, "--output", tmp_path / "b")
    one, two = (json.loads((tmp_path / name / "mine.json").read_text()) for name in ("a", "b"))
    assert one == two and one["scores"]["searches"]["mean"] > 0
    assert "holds no answer to" in refused(run, capsys, *command, "--output", tmp_path / "c", "--top-k", 2)
    assert "needs an index" in refused(run, capsys, *command[:3], "--output", tmp_path / "d")


def test_killed_without_warning_it_goes_on_to_the_same_result(run: Command, tmp_path: Path) -> None:
    command = ["evaluate", "base", "world:test", "--limit", "12", "--batch", "1", "--output"]
    log = tmp_path / "killed" / "world_test.questions.jsonl"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "evaluate.py"), *command[1:], str(tmp_path / "killed")],
        cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    played = log.read_bytes().count(b"\n") - 2
    assert 3 < played < 12 and not log.with_name("world_test.json").exists()
    run(*command, tmp_path / "killed")
    run(*command, tmp_path / "straight")
    one, two = (json.loads((tmp_path / name / "world_test.json").read_text()) for name in ("killed", "straight"))
    assert one | {"sessions": two["sessions"]} == two
    lines = [(tmp_path / name / log.name).read_text().splitlines()[-12:] for name in ("killed", "straight")]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["base"], ["no set given; name world:test"]),
        (["base", "world:tset"], ["unknown split 'tset'; known: train"]),
        (["base", "nqq", "--data", "."], ["holds no file of set 'nqq'", "known sets: nq"]),
        (["bass", "world:test", "--dry-run"], ["unknown model 'bass'"]),
        (["base", "world:test", "--prompt", "x"], ["unknown prompt 'x'", "search_r1"]),
        (["base", "world:test", "--limit", "0"], ["holds no question; raise --limit"]),
        (["base", "world:test", "--samples", "3"], ["greedy decoding are all the same"]),
        (["base", "world:test", "--max-total-tokens", "9"], ["prompt of", "max_total_tokens is 9; raise"]),
        (["base", "math:dev", "--retrievel", "none"], ["--retrievel", "did you mean --retrieval"]),
        (["m", "world:test", "--engine", "openai", "--tokenizer", "base"], ["needs a URL as http://host:port/v1"]),
    ],
)
def test_bad_input_is_one_line(
    run: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    line = refused(run, capsys, "evaluate", *arguments, "--output", tmp_path / "out")
    assert all(part in line for part in parts), line
    assert not (tmp_path / "out").exists()
