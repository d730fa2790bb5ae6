"""Ops on tensors: losses, advantages, sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sorl_algos.advantages import (
    gae,
    group_advantages,
    leave_one_out,
    place_outcome_reward,
    reward_to_go,
    spread,
    whiten,
)
from sorl_algos.batch import Batch, collate
from sorl_algos.losses.corrections import decoupled_weights
from sorl_algos.losses.kl import KL_ESTIMATORS
from sorl_algos.losses.policy import clipped_surrogate
from sorl_algos.losses.reduce import REDUCTIONS, Counts, counts_of, token_mean
from sorl_algos.losses.segments import level_ratio, turn_ids_from_mask
from sorl_algos.losses.value import value_loss
from sorl_algos.models import Policy, score, token_logprobs
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine, sample_tokens
from sorl_algos.tiny import tiny_language_model
from sorl_env.actions import CutText, parse_parts
from sorl_env.episode import Episode, EpisodeRules
from sorl_env.questions import Question
from sorl_env.rewards import exact_match
from sorl_env.trajectory import Trajectory, Turn
from tests.cases.toys import GivenLogits, ScriptedModel, vocabulary_tokenizer

Given = Mapping[str, Any]
NAMES = {"seq_mean": "sequence_mean"}  # of a reduction in the cases: ours


# --- Losses -------------------------------------------------------------------------------------------------


def aggregate(given: Given) -> Any:
    if "token_losses" in given:
        values, mask = torch.tensor(given["token_losses"]), torch.tensor(given["mask"])
    else:  # only the totals are known: the action tokens come first, the loss on one of them
        mask = (torch.arange(given["response_len"]) < given["action_tokens"])[None]
        values = torch.zeros(mask.shape)
        values[0, 0] = given["sum_of_masked_losses"]
    values.requires_grad_(True)
    turn_ids = turn_ids_from_mask(mask)
    counts = counts_of(mask, turn_ids)
    facts: dict[str, Any] = {}
    for name, reduction in REDUCTIONS.items():
        if name.endswith("_norm") and "norm_len" not in given:
            continue
        loss = reduction(values, mask, turn_ids, counts, norm_length=given.get("norm_len"))
        facts[name] = facts[name.replace("sequence_mean", "seq_mean")] = float(loss.detach())
    wanted = given.get("mode", "token_mean")
    loss = REDUCTIONS[wanted.replace("seq_mean", "sequence_mean")](values, mask, turn_ids, counts)
    [gradient] = torch.autograd.grad(loss, values)
    rows = {f"row_{row}_gradient": float(part.abs().sum()) for row, part in enumerate(gradient, start=1)}
    moved = {} if bool(mask.any()) else {"parameters_change": _an_empty_step_moves_something()}
    return facts | rows | moved | {"loss": float(loss.detach()), "gradient": float(gradient.abs().sum())}


def _an_empty_step_moves_something() -> bool:
    """Does the trainer's optimiser step move weights when no token of the minibatch is an action?"""
    from tests.cases.system_ops import learner_of, small_config

    config = small_config(weight_decay=0.1)
    learner = learner_of(config)
    full = _batch_for(learner)
    from sorl_algos.trainer import optimiser_step

    optimiser_step(learner, full, 5)  # so that there is momentum
    before = [parameter.detach().clone() for parameter in learner.raw_policy.parameters()]
    nothing = torch.zeros_like(full.loss_mask)
    optimiser_step(learner, full.replace(loss_mask=nothing, turn_ids=torch.full_like(full.turn_ids, -1)), 6)
    after = list(learner.raw_policy.parameters())
    return any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def _batch_for(learner: Any) -> Batch:
    from sorl_algos.trainer import estimate_advantages
    from tests.cases.system_ops import played

    batch, _ = score(collate(played(0), 0), learner.policy, microbatch_sequences=4)
    return estimate_advantages(batch, learner.algorithm, learner.config)


def accumulate(given: Given) -> Any:
    micros = given["micro_batches"]
    counts = Counts(sum(micro["tokens"] for micro in micros), len(micros), len(micros))
    total = 0.0
    for micro in micros:
        values = torch.full((1, micro["tokens"]), float(micro["mean_loss"]))
        mask = torch.ones_like(values).bool()
        total += float(token_mean(values, mask, turn_ids_from_mask(mask), counts))
    return {"loss": total}


