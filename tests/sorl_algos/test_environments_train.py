"""Every environment and every dialect trains: whole runs of one update, from the settings to the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_algos.models import Policy, save_language_model
from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.run import EvalSet, Run, make_environment
from sorl_algos.tiny import tiny_language_model, train_tokenizer
from sorl_algos.warmup import supervised
from sorl_env.bundled import held_out, open_questions
from sorl_env.dialects import SEARCH_TOOL
from sorl_env.questions import Question, QuestionSet
from tests.conftest import GAME_TEXTS
from tests.fakes import FakeRetriever, ScriptedEngine
from tests.sorl_algos.small_game import CAPITALS, PASSAGES, QUESTIONS, make_env, small_config
from tests.tokenizers import TOOLS


class Silent:
    """A Progress that shows nothing."""

    def begin(self, stage: str, total: int) -> None:
        return None

    def advance(self, steps: int = 1, note: str = "") -> None:
        return None


def run_of(config: Any, questions: Any, retriever: Any) -> Run:
    return Run(
        config,
        retriever=retriever,
        train_questions=questions,
        dev_questions=questions,
        eval_sets=[EvalSet("test", questions)],
        progress=Silent(),
    )


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(make_model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "untrained"
    save_language_model(make_model(), tokenizer, directory)
    return str(directory)


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("SearchQA-v0", {"reward": "0.9*exact_match + 0.1*format", "tell_budget": True, "max_total_words": 60}),
        ("MedicalQA-v0", {"reward": "choice_accuracy", "invalid_penalty": 0.25, "max_searches": 1}),
        ("MathQA-v0", {"reward": "math_equal", "max_searches": 0, "prompt": "math", "system_prompt": "Be brief."}),
    ],
)
def test_every_environment_trains(env: str, settings: dict[str, Any], model: str, tmp_path: Path) -> None:
    name = {"SearchQA-v0": "world", "MedicalQA-v0": "medical", "MathQA-v0": "math"}[env]
    questions = open_questions(f"{name}:dev")[:4]
    config = small_config(
        tmp_path, model=model, env=env, questions=f"{name}:dev", updates=1, eval_limit=0, max_turn_tokens=5,
        max_total_tokens=1000, **settings,
    )  # fmt: skip
    summary = run_of(config, questions, None).execute()  # with the passages of the environment itself
    assert summary["finished"] and summary["updates_run"] == 1
    assert [entry["stage"] for entry in read(tmp_path / "evaluations.json")] == ["before", "after"]
    rows = [json.loads(line) for line in (tmp_path / "trajectories_after.jsonl").read_text().splitlines()]
    first = rows[0]["turns"][0]
    assert questions[0].text in first["observation_text"]
    assert ("Searches left" in first["observation_text"]) == (env == "SearchQA-v0")
    penalties = sum(turn["reward"] for row in rows for turn in row["turns"] if turn["action_kind"] == "invalid")
    assert penalties <= 0 and read(tmp_path / "config.json")["env"] == env


def caller(prompt: str) -> str:
    """Calls the tool once, then answers what came back."""
    if "Doc 1" not in prompt:
        land = prompt.split("capital of ")[1].split("?")[0]
        return f'<tool_call>{{"name": "search", "arguments": {{"query_list": ["{land}"]}}}}</tool_call>'
    return "<answer>" + prompt.rsplit(" is ", 1)[1].split(".")[0] + "</answer>"


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that was taught to call the tool, in chat style."""
    texts = [*GAME_TEXTS, json.dumps(SEARCH_TOOL), caller("capital of Peru?"), "<tool_response>\n</tool_response>"]
    tokenizer = train_tokenizer(texts * 8, 620)
    tokenizer.chat_template = TOOLS
    env = make_env(3, dialect="tool_call", max_searches=1)
    renderer = Renderer(tokenizer, style="chat", tools=env.tools)
    engine = ScriptedEngine(tokenizer, caller)
    shown = collect(env, engine, renderer, list(QUESTIONS), sampling=Sampling(max_tokens=80))
    assert [item.reward for item in shown] == [1.0, 1.0, 1.0]
    lm = tiny_language_model(len(tokenizer), hidden_size=32, layers=2, heads=4, intermediate_size=64)
    lm.generation_config.eos_token_id = tokenizer.eos_token_id
    supervised(Policy(lm), shown * 2, steps=70, batch_sequences=6, lr=1e-2, pad_id=tokenizer.pad_token_id, seed=0)
    directory = tmp_path_factory.mktemp("models") / "calling"
    save_language_model(lm, tokenizer, directory)
    return str(directory)


