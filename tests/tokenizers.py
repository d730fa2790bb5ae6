"""Tokenizers of the families in use, made in milliseconds, each with a trap of its kind."""

from __future__ import annotations

from typing import Any

CHAT = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}<|assistant|>"


def byte_level(*, pad_is_end: bool = False, bos: bool = False, template: str | None = CHAT) -> Any:
    """Byte-level BPE (GPT-2, Qwen, Llama 3): a sampled token may be half of a character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["<search>hello</search> hello world <answer>"] * 8, trainer)
    tokenizer.add_tokens([AddedToken("</search>", special=False, normalized=False)])
    if bos:
        place = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", place)])
        template = "<s>" + template if template else None
    pad = "<|end|>" if pad_is_end else "<|pad|>"
    return _wrapped(PreTrainedTokenizerFast, tokenizer, "<|end|>", pad, template)


# The form of Qwen2.5 and Hermes: tools in the system message, calls as JSON, responses in a user message.
TOOLS = (
    "{% if tools %}{{ '<|user|>Tools:' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ '<|user|>\n<tool_response>\n' + m['content'] + '\n</tool_response><|end|>\n' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "{% set f = call['function'] %}{{ '\n<tool_call>\n' }}"
    "{{ {'name': f['name'], 'arguments': f['arguments']} | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def sentence_piece() -> Any:
    """Unigram pieces with a mark for blanks and byte fallback (Llama 2, Mistral): drops a leading blank."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "he", "llo", *"abcdefghijklmnopqrstuvwxyz<>/.?"]
    # control pieces are never made from text, as in SentencePiece itself
    scores = {"<unk>": -1e3, "<s>": -1e3, "</s>": -1e3}
    scored = [(piece, scores.get(piece, -2.0 if len(piece) == 1 else -1.0)) for piece in pieces]
    model = models.Unigram(scored, unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return _wrapped(PreTrainedTokenizerFast, tokenizer, "</s>", "</s>", None)


def _wrapped(kind: Any, tokenizer: Any, end: str, pad: str, template: str | None) -> Any:
    wrapped = kind(tokenizer_object=tokenizer, eos_token=end, pad_token=pad, clean_up_tokenization_spaces=False)
    wrapped.chat_template = template
    return wrapped


FAMILIES = {
    "byte-level BPE": lambda: byte_level(),
    "pad = end": lambda: byte_level(pad_is_end=True),
    "no BOS, no template": lambda: byte_level(template=None),
    "double BOS": lambda: byte_level(bos=True),
    "BOS, no template": lambda: byte_level(bos=True, template=None),
    "SentencePiece": sentence_piece,
}
