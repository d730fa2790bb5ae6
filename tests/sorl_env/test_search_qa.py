"""SearchQA-v0 through gymnasium, one episode at a time."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import sorl_env  # noqa: F401  (registers the environments)
from retrieval_index.types import Passage, RetrievalError
from sorl_env.questions import Question, QuestionSet
from sorl_env.search_qa import SearchQAEnv
from sorl_env.spaces import AnyText
from tests.fakes import FakeRetriever

QUESTIONS = QuestionSet(Question(f"q{i}", f"Capital of land {i}?", (f"City {i}",)) for i in range(20))
PASSAGES = [Passage(f"p{i}", f"Land {i}", f"The capital of land {i} is City {i}.") for i in range(20)]


def make(**options: Any) -> gymnasium.Env[str, str]:
    return gymnasium.make(
        "SearchQA-v0",
        **{
            "retriever": FakeRetriever(passages=PASSAGES),
            "questions": QUESTIONS,
            "prompt": "short",
            **options,
        },
    )


def test_an_episode() -> None:
    env = make()
    observation, info = env.reset(seed=1, options={"question_id": "q3"})
    assert observation == "Question: Capital of land 3?\n"
    assert (info["question_id"], info["stop"], info["searches"]) == ("q3", None, 0)
    observation, reward, terminated, truncated, info = env.step("<search>capital of land 3</search>")
    assert "City 3" in observation and "p3" in info["retrieved_ids"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    observation, reward, terminated, truncated, info = env.step("<answer>city 3</answer>")
    assert (observation, reward, terminated, truncated, info["stop"]) == ("", 1.0, True, False, "answered")
    with pytest.raises(RuntimeError, match="reset"):
        env.step("<search>again</search>")


def test_check_env_finds_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make().unwrapped)
        check_env(make(render_mode="ansi").unwrapped)


def test_questions_are_drawn_from_the_seed() -> None:
    def drawn(seed: int) -> list[str]:
        env = make()
        ids = [env.reset(seed=seed)[1]["question_id"]]
        return ids + [env.reset()[1]["question_id"] for _ in range(8)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) > 3


def test_the_retriever_gets_one_query_a_search_and_none_otherwise() -> None:
    retriever = FakeRetriever(passages=PASSAGES)
    env = make(retriever=retriever, max_searches=2, top_k=2)
    env.reset(seed=0)
    for action in ("hm", "<search>land 4</search>", "<search>land 5</search>"):
        env.step(action)
    assert retriever.calls == [(["land 4"], 2)]  # the last turn is for the answer


def test_a_failed_search_is_an_ending_and_no_text() -> None:
    env = make(retriever=FakeRetriever(fails=True))
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("<search>x</search>")
    assert (observation, reward, terminated, truncated) == ("", 0.0, False, True)
    assert info["stop"] == "retrieval_error"
    assert "secret" not in repr(info)


def test_other_errors_of_a_retriever_come_through() -> None:
    class Short(FakeRetriever):
        def search(self, queries: Any, top_k: int) -> Any:
            return []

    env = make(retriever=Short())
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"Short\.search gave 0 results for 1 queries"):
        env.step("<search>x</search>")
    assert issubclass(RetrievalError, RuntimeError)


def test_rendering(capsys: pytest.CaptureFixture[str]) -> None:
    env = make(render_mode="ansi")
    env.reset(options={"question_id": "q1"})
    env.step("<search>land 1</search>")
    env.step("<answer>City 1</answer>")
    text = env.render()
    assert isinstance(text, str)
    assert text.startswith("Question: Capital of land 1?\n<search>land 1</search>\n\n<information>Doc 1")
    assert text.endswith("<answer>City 1</answer>\n[answered; reward 1]\n")
    env = make(render_mode="human")
    env.reset(options={"question_id": "q1"})
    env.step("<answer>\ud83d half</answer>")
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert shown[0].startswith("q1 ─")
    assert shown[1:] == ["Question: Capital of land 1?", "turn 1", "<answer>? half</answer>", "answered; reward 0"]


def test_people_see_every_turn_and_no_markup_is_read_from_texts(capsys: pytest.CaptureFixture[str]) -> None:
    env = make(render_mode="human")
    env.reset(options={"question_id": "q1"})
    env.step("<think>[bold]hm[/bold]</think>so <search>land 1</search> and")
    env.step("")
    env.step("<answer>City 1</answer>")
    shown = capsys.readouterr().out
    assert "[bold]hm[/bold]</think>so <search>land 1</search> and" in shown
    env.reset(options={"question_id": "q1"})
    env.step("\x1b[2J\rgone\x07")
    assert "\ufffd[2J\ufffdgone\ufffd" in capsys.readouterr().out  # a terminal would have obeyed
    assert "<information>Doc 1" in shown and "(nothing)" in shown and "answered; reward 1" in shown


def test_state_goes_on_in_another_environment() -> None:
    one, two = make().unwrapped, make().unwrapped
    assert isinstance(one, SearchQAEnv) and isinstance(two, SearchQAEnv)
    one.reset(seed=5)
    one.step("<search>land 7</search>")
    state = one.get_state()
    two.set_state(state)
    assert one.step("<answer>City 7</answer>") == two.step("<answer>City 7</answer>")
    assert one.reset()[0] == two.reset()[0]
    with pytest.raises(RuntimeError, match="reset"):
        make().unwrapped.get_state()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reward": "em"}, ValueError, "unknown reward 'em'; known:"),
        ({"prompt": "none"}, ValueError, "unknown prompt 'none'; known:"),
        ({"max_search": 3}, TypeError, "unknown option 'max_search'; known: max_searches"),
        ({"questions": []}, ValueError, "holds no question"),
        ({"questions": "none.jsonl"}, FileNotFoundError, r"none\.jsonl"),
        ({"retriever": object()}, TypeError, r"search\(queries, top_k\)"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="render_mode 'rgb'"):
        SearchQAEnv(FakeRetriever(), QUESTIONS, render_mode="rgb")
    env = SearchQAEnv(FakeRetriever(), list(QUESTIONS))
    with pytest.raises(RuntimeError, match="reset"):
        env.step("x")
    with pytest.raises(KeyError, match="did you mean 'q1'"):
        env.reset(options={"question_id": "Q1"})
    with pytest.raises(ValueError, match="unknown reset option 'question'; known: question_id"):
        env.reset(options={"question": "q1"})
    env.reset(seed=0)
    with pytest.raises(TypeError, match="got int"):
        env.step(3)  # type: ignore[arg-type]


def test_questions_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"id": "a", "question": "Why?", "answer": "so"}\n', encoding="utf-8")
    assert make(questions=path).reset(seed=0)[0] == "Question: Why?\n"


def test_space_holds_every_text() -> None:
    space = AnyText()
    for text in (
        "",
        "line\nline",
        "<information>Zoë – 北京 & Co.</information>",
        "🧪 </answer>",
        "\ud800",
        "\x00",
    ):
        assert text in space
    assert None not in space and b"x" not in space and 3 not in space
    assert space == AnyText(seed=3) and hash(space) == hash(AnyText())
    space.seed(4)
    first = [space.sample() for _ in range(5)]
    space.seed(4)
    assert [space.sample() for _ in range(5)] == first
    assert space.from_jsonable(space.to_jsonable(first)) == first
    with pytest.raises(ValueError, match="mask"):
        space.sample(mask=1)


def in_fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_nothing_heavy() -> None:
    heavy = "'torch', 'transformers', 'tokenizers', 'bm25s', 'sorl_env.world', 'sorl_env.search_qa'"
    code = f"import sorl_env, sys; print([name for name in ({heavy}) if name in sys.modules])"
    assert in_fresh_interpreter(code) == "[]\n"


def test_bundled_world_without_arguments() -> None:
    code = """
import gymnasium, sys, warnings
warnings.simplefilter("error")
env = gymnasium.make("sorl_env:SearchQA-v0", prompt="short")
print(env.reset(seed=0)[0].startswith("Question: "), "torch" in sys.modules)
print("<information>Doc 1(Title: " in env.step("<search>capital of Peru</search>")[0])
"""
    assert in_fresh_interpreter(code) == "True False\nTrue\n"
