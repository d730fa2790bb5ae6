"""A small Qwen2-architecture model and its byte-level BPE tokenizer, made from scratch in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer: each tag is one token, each digit is one token, decoding gives the text back.

    The special tokens open and close chat messages; spelt out in a passage they stay plain characters
    (`rollout.renderer`). Tags are ordinary added tokens: the environment keeps passages from holding any.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [PAD, END, USER, ASSISTANT]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_language_model(
    vocab_size: int,
    *,
    hidden_size: int = 192,
    layers: int = 4,
    heads: int = 6,
    intermediate_size: int = 512,
    seed: int = 0,
    pad_id: int = 0,
    end_id: int = 1,
) -> Any:
    """A randomly initialised Qwen2ForCausalLM with tied embeddings."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        eos_token_id=end_id,
        bos_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    torch.random.set_rng_state(state)
    model.generation_config.pad_token_id = pad_id
    model.generation_config.eos_token_id = end_id
    return model
