"""Log-probabilities of action tokens against the naive computation; critics; loading and saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_algos.batch import Batch, collate
from sorl_algos.models import (
    Critic,
    Policy,
    TokenScores,
    load_language_model,
    resolve_model,
    save_language_model,
    score,
    token_logprobs,
)
from tests.sorl_algos.proofs import same
from tests.sorl_algos.small_game import made_up


def naive(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log_softmax over the full (B, T, V) logits, shifted by one; entropy of the same distribution."""
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits / temperature
    full = logits.log_softmax(-1)
    logp = torch.zeros_like(full[..., 0])
    logp[:, 1:] = full[:, :-1].gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    entropy = torch.zeros_like(logp)
    entropy[:, 1:] = -(full.exp() * full).sum(-1)[:, :-1]
    return logp * batch.loss_mask, entropy * batch.loss_mask


def batch_of(rows: int, seed: int = 0) -> Batch:
    return collate(made_up(rows, seed=seed), 0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("chunk", [2048, 3, 1])
def test_equal_to_the_naive_computation_with_its_gradient(make_model: Any, chunk: int, temperature: float) -> None:
    batch, model = batch_of(5), make_model()
    with torch.no_grad():  # sharper than at initialisation, so that tokens differ
        model.get_output_embeddings().weight.mul_(8)
    scores = token_logprobs(Policy(model, logit_chunk=chunk), batch, temperature=temperature)
    expected, entropy = naive(model, batch, temperature)
    same("token_logprobs = naive log-softmax", scores.logp, expected, tolerance=1e-5)
    same("entropy = naive entropy", scores.entropy, entropy, tolerance=1e-5)
    weights = torch.rand(scores.logp.shape, generator=torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    actual = torch.autograd.grad((scores.logp * weights).sum(), parameters)
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    for got, want in zip(actual, wanted, strict=True):
        same("gradient of token_logprobs = naive", got, want, tolerance=1e-4)


def test_temperature_by_hand(make_model: Any) -> None:
    # Logits 2, 1, 0 at temperature 0.5: log softmax(4, 2, 0)[0] = 4 - ln(e^4 + e^2 + 1) = -0.142932.
    from sorl_algos.token_scores import token_scores

    logp, _ = token_scores(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), torch.eye(3), temperature=0.5)
    assert float(logp) == pytest.approx(-0.142932, abs=1e-6)


def test_only_action_tokens_have_scores(make_model: Any) -> None:
    batch = batch_of(6)
    scores = token_logprobs(Policy(make_model(), shared_critic=True), batch)
    for tensor in (scores.logp, scores.entropy, scores.values):
        assert tensor is not None and tensor.shape == batch.token_ids.shape
        assert not tensor[~batch.loss_mask].any()
    assert (scores.logp[batch.loss_mask] < 0).all() and (scores.entropy[batch.loss_mask] > 0).all()


def test_padding_on_the_right_and_neighbours_do_not_change_scores(make_model: Any) -> None:
    items, policy = made_up(6), Policy(make_model())
    together = token_logprobs(policy, collate(items, 0)).logp
    other_pad = token_logprobs(policy, collate(items, 1)).logp
    same("padding token does not matter", other_pad, together, tolerance=1e-6)
    for row, item in enumerate(items):
        alone = token_logprobs(policy, collate([item], 0)).logp[0]
        same("a row scored alone = in a batch", together[row, : len(alone)], alone, tolerance=1e-5)


def test_a_batch_without_action_tokens_gives_zeros_that_can_be_differentiated(make_model: Any) -> None:
    batch = batch_of(2)
    batch = batch.replace(loss_mask=torch.zeros_like(batch.loss_mask))
    model = make_model()
    scores = token_logprobs(Policy(model), batch)
    scores.logp.sum().backward()
    assert not scores.logp.any()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_dropout_is_never_on(make_model: Any) -> None:
    # Dropout 0.5 in the attention: were it on in either pass, ratios would differ from 1 by tens of percent.
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300, n_positions=128, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.5, resid_pdrop=0.5
    )
    policy = Policy(GPT2LMHeadModel(config), shared_critic=True)
    policy.train()
    critic = Critic(policy.lm)
    critic.train()
    assert not any(module.training for module in (*policy.modules(), *critic.modules()))
    batch, _ = score(batch_of(4), policy, microbatch_sequences=2)
    assert batch.old_logp is not None
    ratio = (token_logprobs(policy, batch).logp - batch.old_logp).exp()
    same("first-step ratio with dropout in the model = 1", ratio, torch.ones_like(ratio), tolerance=1e-5)


