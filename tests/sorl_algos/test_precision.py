"""bf16 products over float32 weights; activations made again in backward; scores without whole logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_algos.batch import collate
from sorl_algos.learner import make_learner
from sorl_algos.models import Critic, Policy, make_policy_and_critic, score, token_logprobs
from sorl_algos.token_scores import token_scores
from sorl_algos.trainer import estimate_advantages, optimiser_step
from tests.sorl_algos.proofs import same
from tests.sorl_algos.small_game import made_up, small_config

BF16 = torch.bfloat16


def test_bf16_leaves_weights_gradients_and_scores_in_float32(make_model: Any) -> None:
    batch, policy = collate(made_up(4), 0), Policy(make_model(), shared_critic=True, compute_dtype=BF16)
    scores = token_logprobs(policy, batch)
    exact = token_logprobs(Policy(make_model()), batch)
    assert scores.values is not None
    assert {scores.logp.dtype, scores.entropy.dtype, scores.values.dtype} == {torch.float32}
    # log 330 = 5.8 rounded to 8 bits and some rounding inside: some hundredths, and not nothing
    gap = float((scores.logp - exact.logp).detach().abs().max())
    assert 0 < gap < 0.1
    (scores.logp.sum() + scores.values.sum()).backward()
    kinds = {(p.dtype, None if p.grad is None else p.grad.dtype) for p in policy.parameters()}
    assert kinds == {(torch.float32, torch.float32)}


def test_old_new_and_reference_come_from_one_function(make_model: Any) -> None:
    policy, reference = (Policy(make_model(), compute_dtype=BF16) for _ in range(2))
    batch, _ = score(collate(made_up(6), 0), policy, reference=reference, microbatch_sequences=2)
    assert batch.old_logp is not None and batch.ref_logp is not None
    assert torch.equal(batch.old_logp, batch.ref_logp)
    for micro in batch.microbatches(2):
        assert micro.old_logp is not None
        assert torch.equal(token_logprobs(policy, micro).logp, micro.old_logp)


@pytest.mark.parametrize("critic", ["shared", "own"])
def test_updates_far_below_the_spacing_of_bf16_are_not_lost(critic: Any, make_model: Any, tmp_path: Path) -> None:
    # Weights of 0.02 lie 1.2e-4 apart in bf16 (8 bits): ten steps of 1e-6 would all be rounded away.
    config = small_config(tmp_path, lr=1e-6, critic=critic)
    policy, own = make_policy_and_critic(make_model(), critic=critic, compute_dtype=BF16)
    learner = make_learner(config, policy, critic=own)
    batch, _ = score(collate(made_up(4), 0), learner.policy, critic=own, microbatch_sequences=2)
    batch = estimate_advantages(batch, learner.algorithm, config)
    weight = policy.lm.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    for number in range(10):
        optimiser_step(learner, batch, update=0)
        if number == 0:  # what a weight stored in bf16 would have kept of a step: in nine of ten, nothing
            kept = weight.detach().to(BF16) != before.to(BF16)
            assert float(kept.float().mean()) < 0.1
    moved = (weight.detach() - before).abs()
    assert float((moved > 0).float().mean()) > 0.99
    assert 1e-6 < float(moved.mean()) <= 1.1e-5  # Adam's steps are of size lr


def test_gradients_of_many_microbatches_add_up_in_float32(make_model: Any) -> None:
    # 64 times the same gradient: in bf16 (8 bits) adding one to 63 others would lose about one part in 256 each time.
    batch, policy = collate(made_up(2), 0), Policy(make_model(), compute_dtype=BF16)
    weight = policy.lm.get_output_embeddings().weight
    token_logprobs(policy, batch).logp.sum().backward()
    assert weight.grad is not None
    once = weight.grad.clone()
    for _ in range(63):
        token_logprobs(policy, batch).logp.sum().backward()
    same("64 equal gradients in float32", weight.grad / 64, once, tolerance=1e-4 * float(once.abs().max()))


# --- Activations made again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("dtype", [None, BF16], ids=["float32", "bfloat16"])
def test_made_again_activations_give_the_same_gradient(lora_rank: int, dtype: Any, make_model: Any) -> None:
    batch, found = collate(made_up(5), 0), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy, critic = make_policy_and_critic(
            make_model(), critic="own", compute_dtype=dtype, checkpointing=checkpointing, lora_rank=lora_rank
        )
        for module in (policy, critic):
            for parameter in [] if module is None else [p for p in module.parameters() if p.requires_grad]:
                torch.nn.init.normal_(parameter, std=0.1)
        scores = token_logprobs(policy, batch)
        values = scores.values if critic is None else critic(batch.token_ids, batch.attention_mask, batch.loss_mask)
        parameters = [p for m in (policy, critic) if m is not None for p in m.parameters() if p.requires_grad]
        loss = scores.logp.sum() + values.square().sum()
        found.append(torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True))
        again = torch.autograd.grad(loss, parameters, allow_unused=True)  # as the gradient estimators do
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found[-1], again, strict=True))
    assert len(found[0]) == len(found[1]) > 0
    for plain, made_again in zip(*found, strict=True):
        assert torch.equal(plain, made_again)


def saved_bytes(module: Any, batch: Any) -> int:
    """Bytes that the graph of one forward keeps for backward, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scores = module(batch.token_ids, batch.attention_mask, batch.loss_mask)
    del scores
    return sum(kept.values())


