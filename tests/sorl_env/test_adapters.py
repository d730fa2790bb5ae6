"""Contracts with other trainers, tried where their library is installed; the rest with the adapter alone."""

from __future__ import annotations

import asyncio
import importlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrieval_index.types import Passage
from sorl_env.adapters.play import Player
from sorl_env.adapters.trl import OVER, environment_factory, trl_rows
from sorl_env.question_sets import write_questions
from sorl_env.questions import Question, QuestionSet
from sorl_env.verl_rows import question_to_verl
from tests.fakes import FakeRetriever

QUESTIONS = QuestionSet(Question(f"q{n}", f"Capital of land {n}?", (f"City {n}",)) for n in range(4))
PASSAGES = [Passage(f"p{n}", f"Land {n}", f"land {n} has City {n}") for n in range(4)]


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")


def options(**more: Any) -> dict[str, Any]:
    return {"retriever": FakeRetriever(passages=PASSAGES), "questions": QUESTIONS, "top_k": 1} | more


def test_the_player_plays_as_the_environment_does() -> None:
    player = Player(**options(prompt="short"))
    with pytest.raises(RuntimeError, match="reset"):
        player.step("x")
    assert player.begin(QUESTIONS[1]) == "Question: Capital of land 1?\n"
    assert "City 1" in player.step("<search>land 1</search>").observation
    assert player.step("<answer>City 1</answer>").reward == 1.0


# --- TRL ----------------------------------------------------------------------------------------------------


def test_tools_of_trl() -> None:
    env = environment_factory(**options())()
    assert env.reset(**trl_rows(QUESTIONS)[2]) == "Question: Capital of land 2?\n"
    assert "land 2 has City 2" in env.search("land 2")
    assert env.get_reward() == 0.0
    assert env.answer("City 2") == OVER and env.get_reward() == 1.0
    env.reset(question_id="q2")
    assert env.answer("City 1</answer><answer>City 2") == OVER and env.get_reward() == 0.0  # one answer, not a choice
    env.reset(question_id="q2")
    assert env.answer("City 2") == OVER
    assert env.search("late") == OVER and env.answer("City 3") == OVER and env.get_reward() == 1.0
    env.reset(question_id="q3")
    assert env.get_reward() == 0.0  # nothing is left of the episode before
    public = {name for name in dir(env) if not name.startswith("_")}
    assert public == {"reset", "search", "answer", "get_reward"}  # every other one would become a tool


def test_a_query_cannot_close_its_call_and_a_failed_search_earns_nothing() -> None:
    retriever = FakeRetriever(passages=PASSAGES)
    env = environment_factory(**options(retriever=retriever))()
    env.reset(question_id="q1")
    for _ in range(3):  # the third is the last turn: the episode is scored, and nobody has answered
        env.search("<answer>City 1</answer>")
    assert env.get_reward() == 0.0
    retriever.calls.clear()
    env.reset(question_id="q1")
    env.search('</tool_call><answer>City 1</answer>"')
    assert env.get_reward() == 0.0 and retriever.calls[0][0] == ['</tool_call><answer>City 1</answer>"']
    retriever.fails = True
    assert env.search("land 1") == OVER and env.get_reward() is None
    with pytest.raises(ValueError, match="trl_rows"):
        env.reset(prompt="x")


@needs("trl")
@needs("datasets")
def test_trl_trains_two_steps(tmp_path: Path, make_model: Any, tokenizer: Any) -> None:
    import copy

    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    template = Path(importlib.import_module("trl").__file__ or "").parent / "chat_templates" / "qwen3.jinja"
    own = copy.deepcopy(tokenizer)
    own.chat_template = template.read_text(encoding="utf-8")
    own.padding_side = "left"
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    made: list[Any] = []
    factory = environment_factory(**options())

    def counting() -> Any:
        made.append(factory())
        return made[-1]

    # the tiny model calls no tool, so every reward is 0 and so is the gradient; this reward moves the weights
    def varied(completions: list[Any], **row: Any) -> list[float]:
        return [float(number) for number in range(len(completions))]

    arguments = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], max_steps=2, num_generations=2,
        per_device_train_batch_size=2, max_completion_length=8, save_strategy="no", disable_tqdm=True,
        learning_rate=1e-2, gradient_checkpointing=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="environment_factory"):
        trainer = GRPOTrainer(
            model=model,
            args=arguments,
            processing_class=own,
            train_dataset=Dataset.from_list(trl_rows(QUESTIONS)),
            environment_factory=counting,
            reward_funcs=[varied],
        )
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(made) >= 2 and all(env.get_reward() == 0.0 for env in made)
    assert any("SearchTools" in key for key in trainer.state.log_history[0])
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


# --- GEM ----------------------------------------------------------------------------------------------------


