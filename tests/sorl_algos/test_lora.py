"""Adapters on a shared, frozen base: what moves, what the reference is, what is published, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sorl_algos.batch import Batch, collate
from sorl_algos.learner import Learner, make_learner
from sorl_algos.lora import CRITIC, POLICY, Adapters, save_adapter
from sorl_algos.models import (
    Policy,
    full_weights,
    load_language_model,
    make_policy_and_critic,
    save_language_model,
    score,
    token_logprobs,
)
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.run import make_source
from sorl_algos.trainer import estimate_advantages, optimiser_step, train
from tests.fakes import ScriptedEngine
from tests.sorl_algos.proofs import same
from tests.sorl_algos.small_game import QUESTIONS, ReplaySource, made_up, make_env, small_config


def learner_for(run_dir: Path, make_model: Any, **changes: Any) -> Learner:
    config = small_config(run_dir, **{"lora_rank": 2, "lr": 1e-2} | changes)
    torch.manual_seed(0)
    needs = config.algorithm_row().needs_critic
    policy, critic = make_policy_and_critic(
        make_model(),
        critic=config.critic if needs else "none",
        checkpointing=config.gradient_checkpointing,
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_targets=config.lora_targets,
    )
    assert critic is None  # every critic shares the base
    return make_learner(config, policy)


def ready(learner: Learner, seed: int = 0) -> Batch:
    batch = collate(made_up(4, seed=seed), 0)
    batch, _ = score(batch, learner.policy, reference=learner.reference, microbatch_sequences=2)
    return estimate_advantages(batch, learner.algorithm, learner.config)


def state(learner: Learner) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in learner.raw_policy.state_dict().items()}


@pytest.mark.parametrize("changes", [
    {},
    {"critic": "own", "gradient_checkpointing": True},
    {"critic": "own", "normalisation": "gradient_norm", "weight_decay": 0.1},
    {"algorithm": "gspo", "normalisation": "gradient_ratio"},
    {"algorithm": "so_grpo", "kl_loss_coef": 0.1, "lora_targets": "q_proj, v_proj"},
], ids=lambda changes: "-".join(map(str, changes.values())) or "so_ppo")  # fmt: skip
def test_a_step_moves_adapters_and_value_head_alone(changes: dict[str, Any], make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(tmp_path, make_model, **changes)
    before, batch = state(learner), ready(learner)
    for _ in range(3):  # head and B start at zero: the head moves first, then B, and A last
        optimiser_step(learner, batch, update=0)
    after = state(learner)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    adapters = {name for name in before if ".lora_" in name}
    if learner.algorithm.needs_critic:
        assert adapters < moved
        assert all("value_head" in name for name in moved - adapters)
    else:
        assert moved == adapters
    assert any(f".{CRITIC}." in name for name in adapters) == (changes.get("critic") == "own")
    if "lora_targets" in changes:
        assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in adapters} == {"q_proj", "v_proj"}


def test_value_and_policy_loss_move_an_adapter_each(make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(tmp_path, make_model, critic="own", critic_warmup_updates=1)
    before, batch = state(learner), ready(learner)
    torch.nn.init.normal_(learner.raw_policy.value_head.outer.weight)  # zero sends no gradient into the trunk
    optimiser_step(learner, batch, update=0)
    changed = {name for name, value in state(learner).items() if not torch.equal(before[name], value)}
    assert any(f".{CRITIC}." in name for name in changed) and not any(f".{POLICY}." in name for name in changed)
    assert {id(p) for p in learner.policy_parameters}.isdisjoint({id(p) for p in learner.value_parameters})


def test_the_reference_is_the_base_whatever_was_learnt(make_model: Any, tmp_path: Path) -> None:
    learner = learner_for(tmp_path, make_model, kl_reward_coef=0.1, critic="own")
    base = Policy(make_model())
    start = ready(learner)
    assert start.ref_logp is not None and start.old_logp is not None
    assert torch.equal(start.ref_logp, start.old_logp)  # B is zero: nothing is added yet
    for _ in range(3):
        optimiser_step(learner, start, update=0)
    batch = ready(learner)
    assert batch.ref_logp is not None and batch.old_logp is not None
    with torch.no_grad():
        expected, _ = score(batch, base, microbatch_sequences=2)
    assert expected.old_logp is not None
    same("reference with adapters = the base model", batch.ref_logp, expected.old_logp, tolerance=1e-6)
    assert float((batch.old_logp - batch.ref_logp).abs().max()) > 1e-3


def test_published_weights_are_the_plain_model_with_adapters_merged(
    make_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    learner = learner_for(tmp_path, make_model, critic="own")
    batch = ready(learner)
    engine = HFEngine(make_model(seed=3), tokenizer)
    for version in (1, 2):
        optimiser_step(learner, batch, update=0)
        engine.update_weights(full_weights(learner.raw_policy), version)
        with torch.no_grad():
            expected = token_logprobs(learner.policy, batch).logp
            actual = token_logprobs(Policy(engine.model), batch).logp
        same("log-probabilities of merged weights = with adapters", actual, expected, tolerance=1e-5)
    prompts = [[5, 6, 7], [8, 9]]
    [one, two] = engine.generate(prompts, Sampling(max_tokens=3, seeds=(1, 2)))
    assert (one.policy_version, two.policy_version) == (2, 2)
    plain = dict(make_model().named_parameters())
    assert {name for name, _ in full_weights(learner.raw_policy)} == plain.keys()
    save_language_model(make_model(), tokenizer, tmp_path / "policy", weights=dict(full_weights(learner.raw_policy)))
    loaded, _ = load_language_model(str(tmp_path / "policy"))
    with torch.no_grad():
        same("the saved policy = with adapters", token_logprobs(Policy(loaded), batch).logp, expected, tolerance=1e-5)


def moved(model: Any, seed: int = 0, **changes: Any) -> Any:
    """A policy whose adapters add something: B, which starts at zero, is drawn too."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"critic": "own", "lora_rank": 2, "lora_alpha": 6.0}
    policy, _ = make_policy_and_critic(model, **settings | changes)
    for name, parameter in policy.lm.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return policy


