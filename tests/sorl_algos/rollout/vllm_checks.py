"""What the tests of VLLMEngine share: when they run, and how two engines are compared."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from sorl_algos.batch import collate
from sorl_algos.models import Policy, token_logprobs
from sorl_algos.rollout.engine import Completion
from sorl_env.trajectory import Trajectory, Turn

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed (bash scripts/install.sh retrieval train dev vllm)"
)
TAGS = ("</search>", "</answer>")


def logprob_errors(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], temperature: float
) -> torch.Tensor:
    """|engine's - trainer's| log-probability of every sampled token, the trainer's from one pass over whole rows."""
    batch = collate(
        [
            Trajectory((Turn(tuple(prompt), c.token_ids, c.logprobs, 0.0, "", ""),), "q", 0, 0, "answered", {})
            for prompt, c in zip(prompts, completions, strict=True)
        ],
        0,
    )
    with torch.no_grad():
        logp = token_logprobs(Policy(model), batch, temperature=temperature or 1.0).logp
    return (batch.rollout_logp - logp).abs()[batch.loss_mask]


def same_up_to_ties(
    model: Any, prompts: Sequence[Sequence[int]], ours: Sequence[Completion], theirs: Sequence[Completion]
) -> int:
    """Asserts that greedy completions are equal, or part ways where the two tokens are as likely (to 1e-3).

    Returns:
        How many are equal to the last token.
    """
    equal = 0
    for prompt, one, other in zip(prompts, ours, theirs, strict=True):
        if one.token_ids == other.token_ids and one.stop == other.stop:
            equal += 1
            continue
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        place = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
        assert place is not None, f"one is the other's beginning: {one} and {other}"
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one.token_ids[:place]]])).logits[0, -1]
        first, second = (logits[token] for token in pairs[place])
        assert abs(float(first - second)) < 1e-3, f"token {place}: {pairs[place]}"
    return equal
