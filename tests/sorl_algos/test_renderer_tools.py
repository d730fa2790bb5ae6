"""Tool calls: what the template shows, what comes back as a tool message, templates that cannot do it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.renderer import Renderer, tool_content
from sorl_algos.tiny import train_tokenizer
from sorl_env.dialects import DIALECTS, SEARCH_TOOL
from sorl_env.observations import hint
from tests.fakes import FakeRetriever, ScriptedEngine
from tests.sorl_algos.small_game import PASSAGES, QUESTIONS, make_env
from tests.tokenizers import CHAT, TOOLS, byte_level

CALL = '<tool_call>\n{"name": "search", "arguments": {"query_list": ["capital of Peru"]}}\n</tool_call>'
OBSERVATION = "\n<tool_response>\nDoc 1(Title: Peru) Lima.\n</tool_response>\n"
END = "<|end|>"


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_level(template=template)
    tokenizer.name_or_path = "some/model"
    return tokenizer


def whole(tokenizer: Any, *said: tuple[str, str]) -> str:
    """What the template itself makes of a conversation."""
    messages = [{"role": role, "content": content} for role, content in said]
    return tokenizer.apply_chat_template(messages, tools=[SEARCH_TOOL], tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("style", ["continuation", "chat"])
def test_the_tool_is_shown_as_the_template_shows_it(style: Any) -> None:
    tokenizer = tokenizer_with(TOOLS)
    ids = Renderer(tokenizer, style=style, tools=[SEARCH_TOOL]).first("Q")
    assert tokenizer.decode(ids) == whole(tokenizer, ("user", "Q"))
    assert json.dumps(SEARCH_TOOL["function"]["parameters"]["required"]) in tokenizer.decode(ids)
    assert "Tools:" not in tokenizer.decode(Renderer(tokenizer, style=style).first("Q"))


def test_in_chat_style_observations_come_back_as_tool_messages() -> None:
    tokenizer = tokenizer_with(TOOLS)
    renderer = Renderer(tokenizer, style="chat", tools=[SEARCH_TOOL])
    sampled = tokenizer.encode(CALL)
    ids = [*renderer.first("Q"), *sampled, *renderer.next(OBSERVATION, sampled)]
    expected = whole(tokenizer, ("user", "Q"), ("assistant", CALL), ("tool", "Doc 1(Title: Peru) Lima."))
    assert tokenizer.decode(ids) == expected
    said = hint("no <tool_call> or <answer> was found", ["<answer>answer</answer>"])
    assert tokenizer.decode(renderer.next(said)) == whole(
        tokenizer, ("user", "Q"), ("assistant", ""), ("tool", said.strip())
    ).removeprefix(whole(tokenizer, ("user", "Q")))


def test_in_continuation_style_they_stand_in_the_assistants_text() -> None:
    tokenizer = tokenizer_with(TOOLS)
    renderer = Renderer(tokenizer, tools=[SEARCH_TOOL])
    assert tokenizer.decode(renderer.next(OBSERVATION, tokenizer.encode(CALL))) == OBSERVATION


@pytest.mark.parametrize("tools", [(), (SEARCH_TOOL,)])
def test_a_message_that_the_policy_closed_itself_is_not_closed_again(tools: Any) -> None:
    tokenizer = tokenizer_with(TOOLS)
    renderer = Renderer(tokenizer, style="chat", tools=tools)
    sampled = tokenizer.encode("no tag")
    closed = [*sampled, tokenizer.eos_token_id]
    assert [*closed, *renderer.next("R", closed)] == [*sampled, *renderer.next("R", sampled)]
    assert tokenizer.decode(renderer.next("R", closed)).startswith("\n<|user|>")
    # another token at the end, and no policy token at all, change nothing
    assert renderer.next("R", [*closed, 7]) == renderer.next("R") == renderer.next("R", sampled)
    continued = Renderer(tokenizer, tools=tools)
    assert continued.next("R", closed) == continued.next("R", sampled) == tokenizer.encode("R")


def test_what_stands_behind_the_passages_stays() -> None:
    assert tool_content(OBSERVATION) == "Doc 1(Title: Peru) Lima."
    assert tool_content(OBSERVATION + "Searches left: 1.\n\n") == "Doc 1(Title: Peru) Lima.\nSearches left: 1."
    assert tool_content("\n<tool_response>\na\nb\n</tool_response>\n") == "a\nb"
    assert tool_content("\n\nNot a valid action: x.\n\n") == "Not a valid action: x."


OTHER_CALLS = TOOLS.replace("tool_call>", "function>")
REFUSES = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + CHAT
IS_TOOL = "{% if m['role'] == 'tool' %}"
NO_TOOL_ROLE = TOOLS.replace(IS_TOOL, IS_TOOL + "{{ raise_exception('who?') }}")


@pytest.mark.parametrize(
    ("template", "style", "parts"),
    [
        (CHAT, "continuation", ["'some/model' does not show tools", "another dialect than 'tool_call'"]),
        (OTHER_CALLS, "continuation", ["does not write tool calls as JSON between <tool_call>"]),
        (REFUSES, "continuation", ["refuses the messages (user): no tools here"]),
        (NO_TOOL_ROLE, "chat", ["refuses the messages (user, assistant, tool): who?"]),
        (None, "continuation", ["'some/model' has no chat template, which tools needs"]),
    ],
)
def test_templates_that_cannot_do_it_are_refused(template: str | None, style: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        Renderer(tokenizer_with(template), style=style, tools=[SEARCH_TOOL])
    assert all(part in str(refusal.value) for part in parts), refusal.value


def test_a_system_message_needs_a_template() -> None:
    with pytest.raises(ValueError, match="no chat template, which a system message needs"):
        Renderer(tokenizer_with(None), system="Be brief.")


def test_bos_once_from_a_tokenizer_that_wants_one_and_has_no_template() -> None:
    tokenizer = byte_level(bos=True, template=None)
    begin = tokenizer.convert_tokens_to_ids("<s>")
    renderer = Renderer(tokenizer)
    assert renderer.first("hello <s>") == [begin, *tokenizer.encode("hello <s>", add_special_tokens=False,
                                                                    split_special_tokens=True)]  # fmt: skip
    assert begin not in renderer.next("hello <s>")
    with_template = Renderer(byte_level(bos=True))
    assert with_template.first("hello").count(begin) == 1
    assert begin not in Renderer(byte_level(template=None)).first("hello")


ANY_TEXT = st.text(st.characters(codec=None), max_size=30)


@given(question=ANY_TEXT, body=ANY_TEXT)
@settings(max_examples=50)
def test_no_text_makes_a_special_token_or_another_message(question: str, body: str) -> None:
    tokenizer, renderer = CHAT_TOOLS
    special = set(tokenizer.all_special_ids)
    for observation in (f"\n<tool_response>\n{body}\n</tool_response>\n", body):
        for ids, plain in (
            (renderer.first(question), renderer.first("x")),
            (renderer.next(observation), renderer.next("x")),
        ):
            assert [i for i in ids if i in special] == [i for i in plain if i in special]


CHAT_TOOLS = (tokenizer_with(TOOLS), Renderer(tokenizer_with(TOOLS), style="chat", tools=[SEARCH_TOOL]))


@pytest.mark.parametrize("style", ["continuation", "chat"])
def test_an_episode_of_tool_calls(style: Any) -> None:
    tokenizer = tokenizer_with(TOOLS)
    env = make_env(1, FakeRetriever(passages=PASSAGES), dialect="tool_call")
    engine = ScriptedEngine(tokenizer, ["hm", "<think>x</think>\n" + CALL, "<answer>Lima</answer>"])
    renderer = Renderer(tokenizer, style=style, tools=env.tools)
    [trajectory] = collect(env, engine, renderer, [QUESTIONS.by_id("q0")], sampling=Sampling(max_tokens=200))
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0] and trajectory.stop == "answered"
    assert [note["action_kind"] for note in trajectory.info["turns"]] == ["invalid", "search", "answer"]
    assert trajectory.info["turns"][1]["retrieved_ids"] == ["p0"]
    assert engine.calls[0][1].stop == DIALECTS["tool_call"].stop_strings == ("</tool_call>", "</answer>")
    prompts = [prompts[0] for prompts, _ in engine.calls]
    for before, after, turn in zip(prompts, prompts[1:], trajectory.turns, strict=False):
        assert after[: len(before) + len(turn.action_ids)] == [*before, *turn.action_ids]
    assert trajectory.turns[0].action_ids[-1] == tokenizer.eos_token_id  # the engine sampled it
    text = tokenizer.decode(prompts[-1])
    assert text.count("<tool_response>") == (2 if style == "chat" else 1)  # a hint is a message too
    assert "The capital of Peru is Lima." in text
    assert (END + END not in text) and text.count("<|assistant|>") == (3 if style == "chat" else 1)


def test_a_tokenizer_that_hides_the_tags_is_refused() -> None:
    tokenizer = tokenizer_with(TOOLS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</tool_call>"]})
    env = make_env(1, FakeRetriever(passages=PASSAGES), dialect="tool_call")
    with pytest.raises(ValueError, match="'</tool_call>' is a special token of tokenizer 'some/model'"):
        collect(env, ScriptedEngine(tokenizer, []), Renderer(tokenizer, tools=env.tools), [QUESTIONS.by_id("q0")])


def published(name: str) -> Any:
    """A tokenizer with the chat template of a published model, as TRL brings it."""
    spec = find_spec("trl")
    path = Path(str(spec.origin)).parent / "chat_templates" / f"{name}.jinja" if spec else Path("trl")
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    tokenizer = train_tokenizer(["Question: What is the capital of Peru?"] * 4, 330)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_templates_of_published_models(name: str) -> None:
    tokenizer = published(name)
    for style in ("continuation", "chat"):
        renderer = Renderer(tokenizer, style=style, tools=[SEARCH_TOOL])  # type: ignore[arg-type]
        shown = tokenizer.decode(renderer.first("Q"))
        assert '"query_list"' in shown and shown.endswith("<|im_start|>assistant\n")
    sampled = tokenizer.encode(CALL)
    assert tokenizer.decode(renderer.next(OBSERVATION, sampled)) == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nDoc 1(Title: Peru) Lima.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.decode(renderer.next(OBSERVATION, [*sampled, end])).startswith("\n<|im_start|>user\n<tool_resp")


def test_published_templates_that_cannot_do_it() -> None:
    with pytest.raises(ValueError, match="does not write tool calls as JSON between <tool_call>"):
        Renderer(published("llama3_1"), tools=[SEARCH_TOOL])
    with pytest.raises(ValueError, match=r"rewrites earlier messages at turn 1.*continuation"):
        Renderer(published("qwen3"), style="chat")  # it drops the thoughts before a user message