@pytest.mark.parametrize("targets", ["all-linear", "q_proj, down_proj"])
def test_the_written_adapter_is_the_policys_as_peft_reads_it(targets: str, make_model: Any, tmp_path: Path) -> None:
    """peft on a plain base gives the logits of the model with the live adapter, and the critic's stays at home."""
    from peft import PeftModel

    policy = moved(make_model(), lora_targets=targets)
    assert save_adapter(policy.lm, tmp_path / "adapter") == tmp_path / "adapter"
    assert {path.name for path in tmp_path.rglob("*")} == {
        "adapter", "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    per_layer = {"all-linear": 7, "q_proj, down_proj": 2}[targets]
    assert len(names) == 2 * 2 * per_layer  # layers, A and B
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        live, bare = policy.lm(ids).logits, make_model()(ids).logits
        loaded = PeftModel.from_pretrained(make_model(), str(tmp_path / "adapter"))(ids).logits
    same("logits with the adapter as peft reads it = with the live one", loaded, live, tolerance=1e-6)
    assert float((live - bare).abs().max()) > 1e-2  # it changes them
    other = moved(make_model(), seed=1, lora_targets=targets)
    save_adapter(other.lm, tmp_path / "adapter")  # in place of the first
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(make_model(), str(tmp_path / "adapter"))(ids).logits
        same("the second adapter takes the first one's place", loaded, other.lm(ids).logits, tolerance=1e-6)
    assert len(list(tmp_path.rglob("*"))) == 3
    with pytest.raises(ValueError, match="no adapter 'critic' to write"):
        save_adapter(moved(make_model(), critic="none").lm, tmp_path / "none", name=CRITIC)


class TakesAdapters(ScriptedEngine):
    """A scripted engine that keeps the adapters it is shown, and can be asked for one completion."""

    taken: dict[int, dict[str, Tensor]] | None = None

    def update_adapter(self, directory: Path, version: int) -> None:
        self.taken = (self.taken or {}) | {version: load_file(directory / "adapter_model.safetensors")}

    async def agenerate(self, prompt_ids: Any, sampling: Sampling) -> Any:
        [completion] = self.generate([prompt_ids], sampling)
        return completion


@pytest.mark.parametrize("source", ["sync", "async"])
def test_a_run_can_publish_the_adapter_alone(source: Any, make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    settings = {"lora_rank": 2, "lora_publish": "adapter", "engine": "vllm", "source": source}
    config = small_config(tmp_path, **settings)
    policy = moved(make_model())
    engine = TakesAdapters(tokenizer, lambda prompt: "<answer> x</answer>")
    played = make_source(config, make_env(4), engine, Renderer(tokenizer), QUESTIONS)  # type: ignore[arg-type]
    for version in (0, 1):
        played.publish(policy, version)
        with torch.no_grad():
            policy.adapters.parameters(POLICY)[0].add_(1.0)
    played.close()
    assert engine.versions == [] and engine.taken is not None and list(engine.taken) == [0, 1]
    first, second = engine.taken.values()
    assert [name for name in first if not torch.equal(first[name], second[name])] == [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    ]
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize("changes", [{"lora_rank": 2}, {"engine": "vllm"}, {"lora_rank": 2, "lora_publish": "both"}])
def test_adapters_are_published_to_an_engine_that_takes_them(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora_publish.*(set both|known: merged, adapter)"):
        small_config(tmp_path, **{"lora_publish": "adapter"} | changes)


@pytest.mark.parametrize("changes", [{"critic": "own"}, {"algorithm": "grpo", "kl_loss_coef": 0.1}], ids=str)
def test_a_resumed_run_is_the_straight_one_and_its_checkpoint_small(
    changes: dict[str, Any], make_model: Any, tmp_path: Path
) -> None:
    def go(folder: str, updates: int) -> Learner:
        learner = learner_for(tmp_path / folder, make_model, updates=updates, **changes)
        train(learner.config, learner, ReplaySource([made_up(8, seed=1), made_up(8, seed=2)]), pad_id=0)
        return learner

    straight = go("straight", 2)
    go("resumed", 1)
    resumed = go("resumed", 2)
    ours, theirs = state(straight), state(resumed)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    saved = load_file(tmp_path / "resumed" / "checkpoints" / "step_000002" / "policy.safetensors")
    assert all(".lora_" in name or "value_head" in name for name in saved)


def test_what_cannot_carry_adapters_is_refused(make_model: Any) -> None:
    with pytest.raises(ValueError, match="output head or an embedding"):
        Adapters(make_model(), rank=2, alpha=4.0, targets="embed_tokens")
    with pytest.raises(ValueError, match="nowhere"):
        Adapters(make_model(), rank=2, alpha=4.0, targets="nowhere")