@pytest.mark.parametrize("kind", [Policy, Critic])
def test_made_again_activations_are_not_kept(kind: Any, make_model: Any) -> None:
    # A layer of width 32 keeps about 30 vectors of a token for backward, made again only the one that enters it.
    batch = collate(made_up(6), 0)
    batch = batch.replace(loss_mask=batch.loss_mask & (torch.arange(batch.loss_mask.shape[1]) < 12))  # few logits
    plain, made_again = (
        saved_bytes(kind(make_model(layers=6), checkpointing=checkpointing), batch) for checkpointing in (False, True)
    )
    assert made_again < 0.5 * plain


def test_making_activations_again_leaves_dropout_off_and_the_cache_on(make_model: Any) -> None:
    policy = Policy(make_model(), checkpointing=True)
    ids = torch.tensor([[5, 6, 7]])
    inside = policy.lm(input_ids=ids, use_cache=True)
    assert inside.past_key_values is not None and inside.past_key_values.get_seq_length() == 3
    batch = collate(made_up(2), 0)
    token_logprobs(policy, batch).logp.sum().backward()
    assert not any(module.training for module in policy.modules())


# --- Scores without whole logits ----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_token_scores_against_log_softmax_in_float64(chunk: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((9, 5), (23, 5), 23)
    )
    targets = torch.randint(23, (9,), generator=generator)
    logits = torch.nn.functional.linear(hidden, weight, bias if with_bias else None) / 0.7
    full = logits.log_softmax(-1)
    expected = full.gather(-1, targets[:, None]).squeeze(-1)
    logp, entropy = token_scores(
        hidden, targets, weight, bias if with_bias else None, temperature=0.7, tokens_at_once=chunk
    )
    same("token_scores: log-probability", logp, expected, tolerance=1e-12)
    same("token_scores: entropy", entropy, -(full.exp() * full).sum(-1), tolerance=1e-12)
    weights = torch.rand(9, generator=generator, dtype=torch.float64)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    for _ in range(2):  # a graph that is kept gives the same again
        got = torch.autograd.grad((logp * weights).sum(), inputs, retain_graph=True)
        wanted = torch.autograd.grad((expected * weights).sum(), inputs, retain_graph=True)
        for one, other in zip(got, wanted, strict=True):
            same("token_scores: gradient", one, other, tolerance=1e-12)
    assert not entropy.requires_grad


def test_token_scores_survive_logits_past_the_range_of_exp() -> None:
    hidden = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]], requires_grad=True)
    logp, entropy = token_scores(hidden, torch.tensor([0, 0]), torch.eye(2))
    # softmax(1000, 0)[0] = 1; softmax(-1000, 0)[0] = e^-1000; both distributions are certain
    assert logp.tolist() == [0.0, -1000.0] and entropy.tolist() == [0.0, 0.0]
    logp.sum().backward()
    assert hidden.grad is not None and hidden.grad.tolist() == [[0.0, 0.0], [1.0, -1.0]]


def test_no_tensor_of_all_tokens_by_the_vocabulary_exists() -> None:
    """Counted by the dispatcher: the largest tensor that any operation makes, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            for item in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(item, Tensor):
                    self.elements = max(self.elements, item.numel())
            return out

    tokens, width, vocabulary = 256, 4, 5000
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    with Largest() as seen:
        logp, _ = token_scores(hidden, torch.zeros(tokens, dtype=torch.long), weight, tokens_at_once=16)
        logp.sum().backward()
    assert seen.elements <= max(16 * vocabulary, vocabulary * width)
    assert math.isfinite(float(logp.sum()))
