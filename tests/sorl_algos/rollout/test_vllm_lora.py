"""VLLMEngine with LoRA adapters in place of whole weights: what it samples from is base + B A scaled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sorl_algos.models import full_weights, load_language_model, make_policy_and_critic, resolve_model
from sorl_algos.rollout.engine import EngineError, Sampling
from sorl_algos.rollout.source import AdapterHandOver, hand_over_weights
from sorl_algos.rollout.vllm import VLLMEngine
from tests.sorl_algos.rollout.vllm_checks import logprob_errors, needs_vllm, same_up_to_ties

pytestmark = needs_vllm
RANK, ALPHA = 4, 16
TARGETS = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    engine = VLLMEngine(resolve_model("base"), max_model_tokens=128, max_batch=16, kv_cache_gib=0.1, lora_rank=RANK)
    yield engine
    engine.close()


def write_adapter(directory: Path, model: Any, seed: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    """A random adapter in PEFT's format; returns what it adds to each weight, (alpha / rank) B A."""
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            down = 0.2 * torch.randn(rank, module.in_features, generator=generator)
            up = 0.2 * torch.randn(module.out_features, rank, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            added[f"{name}.weight"] = ALPHA / rank * up @ down
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return added


def test_adapters_take_the_place_of_one_another_and_whole_weights_end_them(engine: VLLMEngine, tmp_path: Path) -> None:
    base, tokenizer = load_language_model("base")
    text = "Question: What is the capital of the country in which the river ends?\n"
    prompts = [tokenizer.encode(text * (1 + row % 3)) for row in range(6)]
    sampling = Sampling(max_tokens=8, temperature=1.0)
    for version in (1, 2):
        added = write_adapter(tmp_path / f"adapter-{version}", base, seed=version)
        engine.update_adapter(tmp_path / f"adapter-{version}", version)
        completions = engine.generate(prompts, sampling)
        merged, _ = load_language_model("base")
        with torch.no_grad():
            for name, value in merged.named_parameters():
                value.add_(added.get(name, torch.zeros(())))
        assert logprob_errors(merged, prompts, completions, 1.0).max() < 1e-3
        # the same tokens under the base alone are another matter, so the adapter was in use
        assert logprob_errors(base, prompts, completions, 1.0).max() > 0.1
        assert {c.policy_version for c in completions} == {version}
    engine.update_weights(base.named_parameters(), 3)
    completions = engine.generate(prompts, sampling)
    assert logprob_errors(base, prompts, completions, 1.0).max() < 1e-3
    assert {c.policy_version for c in completions} == {3}


def test_a_policys_adapter_alone_samples_as_its_merged_weights_do(engine: VLLMEngine, tmp_path: Path) -> None:
    """Both ways of publishing give the tokens and log-probabilities of the policy."""
    model, tokenizer = load_language_model("base")
    policy, _ = make_policy_and_critic(model, critic="own", lora_rank=RANK, lora_alpha=ALPHA)
    torch.manual_seed(0)
    for name, parameter in policy.lm.named_parameters():
        if ".lora_B." in name:  # which starts at zero
            torch.nn.init.normal_(parameter, std=0.05)
    text = "Question: What is the capital of the country in which the river ends?\n"
    prompts = [tokenizer.encode(text * (1 + row % 3)) for row in range(6)]
    greedy = Sampling(max_tokens=8, temperature=0.0)
    base, _ = load_language_model("base")
    engine.update_weights(base.named_parameters(), 1)
    bare = engine.generate(prompts, greedy)
    AdapterHandOver(tmp_path / "adapter")(engine, policy, 2)
    with_adapter = engine.generate(prompts, greedy)
    hand_over_weights(engine, policy, 3)
    merged = engine.generate(prompts, greedy)
    assert [{c.policy_version for c in found} for found in (with_adapter, merged)] == [{2}, {3}]
    plain, _ = load_language_model("base")
    plain.load_state_dict(dict(full_weights(policy)), strict=False)
    plain.tie_weights()
    for completions in (with_adapter, merged):
        assert logprob_errors(plain, prompts, completions, 1.0).max() < 1e-3
        assert logprob_errors(base, prompts, completions, 1.0).max() > 0.1  # so it was in use
    assert same_up_to_ties(plain, prompts, with_adapter, merged) == len(prompts)
    for one, other in zip(with_adapter, merged, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert [c.token_ids for c in bare] != [c.token_ids for c in merged]
    engine.update_weights(base.named_parameters(), 4)


def test_an_adapter_that_cannot_be_taken_is_an_error(engine: VLLMEngine, tmp_path: Path) -> None:
    base, _ = load_language_model("base")
    with pytest.raises(ValueError, match="holds no adapter"):
        engine.update_adapter(tmp_path, 1)
    write_adapter(tmp_path / "wide", base, seed=1, rank=4 * RANK)
    with pytest.raises(EngineError, match="wide"):
        engine.update_adapter(tmp_path / "wide", 1)
    assert len(engine.generate([[5, 6]], Sampling(max_tokens=2))) == 1