def ppo_token_loss(given: Given) -> Any:
    ratio, advantages = torch.tensor(given["ratio_adv"]).T
    mask = torch.ones_like(ratio).bool()[None]
    out = clipped_surrogate(
        ratio.log()[None],
        torch.zeros_like(ratio)[None],
        advantages[None],
        mask,
        turn_ids_from_mask(mask),
        level="token",
        clip_low=given.get("eps_low", given.get("eps")),
        clip_high=given.get("eps_high", given.get("eps")),
        dual_clip=given.get("dual_clip_c"),
    )
    return {"loss": out.per_token[0].tolist()}


def ppo_loss(given: Given) -> Any:
    logp = torch.tensor([given["logp"]], requires_grad=True)
    mask = torch.tensor([given["mask"]]).bool()
    turn_ids = turn_ids_from_mask(mask)
    out = clipped_surrogate(
        logp,
        torch.tensor([given["old_logp"]]),
        torch.tensor([given["adv"]]),
        mask,
        turn_ids,
        level="token",
        clip_low=given["eps"],
        clip_high=given["eps"],
    )
    loss = REDUCTIONS[given["mode"].replace("seq_mean", "sequence_mean")](
        out.per_token, mask, turn_ids, counts_of(mask, turn_ids)
    )
    [gradient] = torch.autograd.grad(loss, logp)
    return {
        "loss": float(loss.detach()),
        "gradients_finite": bool(gradient.isfinite().all()),
        "gradient_of_masked_token": float(gradient[~mask].abs().sum()),
    }


def critic_loss(given: Given) -> Any:
    new, old, target = (torch.tensor([[float(given[name])]]) for name in ("new_value", "old_value", "return"))
    per_token = value_loss(new, old, target, torch.ones(1, 1).bool(), clip_range=given["clip"])
    return {"loss": float(per_token) * given.get("factor", 0.5) / 0.5}  # ours holds the factor 0.5


def kl_estimators(given: Given) -> Any:
    logp, ref = torch.tensor([[given["logp"]]]), torch.tensor([[given["ref_logp"]]])
    return {name: float(estimate(logp, ref, torch.ones(1, 1))) for name, estimate in KL_ESTIMATORS.items()}


def gspo_ratio(given: Given) -> Any:
    mask = torch.tensor([given["mask"]])
    ratio = _ratio(given["log_ratio"], mask, turn_ids_from_mask(mask), "sequence")
    return {"ratio": float(ratio[mask.bool()][0])}


def turn_ratio(given: Given) -> Any:
    mask, turn_ids = torch.tensor([given["mask"]]), torch.tensor([given["turn_ids"]])
    assert torch.equal(turn_ids_from_mask(mask), turn_ids)
    ratio = _ratio(given["log_ratio"], mask, turn_ids, "turn")
    return {"ratio_by_turn": [float(ratio[turn_ids == turn][0]) for turn in range(int(turn_ids.max()) + 1)]}


def first_step_ratio(given: Given) -> Any:
    """A model whose attention drops half of its weights, scored twice by the functions of the trainer."""
    model = tiny_language_model(32, hidden_size=16, layers=2, heads=2, intermediate_size=32)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = torch.arange(5)[None]
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)  # by itself it would be noise
    policy = Policy(model).train()
    batch = collate([Trajectory((Turn((1, 2), (3, 4, 5), (-1.0,) * 3, 0.0, "", ""),), "q", "q", 0, "answered")], 0)
    batch, _ = score(batch, policy, microbatch_sequences=1)
    assert batch.old_logp is not None
    log_ratio = (token_logprobs(policy.train(), batch).logp - batch.old_logp)[batch.loss_mask].detach()
    return {"ratio_each": float(log_ratio.exp().max()), "approx_kl": float((log_ratio.expm1() - log_ratio).mean())}


def decoupled_ppo(given: Given) -> Any:
    behaviour, proximal, new = (
        torch.tensor([[given[name]]]) for name in ("behaviour_logp", "proximal_logp", "new_logp")
    )
    mask = torch.ones(1, 1).bool()
    turn_ids = turn_ids_from_mask(mask)
    correction = decoupled_weights(
        proximal, behaviour, mask, turn_ids, level="token", cap=given.get("behaviour_weight_cap")
    )
    out = clipped_surrogate(
        new,
        proximal,
        torch.tensor([[given["adv"]]]),
        mask,
        turn_ids,
        level="token",
        clip_low=given["eps"],
        clip_high=given["eps"],
    )
    return {
        "behaviour_weight": float(correction.weights),
        "ratio": float(out.ratio),
        "loss": float(correction.weights * out.per_token),
    }