@pytest.mark.parametrize("style", ["continuation", "chat"])
def test_tool_calls_are_trained_and_evaluated(style: Any, calling: str, tmp_path: Path) -> None:
    config = small_config(
        tmp_path, model=calling, dialect="tool_call", chat_style=style, updates=1, eval_limit=0,
        max_searches=1, max_turn_tokens=60, max_total_tokens=700, search_cost=0.125,
    )  # fmt: skip
    retriever = FakeRetriever(passages=PASSAGES)
    summary = run_of(config, QUESTIONS, retriever).execute()
    assert summary["finished"] and retriever.calls
    before = read(tmp_path / "evaluations.json")[0]
    assert before["searches"]["mean"] > 0
    if style == "chat":  # what was taught: each question is searched for, and answered
        assert before["searches"]["mean"] == before["answered"]["mean"] == 1.0
    rows = [json.loads(line) for line in (tmp_path / "trajectories_before.jsonl").read_text().splitlines()]
    searched = [turn for row in rows for turn in row["turns"] if turn["action_kind"] == "search"]
    assert searched and all(turn["action_text"].endswith("</tool_call>") for turn in searched)
    assert all(row["turns"][0]["reward"] == -0.125 for row in rows if row["turns"][0]["retrieved"])


def test_what_cannot_be_played_is_refused_before_anything_is_written(model: str, tmp_path: Path) -> None:
    open_ones = QuestionSet(Question(f"q{n}", land, (city,)) for n, (land, city) in enumerate(CAPITALS.items()))
    for settings, parts in (
        ({"dialect": "tool_call"}, ["does not show tools", "another dialect"]),
        ({"dialect": "tool_call", "prompt": "search_r1"}, ["explains the dialect 'search_r1'", "'tools'"]),
        ({"reward": "exact"}, ["unknown reward 'exact'", "known: choice_accuracy"]),
        ({"reward": "exact_match + 0.5*choice_accuracy"}, ["choice_accuracy does not fit", "question 'q0'", "options"]),
        ({"env": "MedicalQA-v0", "reward": "choice_accuracy"}, ["does not fit these questions", "no options"]),
        ({"search_cost": float("inf")}, ["search_cost", "finite"]),
    ):
        config = small_config(tmp_path / "new", model=model, **settings)
        with pytest.raises(ValueError) as refusal:
            run_of(config, open_ones, FakeRetriever())
        assert all(part in str(refusal.value) for part in parts), refusal.value
    assert not (tmp_path / "new").exists()


def test_a_configuration_reaches_every_rule(tmp_path: Path) -> None:
    settings = {
        "max_searches": 4, "top_k": 2, "max_observation_words": None, "max_query_chars": 99, "max_turn_words": 7,
        "max_total_words": 70, "tell_budget": True, "invalid_penalty": 0.5, "search_cost": 0.25,
        "options_in_query": False, "last_turn_answers": True, "dialect": "tool_call", "prompt": "tools",
    }  # fmt: skip
    rules = make_environment(small_config(tmp_path, **settings), QUESTIONS, FakeRetriever(), 1).rules
    assert {name: getattr(rules, name) for name in rules.__dataclass_fields__} == settings  # not one is left out
    medical = make_environment(
        small_config(tmp_path, env="MedicalQA-v0", reward="choice_accuracy"), open_questions("medical:dev"), None, 1
    ).rules
    assert (medical.options_in_query, medical.dialect) == (False, "search_r1")  # None: as the environment has it


def test_bundled_sets_by_name(tmp_path: Path) -> None:
    assert open_questions("medical:dev").name == "medical/dev" and open_questions("math:test").name == "math/test"
    assert list(held_out("world:dev")) == ["test", "test_unseen"] and held_out("some/file.jsonl") == {}
    with pytest.raises(ValueError, match="unknown split 'tset'; known: train, dev, test, all"):
        open_questions("medical:tset")
    with pytest.raises(ValueError, match=r"question file nowhere.jsonl does not exist; .* world:train"):
        open_questions("nowhere.jsonl")
    path = tmp_path / "q.jsonl"
    path.write_text('{"id": "a", "question": "1+1?", "answer": 2}\n')
    assert open_questions(str(path), kind="math")[0].kind == "math"
