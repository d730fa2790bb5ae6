"""The memory that is reckoned from settings is what modules, optimisers and graphs take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_algos.architectures import find_architecture, read_architecture
from sorl_algos.batch import collate
from sorl_algos.budget import GB, Budget, Hardware, estimate, kept_bytes, ranks_of
from sorl_algos.config import TrainConfig
from sorl_algos.learner import make_learner
from sorl_algos.models import Policy, make_policy_and_critic, score
from sorl_algos.tiny import tiny_language_model
from sorl_algos.trainer import estimate_advantages, optimiser_step
from tests.sorl_algos.small_game import made_up, small_config

BIG = Hardware(1, 1000 * GB)
SEVEN = find_architecture("Qwen/Qwen2.5-7B")


def tensor_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def item(budget: Budget, name: str) -> float:
    [found] = [entry.bytes for entry in budget.items if entry.name == name]
    return found


@pytest.mark.parametrize("critic", ["shared", "own"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_gradients_and_moments_are_those_of_a_learner(
    critic: Any, lora_rank: int, make_model: Any, tmp_path: Path
) -> None:
    config = small_config(tmp_path, critic=critic, lora_rank=lora_rank, critic_warmup_updates=0)
    model = make_model()
    shape = read_architecture(model.config.to_dict())
    policy, own = make_policy_and_critic(model, critic=critic, lora_rank=lora_rank)
    learner = make_learner(config, policy, critic=own)
    batch, _ = score(collate(made_up(4), 0), learner.policy, critic=own, microbatch_sequences=4)
    optimiser_step(learner, estimate_advantages(batch, learner.algorithm, config), update=0)
    values = {id(parameter) for parameter in learner.value_parameters}
    weights, moments = {True: 0, False: 0}, {True: 0, False: 0}
    for module in (policy, own):
        for parameter in module.parameters() if module is not None else ():
            weights[id(parameter) in values] += tensor_bytes([parameter])
    for optimizer in learner.optimizers().values():
        for parameter, state in optimizer.state.items():
            moments[id(parameter) in values] += tensor_bytes([state["exp_avg"], state["exp_avg_sq"]])
    budget = estimate(config, shape, BIG)
    assert (item(budget, "policy: weights"), item(budget, "critic: weights")) == (weights[False], weights[True])
    assert (item(budget, "policy: optimiser"), item(budget, "critic: optimiser")) == (moments[False], moments[True])
    assert item(budget, "policy: gradients") == moments[False] / 2


class Saved:
    """Bytes of what autograd keeps, each storage once, weights left out."""

    def __init__(self, weights: Any) -> None:
        self.bytes: dict[int, int] = {}
        self.kept: list[Tensor] = []  # or a storage freed on the way would lend its address to another
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self.bytes[storage.data_ptr()] = storage.nbytes()
            self.kept.append(tensor)
        return tensor


# Measured against reckoned on a model of 6 layers: the fp32, autocast and all-bf16 forms, with and without layers that
# are run again. The reckoning leaves out masks and rotary angles, and counts the last norm roughly.
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("dtype", "lora_rank"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 8)], ids=["fp32", "autocast", "bf16"]
)
def test_activations_are_what_autograd_keeps_within_a_seventh(
    dtype: Any, lora_rank: int, checkpointing: bool, tmp_path: Path
) -> None:
    model = tiny_language_model(50, hidden_size=64, layers=6, heads=4, intermediate_size=160)
    if lora_rank:
        model = model.to(torch.bfloat16)  # as a base is that stays frozen, or layers that FSDP gathers
    config = small_config(
        tmp_path, dtype=dtype, gradient_checkpointing=checkpointing, lora_rank=lora_rank, max_total_tokens=512
    )
    compute = None if dtype == "float32" else torch.bfloat16
    policy = Policy(model, compute_dtype=compute, checkpointing=checkpointing)
    ids = torch.randint(2, 50, (4, 96), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids, dtype=torch.bool)
    real[0, 90:] = False  # ragged, as batches are: keys and values are then spread over all heads
    chosen = real.clone()
    chosen[:, 0] = False
    saved = Saved(model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
        policy.trunk.action_hidden(model.base_model, ids, real, chosen)
    shape = read_architecture(model.config.to_dict())
    reckoned = kept_bytes(shape, config, ids.numel(), sharded=False, checkpointing=checkpointing)
    assert sum(saved.bytes.values()) / reckoned == pytest.approx(1, abs=1 / 7)


def config_of(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": "Qwen/Qwen2.5-7B", "dtype": "bfloat16", "gradient_checkpointing": True, "engine": "vllm",
        "critic": "own", "max_turn_tokens": 500, "max_total_tokens": 4596, "microbatch_tokens": 4596,
        "kl_reward_coef": 0.001,
    }  # fmt: skip
    return TrainConfig(**(settings | changes))


def test_16_bytes_a_parameter_are_split_over_the_ranks() -> None:
    # weights, gradients and two moments of 4 bytes each: 121.8 GB for 7.6 G parameters, a quarter of it on each rank
    budget = estimate(config_of(sharding="fsdp2"), SEVEN, Hardware(4, 80 * GB))
    parts = [item(budget, f"policy: {name}") for name in ("weights", "gradients", "optimiser")]
    assert sum(parts) == 16 * 7_615_616_512 / 4
    assert item(budget, "reference") == 4 * 7_615_616_512 / 4
    # data parallelism splits nothing and keeps its buckets beside the gradients: 20 bytes
    whole = estimate(config_of(sharding="ddp"), SEVEN, Hardware(4, 80 * GB))
    assert sum(item(whole, f"policy: {name}") for name in ("weights", "gradients", "optimiser")) == 20 * 7_615_616_512


def test_what_cannot_fit_is_refused_with_the_largest_item_and_its_remedy() -> None:
    budget = estimate(config_of(), SEVEN, Hardware(1, 80 * GB))
    assert not budget.fits
    text = budget.refusal()
    # 8 bytes x 7.6 G of Adam are the largest
    assert "80.0 GB; the largest item is policy: optimiser with 60.9 GB" in text and "--lora-rank" in text
    assert estimate(config_of(lora_rank=64), SEVEN, Hardware(1, 80 * GB)).fits


@pytest.mark.parametrize(
    ("changes", "gpu", "item_name", "remedy"),
    [
        ({"gradient_checkpointing": False, "lora_rank": 8, "microbatch_tokens": 2 * 4596}, 80, "activations: policy",
         "--gradient-checkpointing"),
        ({"lora_rank": 8, "microbatch_tokens": 16 * 4596}, 80, "activations: policy", "--microbatch-tokens"),
        ({"lora_rank": 8, "engine_memory_share": 0.9}, 80, "vLLM: KV cache", "--engine-memory-share"),
    ],
)  # fmt: skip
def test_each_kind_of_too_much_has_its_remedy(
    changes: dict[str, Any], gpu: float, item_name: str, remedy: str
) -> None:
    budget = estimate(config_of(**changes), SEVEN, Hardware(1, gpu * GB))
    assert not budget.fits
    assert f"largest item is {item_name} " in budget.refusal() and remedy in budget.refusal()


def test_a_share_of_vllm_without_room_for_one_sequence_is_refused() -> None:
    # 15.2 GB of weights and 2 GB of working memory into 0.2 x 80 GB; with 4,596 tokens of 57,344 bytes 17.5 GB, 0.22
    with pytest.raises(ValueError, match=r"vLLM's share of a GPU \(16.0 GB\) .*raise --engine-memory-share above 0.22"):
        estimate(config_of(engine_memory_share=0.2), SEVEN, Hardware(1, 80 * GB))
    with pytest.raises(ValueError, match="take GPUs with more memory"):
        estimate(config_of(engine_memory_share=0.8), SEVEN, Hardware(1, 16 * GB))


def test_vllm_sleeps_while_the_policy_learns_unless_it_samples_then() -> None:
    def cache(**changes: Any) -> dict[str, bool]:
        budget = estimate(config_of(sharding="fsdp2", **changes), SEVEN, Hardware(8, 80 * GB))
        [found] = [entry for entry in budget.items if entry.name == "vLLM: KV cache"]
        return {phase: phase in found.phases for phase in ("sampling", "backward", "engine")}

    assert cache() == {"sampling": True, "backward": False, "engine": False}
    assert cache(source="async") == {"sampling": True, "backward": True, "engine": False}
    assert cache(source="async", engine_gpus="own") == {"sampling": False, "backward": False, "engine": True}


def test_gpus_that_cannot_be_shared_out_are_refused() -> None:
    assert (ranks_of(config_of(), 8), ranks_of(config_of(engine_gpus="own"), 8)) == (8, 4)
    with pytest.raises(ValueError, match=r"takes every second GPU and needs at least 4 of them, not 2"):
        ranks_of(config_of(engine_gpus="own"), 2)
    with pytest.raises(ValueError, match=r"questions_per_update \(64\) cannot be shared by 3 ranks"):
        ranks_of(config_of(), 3)
    with pytest.raises(ValueError, match="at least one with some memory"):
        Hardware(0, 80 * GB)
    with pytest.raises(ValueError, match="engine_gpus 'own' is for engine 'vllm', not 'hf'"):
        config_of(engine="hf", engine_gpus="own")


def test_gradients_of_the_clipping_bias_take_a_copy() -> None:
    plain = config_of(sharding="fsdp2")
    copy = estimate(replace(plain, normalisation="gradient_norm"), SEVEN, Hardware(8, 80 * GB))
    assert item(copy, "normalisation: gradient of C") == 4 * 7_615_616_512 / 8


def test_on_processors_vllm_takes_its_weights_and_one_gib() -> None:
    shape = find_architecture("base")
    budget = estimate(TrainConfig(engine="vllm"), shape, Hardware(1, 8 * GB, processor=True))
    assert item(budget, "vLLM: weights") == 4 * shape.parameters and item(budget, "vLLM: KV cache") == 2**30