# --- Advantages ---------------------------------------------------------------------------------------------


def gae_case(given: Given) -> Any:
    mask = torch.tensor([given["mask"]])
    advantages, returns = gae(
        torch.tensor([given["rewards"]], dtype=torch.float64),
        torch.tensor([given["values"]], dtype=torch.float64),
        mask,
        gamma=given["gamma"],
        lam=given["lam"],
    )
    return {"advantages": advantages[0].tolist(), "returns_on_actions": returns[mask.bool()].tolist()}


def returns_case(given: Given) -> Any:
    mask = torch.tensor([given["mask"]])
    returns = reward_to_go(torch.tensor([given["rewards"]]), mask, gamma=given["gamma"])
    return {"returns_on_actions": returns[mask.bool()].tolist()}


def place_reward(given: Given) -> Any:
    places = []
    for mask in given["masks"]:
        row = place_outcome_reward(torch.tensor([given["reward"]]), torch.tensor([mask]))[0]
        places.append(int(row.nonzero()[0, 0]))
    return {"index": places}


def grpo_advantage(given: Given) -> Any:
    if "uids" in given:
        numbers = {uid: number for number, uid in enumerate(dict.fromkeys(given["uids"]))}
        groups = torch.tensor([numbers[uid] for uid in given["uids"]])
        return {"advantages": group_advantages(torch.tensor(given["rewards"]), groups, scale="std").tolist()}
    sizes = [len(rewards) for rewards in given["groups"].values()]
    flat = torch.tensor([reward for rewards in given["groups"].values() for reward in rewards])
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    parts = group_advantages(flat, groups, scale="std").split(sizes)
    return {"advantages": {name: part.tolist() for name, part in zip(given["groups"], parts, strict=True)}}


def whiten_case(given: Given) -> Any:
    mask = torch.tensor([given["mask"]])
    whitened = whiten(torch.tensor([given["values"]]), mask)
    values = whitened[mask.bool()]
    return {"finite": bool(whitened.isfinite().all()), "value": float(values[0]), "values": values.tolist()}


def broadcast_advantage(given: Given) -> Any:
    masks = torch.tensor(given["step_masks"])
    return {"advantages": spread(torch.full((len(masks),), given["scalar"]), masks).tolist()}


def rloo_advantage(given: Given) -> Any:
    group = torch.tensor(given["group"])
    return {"advantages": leave_one_out(group, torch.zeros(len(group), dtype=torch.long)).tolist()}


# --- Rollouts -----------------------------------------------------------------------------------------------


def token_logp(given: Given) -> Any:
    """The log-probability that the sampler stores; the trainer's own must be the same."""
    logits = torch.tensor([given["logits"]])
    sampling = Sampling(temperature=given["temperature"])
    token, logp = _drawn(logits, sampling, given.get("token"))
    policy = Policy(GivenLogits(logits[:, None].expand(1, 2, -1)))
    mask = torch.tensor([[False, True]])
    if given["temperature"] > 0:
        own = policy(torch.tensor([[0, token]]), torch.ones_like(mask), mask, given["temperature"]).logp[0, 1]
        assert abs(float(own.detach()) - logp) < 1e-5
    finite = bool(torch.tensor(logp).isfinite())
    return {"token": token, "logp": logp, "no_nan_or_inf": finite, "division_by_zero": not finite}


def on_policy_ratio(given: Given) -> Any:
    logits = torch.tensor([given["probs"]]).log()
    token, sampled = _drawn(logits, Sampling(top_p=given["top_p"]), given["token"])
    mask = torch.tensor([[False, True]])
    policy = Policy(GivenLogits(logits[:, None].expand(1, 2, -1)))
    trained = float(policy(torch.tensor([[0, token]]), torch.ones_like(mask), mask).logp[0, 1])
    ratio = float(torch.tensor(trained - sampled).exp())
    return {"ratio": ratio, "consistent": [sampled, trained]}


