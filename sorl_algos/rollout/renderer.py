"""Text of the environment becomes token ids, append-only. The only user of a chat template.

Nothing the policy sampled is ever encoded here, and nothing already in the prompt is encoded again: `first` and
`next` return only new ids. Untrusted text (questions, passages) is encoded as plain characters, so that a special
token spelt out in a passage stays text.
"""

from __future__ import annotations

from typing import Any, Literal

# Letters only: no template escapes, trims or splits them.
_SLOTS = ("SORLSLOTA", "SORLSLOTB", "SORLSLOTC", "SORLSLOTD")


class Renderer:
    """Prompts for one tokenizer.

    Args:
        tokenizer: with or without a chat template (without one the first text stands alone).
        style: ``"continuation"``: one user message, then one growing assistant text with the observations put in
            between (Search-R1's form). ``"chat"``: each observation is a user message and each turn closes.
        system: an optional system message.

    Raises:
        ValueError: a chat template that drops, repeats or rewrites messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        style: Literal["continuation", "chat"] = "continuation",
        system: str | None = None,
    ) -> None:
        if style not in ("continuation", "chat"):
            raise ValueError(f"unknown renderer style {style!r}; known: continuation, chat")
        self.tokenizer = tokenizer
        self.style = style
        self._system = [{"role": "system", "content": system}] if system else []
        self._before, self._after = "", ""
        self._next_before, self._next_after = "", ""
        if tokenizer.chat_template:
            self._before, self._after = self._split_first()
            if style == "chat":
                self._next_before, self._next_after = self._split_next()
        elif style == "chat":
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} has no chat template; use style='continuation'"
            )

    def first(self, text: str) -> list[int]:
        """Ids of the prompt that opens an episode."""
        ids = self._template_ids(self._before) + self._plain_ids(text) + self._template_ids(self._after)
        if not ids:
            raise ValueError("the first observation renders to no token at all; is the prompt text empty?")
        return ids

    def next(self, observation: str) -> list[int]:
        """Ids that an observation appends after the policy's last token."""
        return (
            self._template_ids(self._next_before)
            + self._plain_ids(observation)
            + self._template_ids(self._next_after)
        )

    def _plain_ids(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")  # tokenizers refuse lone surrogates
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []

    def _template_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(
            self._system + messages, tokenize=False, add_generation_prompt=True
        )

    def _split_first(self) -> tuple[str, str]:
        text = self._render([{"role": "user", "content": _SLOTS[0]}])
        if text.count(_SLOTS[0]) != 1:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} writes the first user message "
                f"{text.count(_SLOTS[0])} times; it must appear once"
            )
        before, after = text.split(_SLOTS[0])
        return before, after

    def _split_next(self) -> tuple[str, str]:
        """What stands between an assistant's text and the next user text, and after that one.

        The assistant's text is tried with a thought in it too: some templates drop the thoughts of earlier turns.
        """
        messages = [
            {"role": role, "content": slot}
            for role, slot in zip(("user", "assistant", "user", "assistant"), _SLOTS, strict=True)
        ]
        one, two = self._render(messages[:1]), self._render(messages[:3])
        thought = "<think>SORLSLOTE</think>" + _SLOTS[1]
        with_thought = self._render([messages[0], {"role": "assistant", "content": thought}, messages[2]])
        three = self._render([*messages, {"role": "user", "content": "SORLSLOTE"}])
        stem = one + _SLOTS[1]
        between = two[len(stem) :].split(_SLOTS[2])
        kept = two.startswith(stem) and with_thought == two.replace(_SLOTS[1], thought)
        if not kept or len(between) != 2 or not three.startswith(two + _SLOTS[3]):
            turn = 2 if kept else 1
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} rewrites earlier messages at turn {turn}, "
                "so prompts would not be append-only; use style='continuation' or another template"
            )
        return between[0], between[1]
