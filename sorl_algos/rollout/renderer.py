"""Text of the environment becomes token ids, append-only. The only user of a chat template.

Nothing the policy sampled is ever encoded here, and nothing already in the prompt is encoded again: `first` and
`next` return only new ids. Untrusted text (questions, passages) is encoded as plain characters, so that a special
token spelt out in a passage stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import jinja2

# Letters only: no template escapes, trims or splits them.
_SLOTS = ("SORLSLOTA", "SORLSLOTB", "SORLSLOTC", "SORLSLOTD")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"\s*<tool_response>\n?(?P<inside>.*)\n?</tool_response>\s*(?P<after>.*?)\s*", re.DOTALL)


class Renderer:
    """Prompts for one tokenizer.

    Args:
        tokenizer: with or without a chat template. Without one the first text stands alone, behind the tokens that
            the tokenizer itself puts before a text (BOS, where it wants one); with one the template writes them.
        style: ``"continuation"``: one user message, then one growing assistant text with the observations put in
            between (Search-R1's form). ``"chat"``: each turn closes, and each observation is a message of its own:
            a user message, or a tool message where there are tools.
        system: an optional system message.
        tools: JSON schemas that the template has to show the model (``env.tools``); it must write calls as JSON in
            ``<tool_call>`` (the Qwen and Hermes families do), for that is what the environment reads.

    Raises:
        ValueError: a chat template that drops, repeats or rewrites messages, that shows no tools where there are
            some, or that writes calls in another form.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        style: Literal["continuation", "chat"] = "continuation",
        system: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        if style not in ("continuation", "chat"):
            raise ValueError(f"unknown renderer style {style!r}; known: continuation, chat")
        self.tokenizer = tokenizer
        self.style = style
        self.tools = list(tools)
        self._system = [{"role": "system", "content": system}] if system else []
        self._wraps_responses = False
        before = after = between = opening = ""
        if tokenizer.chat_template:
            if tools:
                self._check_tools()
            before, after = self._split_first()
            if style == "chat":
                between, opening = self._split_next("tool" if tools else "user")
                self._wraps_responses = "<tool_response>" in between and "</tool_response>" in opening
        elif style == "chat" or tools or system:
            wanted = "style='chat'" if style == "chat" else "tools" if tools else "a system message"
            remedy = "style='continuation'" if style == "chat" else "a model with one, or leave them out"
            raise ValueError(f"{self._name} has no chat template, which {wanted} needs; use {remedy}")
        self._before = self._template_ids(before) if tokenizer.chat_template else self._leading_ids()
        self._after = self._template_ids(after)
        self._between, self._opening = self._template_ids(between), self._template_ids(opening)
        self._closing = frozenset(tokenizer.get_added_vocab().values()).intersection(self._between[:1])

    def first(self, text: str) -> list[int]:
        """Ids of the prompt that opens an episode."""
        ids = self._before + self._plain_ids(text) + self._after
        if not ids:
            raise ValueError("the first observation renders to no token at all; is the prompt text empty?")
        return ids

    def next(self, observation: str, sampled: Sequence[int] = ()) -> list[int]:
        """Ids that an observation appends after the policy's last token.

        sampled: the policy's turn before it. Where the policy itself ended that turn with the token that closes a
        message, the message is not closed once more.
        """
        between = self._between
        if sampled and sampled[-1] in self._closing:
            between = between[1:]
        if self._wraps_responses:
            observation = tool_content(observation)
        return between + self._plain_ids(observation) + self._opening

    @property
    def _name(self) -> str:
        return f"tokenizer {self.tokenizer.name_or_path!r}"

    def _plain_ids(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")  # tokenizers refuse lone surrogates
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []

    def _template_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def _leading_ids(self) -> list[int]:
        """What the tokenizer puts before any text: BOS, where it wants one. What it puts behind is left out."""
        bare = self.tokenizer.encode(_SLOTS[0], add_special_tokens=False)
        whole = self.tokenizer.encode(_SLOTS[0], add_special_tokens=True)
        starts = [at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare]
        return whole[: starts[0]] if starts else []

    def _render(self, messages: list[dict[str, Any]], *, tools: bool = True) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                self._system + messages,
                tools=self.tools or None if tools else None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in self._system + messages)
            raise ValueError(f"the chat template of {self._name} refuses the messages ({roles}): {error}") from None

    def _split_first(self) -> tuple[str, str]:
        text = self._render([{"role": "user", "content": _SLOTS[0]}])
        if text.count(_SLOTS[0]) != 1:
            raise ValueError(
                f"the chat template of {self._name} writes the first user message "
                f"{text.count(_SLOTS[0])} times; it must appear once"
            )
        before, after = text.split(_SLOTS[0])
        return before, after

    def _split_next(self, role: str) -> tuple[str, str]:
        """What stands between an assistant's text and the next observation, and after that one.

        The assistant's text is tried with a thought in it too: some templates drop the thoughts of earlier turns.
        """
        messages = [
            {"role": speaker, "content": slot}
            for speaker, slot in zip(("user", "assistant", role, "assistant"), _SLOTS, strict=True)
        ]
        one, two = self._render(messages[:1]), self._render(messages[:3])
        thought = "<think>\nSORLSLOTE\n</think>\n\n" + _SLOTS[1]
        with_thought = self._render([messages[0], {"role": "assistant", "content": thought}, messages[2]])
        three = self._render([*messages, {"role": role, "content": "SORLSLOTE"}])
        stem = one + _SLOTS[1]
        between = two[len(stem) :].split(_SLOTS[2])
        kept = two.startswith(stem) and with_thought == two.replace(_SLOTS[1], thought)
        if not kept or len(between) != 2 or not three.startswith(two + _SLOTS[3]):
            turn = 2 if kept else 1
            raise ValueError(
                f"the chat template of {self._name} rewrites earlier messages at turn {turn}, "
                "so prompts would not be append-only; use style='continuation' or another template"
            )
        return between[0], between[1]

    def _check_tools(self) -> None:
        """That the template shows the tools, and that a model of it calls them as JSON in ``<tool_call>``."""
        asked = {"role": "user", "content": _SLOTS[0]}
        remedy = "use a model of the Qwen or Hermes family, or another dialect than 'tool_call'"
        if self._render([asked]) == self._render([asked], tools=False):
            raise ValueError(f"the chat template of {self._name} does not show tools to the model; {remedy}")
        call = {"name": self.tools[0]["function"]["name"], "arguments": {"query_list": [_SLOTS[1]]}}
        said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        if not any(_json_of(content) == call for content in _CALL.findall(self._render([asked, said]))):
            raise ValueError(
                f"the chat template of {self._name} does not write tool calls as JSON between <tool_call> and "
                f"</tool_call>, which is what the environment reads; {remedy}"
            )


def tool_content(observation: str) -> str:
    """An observation without ``<tool_response>`` around its passages, for templates that put it there themselves.

    >>> tool_content("\\n<tool_response>\\nDoc 1 Lima\\n</tool_response>\\nSearches left: 1.\\n\\n")
    'Doc 1 Lima\\nSearches left: 1.'
    >>> tool_content("\\n\\nNot a valid action.\\n\\n")
    'Not a valid action.'
    """
    found = _RESPONSE.fullmatch(observation)
    return "\n".join(filter(None, (found["inside"].strip(), found["after"]))) if found else observation.strip()


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
