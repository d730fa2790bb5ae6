"""Stand-ins that implement the seams: tokenizers with a given vocabulary, an engine's model that says what it
was told to, a vector environment that answers in a fixed way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sorl_algos.rollout.engine import Completion, Sampling

PRINTABLE = [chr(code) for code in range(0x20, 0x7F)] + ["\n"]


def vocabulary_tokenizer(
    pieces: Mapping[int, str],
    *,
    specials: Mapping[int, str] | None = None,
    bos: str | None = None,
    chat_template: str | None = None,
) -> Any:
    """A tokenizer with these pieces under these ids (the fewest pieces win), and every printable character.

    With ``bos`` its encoder puts that token in front unless told not to add special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    specials = dict(specials or {})
    given = {**pieces, **specials}
    texts = {index: given.get(index, f"\ue000{index}\ue001") for index in range(max(given, default=0) + 1)}
    others = [char for char in PRINTABLE if char not in given.values()]
    ordered = [texts[index] for index in range(len(texts))] + others + ["\ufffd"]
    # no text leads to a special token but the token itself: to spell it out is always likelier
    model = models.Unigram(
        [(piece, -1e3 if piece in specials.values() else -1.0) for piece in ordered], unk_id=len(ordered) - 1
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    marked = [*specials.values(), *([bos] if bos else [])]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in marked])
    if bos:
        place = ordered.index(bos)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, place)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    wrapped.chat_template = chat_template
    return wrapped


def byte_tokenizer(bytes_of: Mapping[int, bytes]) -> Any:
    """A byte-level BPE in which these ids stand for these single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = _byte_characters()
    wanted = {index: characters[value[0]] for index, value in bytes_of.items()}
    rest = iter(sorted(set(characters.values()) - set(wanted.values())))
    order = {index: wanted.get(index) or next(rest) for index in range(max(wanted) + 1)}
    vocabulary = {char: index for index, char in order.items()}
    vocabulary |= {char: index for index, char in enumerate(rest, start=len(order))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _byte_characters() -> dict[int, str]:
    """The printable stand-in of every byte in byte-level BPE (GPT-2's table)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + place) for place, byte in enumerate(moved)}


class FixedEnv:
    """A vector environment of one slot: a first observation, then the given ones, then it is over."""

    num_envs = 1
    stop_strings = ("</search>", "</answer>")

    def __init__(self, first: str, observations: Sequence[str] = ()) -> None:
        self.first, self.observations = first, list(observations)
        self.actions: list[str] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[tuple[str], dict[str, Any]]:
        return (self.first,), {}

    def step(self, actions: Sequence[str]) -> tuple[Any, ...]:
        over = len(self.actions) >= len(self.observations)
        observation = "" if over else self.observations[len(self.actions)]
        self.actions.append(actions[0])
        infos = {
            "stop": ["answered" if over else None],
            "action_kind": ["answer" if over else "search"],
            "retrieved_ids": [()],
            "retrieved_titles": [()],
            "searches": [len(self.actions)],
            "scores": [None],
        }
        return (observation,), np.zeros(1), np.array([over]), np.array([False]), infos


class ExactEngine:
    """An engine that gives these token ids, one completion a call, and adds nothing to them."""

    def __init__(self, script: Iterable[Sequence[int]]) -> None:
        self._script = iter(script)
        self.prompts: list[list[int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        [prompt] = prompts
        self.prompts.append(list(prompt))
        ids = tuple(next(self._script))[: sampling.max_tokens]
        return [Completion(ids, (-0.5,) * len(ids), "length" if len(ids) == sampling.max_tokens else "stop", 0)]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        return None


class ScriptedModel:
    """A causal language model for `HFEngine` that all but certainly says the given tokens, one a step."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        from transformers import Qwen2Config

        self.config = Qwen2Config(vocab_size=vocabulary, num_hidden_layers=1)
        self.generation_config = SimpleNamespace(eos_token_id=None)
        self.device = torch.device("cpu")
        self.tokens = list(tokens)
        self.calls: list[dict[str, Tensor]] = []

    def eval(self) -> ScriptedModel:
        return self

    def __call__(self, **inputs: Any) -> Any:
        self.calls.append({name: value for name, value in inputs.items() if isinstance(value, Tensor)})
        rows = inputs["input_ids"].shape[0]
        logits = torch.zeros(rows, 1, self.config.vocab_size)
        logits[:, :, self.tokens[min(len(self.calls), len(self.tokens)) - 1]] = 50.0
        return SimpleNamespace(logits=logits)


class GivenLogits(torch.nn.Module):
    """A language model whose next-token logits are fixed rows, whatever it reads."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.config = SimpleNamespace(name_or_path="given", hidden_size=rows.shape[-1])
        self.head = torch.nn.Linear(rows.shape[-1], rows.shape[-1], bias=False)
        torch.nn.init.eye_(self.head.weight)
        self.rows = rows

    def base_model(self, *, input_ids: Tensor, **unused: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.rows.expand(len(input_ids), -1, -1))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head