def test_the_first_ratio_is_exactly_one_on_the_same_split(make_model: Any) -> None:
    policy = Policy(make_model())
    batch, _ = score(batch_of(8), policy, microbatch_sequences=2)
    for micro in batch.microbatches(2):
        assert micro.old_logp is not None
        assert torch.equal(token_logprobs(policy, micro).logp, micro.old_logp)


def test_a_shared_critic_sends_no_gradient_into_the_trunk(make_model: Any) -> None:
    policy = Policy(make_model(), shared_critic=True)
    assert policy.value_head is not None
    torch.nn.init.ones_(policy.value_head.outer.weight)
    values = token_logprobs(policy, batch_of(4)).values
    assert values is not None and values.any()
    values.square().sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.lm.parameters())
    assert policy.value_head.inner.weight.grad is not None and policy.value_head.inner.weight.grad.any()


def test_a_critic_of_its_own_starts_at_zero_with_a_copy_of_the_trunk(make_model: Any) -> None:
    model, batch = make_model(), batch_of(4)
    critic = Critic(model)
    assert not critic(batch.token_ids, batch.attention_mask, batch.loss_mask).any()
    own = dict(critic.trunk.named_parameters())
    for name, parameter in model.base_model.named_parameters():
        assert torch.equal(own[name], parameter) and own[name].data_ptr() != parameter.data_ptr()
    torch.nn.init.ones_(critic.head.outer.weight)
    values = critic(batch.token_ids, batch.attention_mask, batch.loss_mask)
    assert not values[~batch.loss_mask].any() and values[batch.loss_mask].all()
    values.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in critic.trunk.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_the_value_of_a_token_is_read_before_it_is_sampled(make_model: Any) -> None:
    # Changing the last action token changes no value: every value looks at what stands before its token.
    critic, batch = Critic(make_model()), batch_of(1)
    torch.nn.init.ones_(critic.head.outer.weight)
    last = int(batch.loss_mask[0].nonzero()[-1])
    changed = batch.token_ids.clone()
    changed[0, last] = (changed[0, last] + 1) % 300
    arguments = (batch.attention_mask, batch.loss_mask)
    same("values before the token", critic(changed, *arguments), critic(batch.token_ids, *arguments), tolerance=0)


def test_score_fills_each_stage_once(make_model: Any) -> None:
    batch, policy, reference = batch_of(7), Policy(make_model(), shared_critic=True), Policy(make_model(1))
    assert policy.value_head is not None
    torch.nn.init.ones_(policy.value_head.outer.weight)
    scored, entropy = score(batch, policy, microbatch_sequences=3, reference=reference, temperature=0.7)
    whole: TokenScores = token_logprobs(policy, batch, temperature=0.7)
    assert scored.old_logp is not None and scored.values is not None and scored.ref_logp is not None
    assert whole.values is not None
    same("score in microbatches = at once", scored.old_logp, whole.logp, tolerance=1e-5)
    same("score in microbatches = at once", scored.values, whole.values, tolerance=1e-5)
    same("score in microbatches = at once", entropy, whole.entropy, tolerance=1e-5)
    expected = token_logprobs(reference, batch, temperature=0.7).logp
    same("score in microbatches = at once", scored.ref_logp, expected, tolerance=1e-5)
    assert not scored.old_logp.requires_grad
    bare, _ = score(batch, Policy(make_model()), microbatch_sequences=3)
    assert bare.values is None and bare.ref_logp is None


def test_half_precision_weights_give_full_precision_scores(make_model: Any) -> None:
    policy = Policy(make_model(dtype=torch.bfloat16), shared_critic=True)
    scores = token_logprobs(policy, batch_of(3))
    assert scores.logp.dtype == torch.float32 and scores.values is not None
    assert scores.values.dtype == torch.float32 and scores.logp.isfinite().all()


def test_capped_logits_are_refused(make_model: Any) -> None:
    model = make_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="caps its logits"):
        Policy(model)


def test_saved_models_come_back_equal_and_replace_old_ones(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for seed in (0, 1):  # the second replaces the first
        model = make_model(seed)
        save_language_model(model, tokenizer, folder)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
        again, own_tokenizer = load_language_model(str(folder))
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, dict(model.named_parameters())[name])
    text = "<search> capital of Peru</search>"
    assert own_tokenizer.encode(text) == tokenizer.encode(text)
    assert own_tokenizer.chat_template == tokenizer.chat_template
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id
    assert next(load_language_model(str(folder), dtype=torch.bfloat16)[0].parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bas", "unknown model 'bas'; known: base, smollm2, a directory with config.json, or a hub name"),
        ("./nowhere/model", "unknown model './nowhere/model'"),
        ("~/nowhere", "unknown model '~/nowhere'"),
    ],
)
def test_unknown_models_are_named_with_a_remedy(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        resolve_model(name)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no model"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="could not be loaded from"):
        load_language_model(str(tmp_path))
