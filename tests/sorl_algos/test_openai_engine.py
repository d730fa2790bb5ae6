"""OpenAIEngine against a server on this machine: one that answers as vLLM does, and lesser ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sorl_algos.evaluation.engines import make_player, trained_with
from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.engine import RolloutEngine, Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.openai import OpenAIEngine, ServerError
from sorl_algos.rollout.renderer import Renderer
from tests.sorl_algos.small_game import QUESTIONS, good_player, make_env

STOP = ("</search>", "</answer>")
Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any], dict[str, str]]]


class Server:
    """Answers POST /v1/completions with what ``answer`` makes of the request; keeps the requests."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body: (200, {}, {})
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "mine"}]}, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.keys.append(self.headers.get("Authorization"))
                self._send(*outer.answer(body))

            def _send(self, status: int, reply: Any, headers: dict[str, str]) -> None:
                data = json.dumps(reply).encode()
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(data))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


def choice(text: str, finish: str = "stop", **more: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    return 200, {"choices": [{"text": text, "finish_reason": finish, **more}]}, {}


def like_vllm(engine: HFEngine, tokenizer: Any) -> Answer:
    """A server whose model is the engine's."""
    lock = threading.Lock()

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        sampling = Sampling(
            max_tokens=body["max_tokens"], temperature=body["temperature"], stop=tuple(body["stop"]),
            seeds=(body["seed"],),
        )  # fmt: skip
        with lock:
            [done] = engine.generate([body["prompt"]], sampling)
        text = tokenizer.decode(list(done.token_ids))
        reason = next((string for string in body["stop"] if text.endswith(string)), None)
        return choice(
            text,
            "length" if done.stop == "length" else "stop",
            token_ids=list(done.token_ids),
            stop_reason=reason,
            logprobs={"tokens": [f"token_id:{one}" for one in done.token_ids], "token_logprobs": list(done.logprobs)},
        )

    return answer


def test_the_same_model_behind_a_server_gives_the_same_completions(
    server: Server, tokenizer: Any, make_model: Any
) -> None:
    local = HFEngine(make_model(2), tokenizer, max_batch=1)  # as the server computes: one by one
    server.answer = like_vllm(local, tokenizer)
    engine: RolloutEngine = OpenAIEngine(server.url, "mine", tokenizer, key="secret")
    prompts = [tokenizer.encode(text) for text in ("Question: What", "capital of Peru", " Lima")]
    sampling = Sampling(max_tokens=12, temperature=1.0, stop=STOP, seeds=(5, 6, 7), budgets=(12, 3, 9))
    assert engine.generate(prompts, sampling) == local.generate(prompts, sampling)
    assert set(server.keys) == {"Bearer secret"}
    assert sorted(body["max_tokens"] for body in server.bodies) == [3, 9, 12]
    assert all(body["include_stop_str_in_output"] and body["return_token_ids"] for body in server.bodies)
    assert engine.generate([], sampling) == []


@pytest.mark.parametrize("extras", [True, False])
def test_a_server_that_gives_text_alone_and_cuts_the_tag_off(server: Server, tokenizer: Any, extras: bool) -> None:
    """The whole game is played as with a scripted engine: the tag is put back, ids are made of the text."""

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        text = good_player(body["prompt"])
        return choice(text.removesuffix("</search>").removesuffix("</answer>"))

    server.answer = answer
    engine = OpenAIEngine(server.url, "mine", tokenizer, send="text", extras=extras)
    played = collect(
        make_env(3), engine, Renderer(tokenizer), list(QUESTIONS), sampling=Sampling(max_tokens=40, temperature=0.0)
    )
    assert [item.info["scores"]["exact_match"] for item in played] == [1.0, 1.0, 1.0]
    assert all(turn.action_text.endswith(">") for item in played for turn in item.turns)
    assert engine.retokenised == 6 and ("logprobs" in server.bodies[0]) == extras


@pytest.mark.parametrize(
    ("text", "more", "expected", "stop"),
    [
        ("a <search>x", {}, "a <search>x</search>", "stop"),
        ("<search>x</search> and <answer>Lima", {}, "<search>x</search> and <answer>Lima</answer>", "stop"),
        ("<search>x</search>", {}, "<search>x</search>", "stop"),
        ("<search>x", {"stop_reason": "</search>"}, "<search>x</search>", "stop"),
        ("<search>x", {"stop_reason": None}, "<search>x", "eos"),  # ended by itself, and the server says so
        ("just words", {}, "just words", "eos"),
        ("<search>x", {"finish": "length"}, "<search>x", "length"),
    ],
)
def test_where_a_completion_ended(
    server: Server, tokenizer: Any, text: str, more: dict[str, Any], expected: str, stop: str
) -> None:
    server.answer = lambda body: choice(text, **more)
    [done] = OpenAIEngine(server.url, "mine", tokenizer).generate([[5]], Sampling(max_tokens=40, stop=STOP))
    assert (tokenizer.decode(list(done.token_ids)), done.stop) == (expected, stop)
    assert done.logprobs == (0.0,) * len(done.token_ids)


def test_ids_spelt_as_tokens_are_taken(server: Server, tokenizer: Any) -> None:
    spelt = {"tokens": ["token_id:7", "token_id:9"], "token_logprobs": [-0.5, -1.5]}
    server.answer = lambda body: choice("ab", logprobs=spelt)
    engine = OpenAIEngine(server.url, "mine", tokenizer)
    [done] = engine.generate([[5]], Sampling(stop=STOP))
    assert (done.token_ids, done.logprobs, engine.retokenised) == ((7, 9), (-0.5, -1.5), 0)


def test_an_empty_completion_is_the_end_token(server: Server, tokenizer: Any) -> None:
    server.answer = lambda body: choice("")
    [done] = OpenAIEngine(server.url, "mine", tokenizer).generate([[5]], Sampling(stop=STOP))
    assert (done.token_ids, done.stop) == ((tokenizer.eos_token_id,), "eos")


def test_busy_servers_are_asked_again_and_refusals_are_not(server: Server, tokenizer: Any) -> None:
    waits: list[float] = []
    replies = [(503, {}, {"Retry-After": "7"}), (500, {}, {}), choice("<answer>x</answer>")]
    server.answer = lambda body: replies.pop(0)
    engine = OpenAIEngine(server.url, "mine", tokenizer, sleep=waits.append)
    assert engine.generate([[5]], Sampling(stop=STOP))[0].stop == "stop"
    assert waits[0] == 7.0 and 0.5 <= waits[1] <= 1.5  # half a second doubled, times 0.5 to 1.5
    server.answer = lambda body: (400, {"error": "no such field"}, {})
    server.bodies.clear()
    with pytest.raises(ServerError, match=r"status 400: .*no such field.*prompts as text.*is it running"):
        engine.generate([[5]], Sampling(stop=STOP))
    assert len(server.bodies) == 1
    server.answer = lambda body: (503, {}, {})
    with pytest.raises(ServerError, match="status 503"):
        engine.generate([[5]], Sampling(stop=STOP))
    assert len(server.bodies) == 1 + 5
    server.answer = lambda body: (200, {"choices": []}, {})
    with pytest.raises(ServerError, match="something that is no completion"):
        engine.generate([[5]], Sampling(stop=STOP))


def test_training_is_refused(tokenizer: Any) -> None:
    with pytest.raises(RuntimeError, match="for evaluation only; train with HFEngine or VLLMEngine"):
        OpenAIEngine("http://127.0.0.1:9", "mine", tokenizer).update_weights([], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("127.0.0.1:8000", "m"), "needs a URL as http"),
        (("http://h", ""), "needs a URL as http"),
    ],
)
def test_bad_settings_are_named(tokenizer: Any, arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenAIEngine(*arguments, tokenizer)
    with pytest.raises(ValueError, match="must be positive"):
        OpenAIEngine("http://h", "m", tokenizer, tries=0)
    with pytest.raises(ValueError, match="known: ids, text"):
        OpenAIEngine("http://h", "m", tokenizer, send="tokens")  # type: ignore[arg-type]


def test_players(server: Server, tmp_path: Any) -> None:
    player = make_player("openai", "mine", url=server.url, tokenizer="base")
    assert player.model["name"] == "mine" and player.model["weights"] is None
    with pytest.raises(ValueError, match="serves no model 'yours'; it serves mine"):
        make_player("openai", "yours", url=server.url, tokenizer="base")
    with pytest.raises(ValueError, match="unknown engine 'tgi'; known: hf, vllm, openai"):
        make_player("tgi", "base")
    base = make_player("hf", "base")
    assert base.model["weights"].startswith("files:") and base.model["tokenizer"] == player.model["tokenizer"]


def test_settings_come_from_the_run_that_made_a_model(tmp_path: Any) -> None:
    assert trained_with("base")[1] == {
        "prompt": "short", "max_searches": 3, "top_k": 1, "max_observation_words": 60, "max_turn_tokens": 24,
        "max_total_tokens": 512, "chat_style": "continuation",
    }  # fmt: skip
    assert trained_with("owner/name") == ("owner/name", {"max_turn_tokens": 512, "max_total_tokens": 4096})
    (tmp_path / "config.json").write_text(
        '{"prompt": "short", "top_k": 2, "lr": 1, "prompt_file": null, "chat_style": "chat", '
        '"system_prompt": "Be brief."}'
    )
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="saved no policy yet"):
        trained_with(str(tmp_path))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    weights, settings = trained_with(str(tmp_path))
    assert weights == str(tmp_path / "policy") and settings == {
        "prompt": "short", "top_k": 2, "max_turn_tokens": 512, "max_total_tokens": 4096, "chat_style": "chat",
        "system_prompt": "Be brief.",
    }  # fmt: skip
