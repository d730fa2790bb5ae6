"""The seam between training and sampling: token ids in, sampled ids and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

StopReason = Literal["stop", "eos", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one batch of completions.

    Attributes:
        max_tokens: most tokens of one completion.
        temperature: 0 is greedy; the reported log-probabilities are those of ``softmax(logits / temperature)``
            (of ``softmax(logits)`` when greedy), over the whole vocabulary.
        top_p, top_k: filters for evaluation; 1.0 and 0 switch them off. The reported log-probabilities ignore
            them, so they are not those of the distribution sampled from: no training samples with them. An engine
            that cannot report log-probabilities in this sense refuses them.
        stop: strings that end a completion; the closing string stays in it.
        seeds: one seed a prompt. A prompt's completion depends on its seed alone, never on its neighbours.
        budgets: optional cap on the tokens of each prompt's completion, below ``max_tokens``.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    budgets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; a completion needs at least one token")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; use 0 for greedy or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; use 0 to switch it off or a positive count")


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled for one prompt. ``stop``: a stop string, the end token, or the length limit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: StopReason
    policy_version: int

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"completion has {len(self.token_ids)} tokens but {len(self.logprobs)} log-probabilities"
            )


class EngineError(RuntimeError):
    """The engine failed. Never an empty completion: a policy would learn from it."""


class RolloutEngine(Protocol):
    """Samples completions and takes new weights after each policy update."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]: ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...


class AsyncRolloutEngine(RolloutEngine, Protocol):
    """An engine that also samples one prompt at a time, many at once, each finishing when it is done."""

    async def agenerate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The completion of one prompt; ``sampling.seeds`` and ``sampling.budgets`` hold one entry, or are None.

        A cancelled caller's request leaves the engine.
        """
        ...