def stop_at(given: Given) -> Any:
    texts = given["token_texts"]
    tokenizer = vocabulary_tokenizer(dict(enumerate(texts)))
    engine = HFEngine(ScriptedModel(range(len(texts)), len(tokenizer)), tokenizer)
    [done] = engine.generate([[0]], Sampling(max_tokens=len(texts), stop=(given["stop"],), seeds=(0,)))
    text = tokenizer.decode(list(done.token_ids))
    after = parse_parts(text).after
    return {
        "kept_tokens": len(done.token_ids),
        "n_logprobs": len(done.logprobs),
        "text_for_parser": text.removesuffix(after) if after else text,
    }


def event_log(given: Given) -> Any:
    if "partial_rollout" in given:
        return None  # a running rollout that meets a weight update: needs an asynchronous source
    sampling, prompt = Sampling(max_tokens=8, temperature=0.0), [[3, 1, 4, 1, 5]]
    models = [tiny_language_model(16, hidden_size=16, layers=2, heads=2, intermediate_size=32, seed=n) for n in (1, 2)]
    tokenizer = vocabulary_tokenizer({})
    engine, fresh = HFEngine(models[0], tokenizer), HFEngine(models[1], tokenizer)
    answers = []
    for event in given["events"]:
        if event.startswith("update_weights"):
            engine.update_weights(models[1].named_parameters(), 1)
        else:
            answers.append(engine.generate(prompt, sampling)[0])
    expected = fresh.generate(prompt, sampling)[0]
    same = answers[-1].token_ids == expected.token_ids and answers[-1].logprobs == expected.logprobs
    return {"prefix_blocks_from_w0_used_under_w1": 0 if same else 1}


def classify_turn(given: Given) -> Any:
    text = given["text"]
    cut = given["finish_reason"] == "length"
    episode = Episode(Question("q", "?", ("a",)), EpisodeRules(invalid_penalty=0.5), exact_match)
    episode.begin()
    step = episode.advance(CutText(text) if cut else text)
    return {
        "truncated": step.info["action_kind"] == "cut",
        "format_penalty_applied": step.reward < 0,
        "recorded_as_normal_turn": step.info["action_kind"] in ("search", "answer"),
    }


def pad_prompts(given: Given) -> Any:
    """What the engine's model is given first; the engine works from the shortest prompt to the longest."""
    rows = given["rows"]
    tokenizer = vocabulary_tokenizer({given["pad_id"]: "\ue100pad"})
    tokenizer.pad_token = "\ue100pad"
    model = ScriptedModel([1], len(tokenizer))
    HFEngine(model, tokenizer).generate(rows, Sampling(max_tokens=1, seeds=tuple(range(len(rows)))))
    [call] = model.calls
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    back = [order.index(row) for row in range(len(rows))]
    return {
        "input_ids": call["input_ids"][back].tolist(),
        "attention_mask": call["attention_mask"][back].tolist(),
        "first_generated_column": call["input_ids"].shape[1],
    }


LEARNING_OPS: dict[str, Callable[[Given], Any]] = {
    "aggregate": aggregate,
    "accumulate": accumulate,
    "ppo_token_loss": ppo_token_loss,
    "ppo_loss": ppo_loss,
    "value_loss": critic_loss,
    "kl_estimators": kl_estimators,
    "gspo_ratio": gspo_ratio,
    "turn_ratio": turn_ratio,
    "first_step_ratio": first_step_ratio,
    "decoupled_ppo": decoupled_ppo,
    "gae": gae_case,
    "reward_to_go": returns_case,
    "place_outcome_reward": place_reward,
    "grpo_advantage": grpo_advantage,
    "whiten": whiten_case,
    "broadcast_advantage": broadcast_advantage,
    "rloo_advantage": rloo_advantage,
    "token_logp": token_logp,
    "on_policy_ratio": on_policy_ratio,
    "stop_at": stop_at,
    "event_log": event_log,
    "classify_turn": classify_turn,
    "pad_prompts": pad_prompts,
}


def _ratio(log_ratio: Sequence[float], mask: Tensor, turn_ids: Tensor, level: Any) -> Tensor:
    row = torch.tensor([log_ratio])
    return level_ratio(row, torch.zeros_like(row), mask, turn_ids, level)


def _drawn(logits: Tensor, sampling: Sampling, token: int | None) -> tuple[int, float]:
    """What the sampler gives for the wanted token (the first draw where none is wanted)."""
    for uniform in torch.linspace(0, 0.999, 400, dtype=torch.float64):
        drawn, logp = sample_tokens(logits, uniform[None], sampling)
        if token is None or int(drawn) == token:
            return int(drawn), float(logp)
    raise AssertionError(f"token {token} was never drawn")
