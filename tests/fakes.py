"""Fakes that implement the seams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from retrieval_index.types import Hit, Passage, RetrievalError
from sorl_algos.rollout.engine import Completion, Sampling


class FakeRetriever:
    """A Retriever that knows its answers: ``table[query]``, or else passages sharing a word with the query.

    ``calls`` records ``(queries, top_k)`` of every search; with ``fails`` every search raises RetrievalError.
    """

    def __init__(
        self,
        table: Mapping[str, Sequence[Passage]] | None = None,
        passages: Sequence[Passage] = (),
        fails: bool = False,
    ) -> None:
        self.table = dict(table or {})
        self.passages = tuple(passages)
        self.fails = fails
        self.calls: list[tuple[list[str], int]] = []

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.calls.append((list(queries), top_k))
        if self.fails:
            raise RetrievalError("http://secret-host:8000 refused the connection")
        return [self._one(query)[:top_k] for query in queries]

    def _one(self, query: str) -> list[Hit]:
        if query in self.table:
            return [Hit(passage, 1.0 / rank) for rank, passage in enumerate(self.table[query], start=1)]
        words = set(query.lower().split())
        scored = [Hit(p, float(len(words & set(f"{p.title} {p.text}".lower().split())))) for p in self.passages]
        return sorted((hit for hit in scored if hit.score > 0), key=lambda hit: -hit.score)


class ScriptedEngine:
    """A RolloutEngine that says what it was told to.

    Args:
        tokenizer: encodes the scripted texts.
        script: the completions in the order in which they are asked for, or a function of the prompt's text. A
            completion is a text, or token ids where the tokenisation matters. One that is longer than its budget
            is cut ("length"); one that holds a stop string ends there ("stop"); any other gets the end token.

    ``calls`` records the prompts and the sampling of every call, ``versions`` every published version. The
    log-probability of the n-th token of a completion is -0.25 (n + 1).
    """

    def __init__(self, tokenizer: Any, script: Sequence[str | tuple[int, ...]] | Callable[[str], Any]) -> None:
        self.tokenizer = tokenizer
        self.script = script if callable(script) else iter(script)
        self.calls: list[tuple[list[list[int]], Sampling]] = []
        self.versions: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        self.calls.append(([list(prompt) for prompt in prompts], sampling))
        budgets = sampling.budgets or (sampling.max_tokens,) * len(prompts)
        return [self._one(prompt, budget, sampling) for prompt, budget in zip(prompts, budgets, strict=True)]

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.versions.append(version)

    def _one(self, prompt: Sequence[int], budget: int, sampling: Sampling) -> Completion:
        said = self.script(self.tokenizer.decode(list(prompt))) if callable(self.script) else next(self.script)
        ids = list(said) if isinstance(said, tuple) else self.tokenizer.encode(said, add_special_tokens=False)
        text = self.tokenizer.decode(ids)
        stop: Any = "stop" if any(string in text for string in sampling.stop) else "eos"
        if stop == "eos":
            ids.append(self.tokenizer.eos_token_id)
        if len(ids) > min(budget, sampling.max_tokens):
            ids, stop = ids[: min(budget, sampling.max_tokens)], "length"
        logprobs = tuple(-0.25 * (place + 1) for place in range(len(ids)))
        return Completion(tuple(ids), logprobs, stop, self.versions[-1] if self.versions else 0)
