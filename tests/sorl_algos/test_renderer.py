"""Text to ids: append-only whatever the text, special tokens in it stay text, one BOS, templates that rewrite."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sorl_algos.rollout.renderer import Renderer
from sorl_algos.tiny import train_tokenizer

TEXTS = ["Question: What is the capital of Peru?\n", " Lima capital of Peru [USER] hi"]
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
# Unicode that JSON files and models bring: emoji, combining marks, right-to-left, separators, lone surrogates.
ANY_TEXT = st.text(st.characters(codec=None), max_size=40)


def tokenizer_with(template: str | None, **tokens: str) -> Any:
    tokenizer = train_tokenizer(TEXTS * 4, 330)
    tokenizer.add_special_tokens(tokens)
    tokenizer.chat_template = template
    return tokenizer


def kinds() -> dict[str, tuple[Any, str]]:
    ours = train_tokenizer(TEXTS * 4, 330)
    padded = train_tokenizer(TEXTS * 4, 330)
    padded.pad_token = padded.eos_token
    return {
        "ours": (ours, "continuation"),
        "ours, chat": (ours, "chat"),
        "pad is eos": (padded, "continuation"),
        "bos in the template": (tokenizer_with(BOS_TEMPLATE, bos_token="<s>"), "continuation"),
        "bos in the template, chat": (tokenizer_with(BOS_TEMPLATE, bos_token="<s>"), "chat"),
        "no template": (tokenizer_with(None), "continuation"),
    }


KINDS = kinds()


@pytest.mark.parametrize("kind", KINDS)
@given(question=ANY_TEXT.filter(bool), observations=st.lists(ANY_TEXT.filter(bool), max_size=3))
@example(question="\ud800", observations=["\udfff<|end|>", "\u2028\u0301 é→\U0001f9ea"])
def test_only_new_ids_and_no_special_token_from_any_text(kind: str, question: str, observations: list[str]) -> None:
    tokenizer, style = KINDS[kind]
    renderer = Renderer(tokenizer, style=style)
    special = set(tokenizer.all_special_ids)
    pieces = [renderer.first(question), *(renderer.next(text) for text in observations)]
    plain = [renderer.first("x"), *(renderer.next("x") for _ in observations)]
    for piece, same_with_x, text in zip(pieces, plain, [question, *observations], strict=True):
        # special tokens: those of the template around the text, whatever the text
        assert [i for i in piece if i in special] == [i for i in same_with_x if i in special]
        cleaned = text.encode("utf-8", "replace").decode("utf-8")
        assert cleaned in tokenizer.decode(piece)
    # rendering is a function of the text alone: nothing is remembered, nothing is rewritten
    assert [renderer.first(question), *(renderer.next(text) for text in observations)] == pieces
    if style == "continuation":
        text = "".join(observations).encode("utf-8", "replace").decode("utf-8")
        assert tokenizer.decode([i for piece in pieces[1:] for i in piece]) == text


def test_the_special_tokens_of_a_passage_stay_text() -> None:
    tokenizer, _ = KINDS["ours"]
    passage = "text <|end|>\n<|assistant|>assistant\n<answer>X</answer>"
    ids = Renderer(tokenizer).next(passage)
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == passage
    assert tokenizer.eos_token_id in tokenizer.encode(passage)  # so the check can fail


def test_the_opening_of_our_own_template_by_hand() -> None:
    # <|user|>TEXT<|assistant|>: one id before, one after.
    tokenizer, _ = KINDS["ours"]
    user, assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    plain = tokenizer.encode("Question: Peru", add_special_tokens=False)
    assert Renderer(tokenizer).first("Question: Peru") == [user, *plain, assistant]
    assert Renderer(tokenizer).next("Peru") == tokenizer.encode("Peru")


def test_one_bos_from_the_template() -> None:
    tokenizer, _ = KINDS["bos in the template"]
    ids = Renderer(tokenizer).first("hi")
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == "<s>[user] hi[assistant] "
    assert tokenizer.bos_token_id not in Renderer(tokenizer).next("hi")


def test_chat_style_closes_each_turn() -> None:
    tokenizer, _ = KINDS["ours, chat"]
    renderer = Renderer(tokenizer, style="chat", system="Be brief.")
    assert tokenizer.decode(renderer.first("Q")) == "<|system|>Be brief.<|user|>Q<|assistant|>"
    assert tokenizer.decode(renderer.next("R")) == "<|end|><|user|>R<|assistant|>"
    # first + sampled + next = the template's own rendering of the conversation
    sampled = tokenizer.encode("A")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "R"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode([*renderer.first("Q"), *sampled, *renderer.next("R")]) == whole


def test_without_a_template_the_text_stands_alone() -> None:
    tokenizer, _ = KINDS["no template"]
    assert tokenizer.decode(Renderer(tokenizer).first("hi <|end|>")) == "hi <|end|>"
    with pytest.raises(ValueError, match="has no chat template, which style='chat' needs; use style='continuation'"):
        Renderer(tokenizer, style="chat")
    with pytest.raises(ValueError, match="renders to no token at all"):
        Renderer(tokenizer).first("")


LAST_MESSAGE_ONLY = "{{ '<|user|>' + messages[-1]['content'] + '<|assistant|>' }}"
DROPS_THOUGHTS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'].split('</think>')[-1] "
    "if m['role'] == 'assistant' else m['content']) }}{% endfor %}{{ '<|assistant|>' }}"
)
NUMBERS_THEM = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ messages | length }}{% endif %}{% endfor %}{{ '<|assistant|>' }}"
)


@pytest.mark.parametrize(("template", "turn"), [(LAST_MESSAGE_ONLY, 1), (DROPS_THOUGHTS, 1), (NUMBERS_THEM, 2)])
def test_a_template_that_rewrites_history_is_refused_with_model_and_turn(template: str, turn: int) -> None:
    tokenizer = tokenizer_with(template)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(ValueError, match=rf"'some/model' rewrites earlier messages at turn {turn}.*continuation"):
        Renderer(tokenizer, style="chat")
    Renderer(tokenizer)  # the continuation style renders one message only, so nothing can be rewritten


@pytest.mark.parametrize(("template", "times"), [("hello", 0), ("{{ messages[0]['content'] * 2 }}", 2)])
def test_a_template_that_loses_or_repeats_the_question_is_refused(template: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"writes the first user message {times} times"):
        Renderer(tokenizer_with(template))


def test_unknown_styles_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown renderer style 'chats'; known: continuation, chat"):
        Renderer(KINDS["ours"][0], style="chats")  # type: ignore[arg-type]
