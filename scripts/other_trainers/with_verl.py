"""verl's core algorithms on the fixed tensors."""

import importlib
from typing import Any

from torch import Tensor

from other_trainers.tensors import CLIP_HIGH, CLIP_LOW, DUAL_CLIP, GAMMA, LAM, VALUE_CLIP, with_gradient


def verl_results(x: dict[str, Tensor]) -> dict[str, Any]:
    """Losses, advantages, value loss and KL of verl.trainer.ppo.core_algos."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    actor_config = importlib.import_module("verl.workers.config").ActorConfig
    config = actor_config(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=CLIP_LOW,
        clip_ratio_low=CLIP_LOW,
        clip_ratio_high=CLIP_HIGH,
        clip_ratio_c=DUAL_CLIP,
    )
    results: dict[str, Any] = {}
    for name, mode in {
        "vanilla": "token-mean",
        "vanilla, sequence mean of token mean": "seq-mean-token-mean",
        "vanilla, sequence mean of token sum": "seq-mean-token-sum",
        "gspo": "seq-mean-token-mean",
        "cispo": "token-mean",
    }.items():
        loss = core.get_policy_loss_fn(name.split(",")[0])
        for kind in ("advantages", "sequence_advantages"):

            def run(logp: Tensor, loss: Any = loss, mode: str = mode, kind: str = kind) -> Tensor:
                return loss(x["old_logp"], logp, x[kind], x["mask"], mode, config)[0]

            results[f"{name} | {kind}"] = with_gradient(run, x["logp"])
    mask, values = x["mask"], x["values"]
    advantages, returns = core.compute_gae_advantage_return(x["rewards"], values, mask, GAMMA, LAM)
    results["gae, whitened"] = {
        "advantages": (advantages * mask).tolist(),
        "returns": (returns * mask).tolist(),
    }
    index = x["group_ids"].numpy()
    for name, function, options in (
        ("group", core.compute_grpo_outcome_advantage, {}),
        ("group, unscaled", core.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        ("leave_one_out", core.compute_rloo_outcome_advantage, {}),
    ):
        results[name] = {"advantages": function(x["rewards"].clone(), mask, index, **options)[0].tolist()}

    def value_loss(v: Tensor) -> Tensor:
        return core.compute_value_loss(v, x["returns"], x["old_values"], mask, VALUE_CLIP)[0]

    results["value_loss"] = with_gradient(value_loss, values)
    for name in ("k1", "k2", "k3"):
        results[name] = {"per_token": (core.kl_penalty(x["logp"], x["ref_logp"], name) * mask).tolist()}
    return results