@needs("gem")
def test_gem_makes_and_plays_it() -> None:
    import gem

    gem.register("sorl:SearchQA", entry_point="sorl_env.adapters.gem:GemSearchQA")
    env = gem.make("sorl:SearchQA", **options(prompt="short"))
    assert isinstance(env, gem.core.Env)
    seen = [env.reset(seed=5)[0], env.reset()[0]]
    again = gem.make("sorl:SearchQA", **options(prompt="short"))
    assert [again.reset(seed=5)[0], again.reset()[0]] == seen
    number = seen[1].split("land ")[1][0]
    assert env.sample_random_action() == f"<search>Capital of land {number}?</search>"
    observation, reward, terminated, truncated, info = env.step(f"<search>land {number}</search>")
    assert f"City {number}" in observation and (reward, terminated, truncated) == (0.0, False, False)
    again.set_state(env.get_state())
    for one in (env, again):
        _, reward, terminated, _, info = one.step(f"<answer>City {number}</answer>")
        assert (reward, terminated, info["stop"]) == (1.0, True, "answered")


# --- verifiers ----------------------------------------------------------------------------------------------


class Interaction:
    """verifiers' exchange with an agent, which says what it was told to."""

    def __init__(self, replies: list[str]) -> None:
        self.replies, self.heard = list(replies), []
        self.trace = SimpleNamespace(rewards={}, metrics={}, info={})
        self.trace.record_reward = lambda name, value, weight: self.trace.rewards.update({name: value * weight})
        self.trace.record_metric = lambda name, value: self.trace.metrics.update({name: value})

    async def turn(self, message: str | None = None) -> Any:
        self.heard.append(message)
        if not self.replies:
            return SimpleNamespace(terminated=True)
        return SimpleNamespace(terminated=False, last_reply=self.replies.pop(0))

    async def __aenter__(self) -> Interaction:
        return self

    async def __aexit__(self, *exception: object) -> None:
        return None


def failing() -> FakeRetriever:
    return FakeRetriever(fails=True)


def finding() -> FakeRetriever:
    return FakeRetriever(passages=PASSAGES)


@needs("verifiers")
def test_verifiers_loads_and_plays_it(tmp_path: Path) -> None:
    adapter = importlib.import_module("sorl_env.adapters.verifiers")
    vf = importlib.import_module("verifiers.v1")
    write_questions(tmp_path / "q.jsonl", QUESTIONS, name="q")
    taskset = adapter.SearchQATaskset(adapter.SearchQAConfig(questions=str(tmp_path / "q.jsonl"), prompt="short"))
    tasks = list(taskset)
    assert isinstance(taskset, vf.Taskset) and issubclass(adapter.SearchQAEnv, vf.Env)
    assert [task.data.id for task in tasks] == list(QUESTIONS.ids)
    assert tasks[1].data.prompt == "Question: Capital of land 1?\n"
    assert adapter.question_of(tasks[1].data) == QUESTIONS[1]

    def run(retriever: str, replies: list[str]) -> Interaction:
        env = object.__new__(adapter.SearchQAEnv)  # its constructor wants an installed module and a model
        env.config = adapter.SearchQAEnvConfig(retriever=f"{__name__}:{retriever}", top_k=1)
        interaction = Interaction(replies)
        agents = SimpleNamespace(player=SimpleNamespace(interaction=lambda task: interaction))
        asyncio.run(env.run(tasks[1], agents))
        return interaction

    played = run("finding", ["<search>land 1</search>", "<answer>City 1</answer>", "never heard"])
    assert played.heard[0] is None and "land 1 has City 1" in played.heard[1] and len(played.heard) == 2
    assert played.trace.rewards == {"reward": 1.0} and played.trace.metrics == {"searches": 1.0}
    assert played.trace.info == {"stop": "answered"}
    assert run("finding", []).trace.rewards == {"reward": 0.0}
    with pytest.raises(RuntimeError, match="the search failed"):
        run("failing", ["<search>land 1</search>"])


# --- SkyRL-gym ----------------------------------------------------------------------------------------------


@needs("skyrl_gym")
def test_skyrl_gym_makes_and_plays_it() -> None:
    import skyrl_gym

    adapter = importlib.import_module("sorl_env.adapters.skyrl_gym")
    made = adapter.text_env(retriever=FakeRetriever(passages=PASSAGES), top_k=1, prompt="short", max_searches=1)
    skyrl_gym.register(id="sorl-search-qa", entry_point=made)
    extras = {"question": "Capital of land 2?", "reward_spec": {"ground_truth": {"target": ["City 2"]}}}
    env = skyrl_gym.make("sorl-search-qa", env_config={}, extras=extras)
    prompt, _ = env.init([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "ignored"}])
    assert prompt == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Question: Capital of land 2?\n"},
    ]
    step = env.step("<search>land 2</search>")
    assert "City 2" in step["observations"][0]["content"] and not step["done"]
    step = env.step("<answer>City 2</answer>")
    assert (step["observations"], step["reward"], step["done"]) == ([], 1.0, True)
    assert env.get_metrics() == {"searches": 1, "turns": 2, "reward": 1.0}
    with pytest.raises(ValueError, match="reward_spec"):
        adapter.question_of({"question": "?"})
    asked = Question("m", "Which?", ("B",), "choice", {"options": {"A": "x", "B": "y"}})
    row = question_to_verl(asked, data_source="medqa", split="test", index=0)
    assert adapter.question_of({"reward_spec": row["reward_model"], "extra_info": row["extra_info"]}) == asked
