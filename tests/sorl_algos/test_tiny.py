"""The small tokenizer and model: lossless text, one token a tag, special tokens, equal seeds."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_algos.tiny import TAGS, tiny_language_model, train_tokenizer

TOKENIZER = train_tokenizer(["The capital of Peru is Lima, 1535."] * 3, 340)


@given(st.text(max_size=60))
def test_decoding_gives_the_text_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, split_special_tokens=True)) == text


def test_each_tag_and_each_digit_is_one_token() -> None:
    for tag in TAGS:
        assert len(TOKENIZER.encode(tag)) == 1 and len(TOKENIZER.encode(f"x{tag}y")) == 3
        assert TOKENIZER.encode(tag)[0] not in TOKENIZER.all_special_ids
        assert TOKENIZER.decode(TOKENIZER.encode(f" a {tag} b "), skip_special_tokens=True) == f" a {tag} b "
    assert len(TOKENIZER.encode("1535")) == 4


def test_special_tokens_and_sizes() -> None:
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id
    assert TOKENIZER.encode("<|end|>") == [TOKENIZER.eos_token_id]
    assert len(train_tokenizer(["The capital of Peru is Lima."] * 3, 320)) <= 320
    assert max(TOKENIZER.encode(" The capital of Peru" + "".join(TAGS))) < len(TOKENIZER)


def test_the_template_by_hand() -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == "<|user|>Q<|assistant|>A<|end|>"
    opened = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "<|user|>Q<|assistant|>"


def test_equal_seeds_give_equal_models_and_leave_the_generator_alone(make_model: Any) -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = tiny_language_model(300, hidden_size=16, layers=1, heads=2, intermediate_size=16, seed=1, end_id=3)
    assert torch.equal(torch.rand(2), expected)
    again = tiny_language_model(300, hidden_size=16, layers=1, heads=2, intermediate_size=16, seed=1, end_id=3)
    other = tiny_language_model(300, hidden_size=16, layers=1, heads=2, intermediate_size=16, seed=2, end_id=3)
    weight = first.model.embed_tokens.weight
    assert torch.equal(again.model.embed_tokens.weight, weight)
    assert not torch.equal(other.model.embed_tokens.weight, weight)
    assert first.lm_head.weight.data_ptr() == weight.data_ptr()
    assert first.generation_config.eos_token_id == 3


def test_the_default_size() -> None:
    # Small enough to bundle: 2 to 5 M parameters at 4,096 tokens, the embeddings counted once.
    model = tiny_language_model(4096)
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 5e6
