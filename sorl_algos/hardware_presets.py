"""Presets for real models on real hardware, by a small grammar of names:

    MODEL-TASK-ALGORITHM-Ngpu[-split]       for example qwen2.5-7b-nq-so_ppo-8gpu

    MODEL       qwen2.5-7b, qwen2.5-3b, qwen2.5-1.5b
    TASK        nq (NQ and HotpotQA over Wikipedia), med (medical multiple choice over PubMed)
    ALGORITHM   ppo, so_ppo, grpo, so_grpo
    N           1, 4, 8
    -split      half of the GPUs sample with vLLM while the other half learns (source async)

Everything follows from the tables below. What is marked "paper" is of arXiv 2511.20718; "Search-R1" is what that
project's scripts use (arXiv 2503.09516, appendix), where the paper says nothing else; "ours" is a choice. GPUs are
taken to have 80 GB; `train.py NAME --dry-run` adds up what lies on each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sorl_algos.config import TrainConfig

# A sequence: a prompt of up to 4,096 tokens (paper) and the last turn of 500.
MAX_TOTAL_TOKENS = 4096 + 500
GROUP_SIZE = 5  # paper
MODELS = {"qwen2.5-7b": "Qwen/Qwen2.5-7B", "qwen2.5-3b": "Qwen/Qwen2.5-3B", "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B"}
ALGORITHMS = ("ppo", "so_ppo", "grpo", "so_grpo")
GPUS = (1, 4, 8)
DESCRIPTION = "MODEL-TASK-ALGORITHM-Ngpu[-split], such as qwen2.5-7b-nq-so_ppo-8gpu"

_COMMON = TrainConfig(
    dtype="bfloat16",  # Search-R1; weights that learn stay in float32
    gradient_checkpointing=True,  # Search-R1
    questions_per_update=512,  # paper: rollout batch
    minibatch_sequences=256,  # paper (256 or 128): two optimiser steps an update
    microbatch_sequences=64,
    microbatch_tokens=4 * MAX_TOTAL_TOKENS,  # ours: what fits (see _FEWER_TOKENS); the result does not depend on it
    max_turn_tokens=500,  # paper
    max_total_tokens=MAX_TOTAL_TOKENS,
    # paper: 500 tokens; our limit is in words, of which 500 tokens of English hold about 375
    max_observation_words=375,
    top_k=3,  # paper
    temperature=1.0,  # Search-R1
    lr=1e-6,  # paper
    critic_lr=1e-5,  # paper
    lr_warmup_updates=142,  # paper: with warm-up; Search-R1: 0.285 of the run
    critic_warmup_updates=0,  # Search-R1
    clip_low=0.2,  # paper
    clip_high=0.2,
    value_clip=0.5,  # Search-R1 (the default of the trainer it uses)
    gamma=1.0,  # paper
    lam=1.0,
    weight_decay=0.01,  # Search-R1 (as value_clip)
    max_grad_norm=1.0,  # paper
    updates=500,  # ours
    engine="vllm",
    source="stream",  # ours: the same result as in lockstep
    eval_every=50,
    eval_limit=512,
    test_limit=2000,
    save_every=50,
    keep_checkpoints=2,
)


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder that a preset reads, and the command that makes it: ``rows`` and ``bytes`` as far as known."""

    command: str
    what: str
    bytes: float


# Sizes: rows as the publishers say; bytes from these and the length of a row (questions), from `RECIPES` (indexes).
SOURCES: dict[str, Source] = {
    "data/nq_hotpotqa_train.jsonl": Source(
        "scripts/prepare_data.py nq_hotpotqa_train --output data/nq_hotpotqa_train.jsonl", "169,615 questions", 3e7
    ),
    "data/nq_dev.jsonl": Source(
        "scripts/prepare_data.py nq --split dev --output data/nq_dev.jsonl", "8,757 questions", 2e6
    ),
    "data/medmcqa_train.jsonl": Source(
        "scripts/prepare_data.py medmcqa --split train --output data/medmcqa_train.jsonl", "182,822 questions", 8e7
    ),
    "data/medmcqa_dev.jsonl": Source(
        "scripts/prepare_data.py medmcqa --split validation --output data/medmcqa_dev.jsonl", "4,183 questions", 2e6
    ),
}
# Which recipe of retrieval_index makes the index of a preset.
RECIPE_OF = {"indexes/wiki18-e5": "wiki18-e5", "indexes/pubmed-bm25": "pubmed-bm25"}


def _on_task(config: TrainConfig, task: str, grouped: bool) -> TrainConfig:
    if task == "nq":
        return replace(
            config,
            env="SearchQA-v0",
            index=Path("indexes/wiki18-e5"),  # paper: E5-base-v2 over the 2018 dump, 21 M passages
            questions="data/nq_hotpotqa_train.jsonl",  # Search-R1
            eval_questions="data/nq_dev.jsonl",
            reward="exact_match",  # paper
            prompt="search_r1",
            max_searches=4 if grouped else 3,  # paper
        )
    return replace(
        config,
        env="MedicalQA-v0",
        index=Path("indexes/pubmed-bm25"),  # ours
        questions="data/medmcqa_train.jsonl",  # paper: trained on medical multiple choice
        eval_questions="data/medmcqa_dev.jsonl",
        reward="choice_accuracy",
        prompt="medical",
        max_searches=6,  # paper
    )


def _with_algorithm(config: TrainConfig, name: str) -> TrainConfig:
    if "grpo" not in name:
        return replace(config, algorithm=name, critic="own", kl_reward_coef=0.001)  # paper: k1 in the reward
    # Five samples of each of 512 questions (paper); a minibatch is 256 questions there too. KL as a loss: Search-R1.
    return replace(
        config,
        algorithm=name,
        critic="none",
        group_size=GROUP_SIZE,
        minibatch_sequences=config.minibatch_sequences * GROUP_SIZE,
        kl_loss_coef=0.001,
        kl_loss_estimator="k3",
    )


# Where 16 bytes a parameter for policy and critic each do not fit beside vLLM: adapters (one GPU), or the critic as a
# head on the policy's trunk. All others train all weights, with a critic of its own (paper).
_ADAPTERS = {("qwen2.5-7b", 1), ("qwen2.5-3b", 1)}
_SHARED_CRITIC = {("qwen2.5-7b", 4), ("qwen2.5-7b", 8, "split"), ("qwen2.5-3b", 4, "split")}
_FEWER_TOKENS = {("qwen2.5-7b", 4), ("qwen2.5-7b", 8), ("qwen2.5-1.5b", 1)}  # in a micro-batch: two whole sequences
# Share of each GPU for vLLM: its weights, and keys and values of some dozens of whole sequences.
_ENGINE_SHARE = {("qwen2.5-7b", 1): 0.6, ("qwen2.5-3b", 1): 0.5, ("qwen2.5-1.5b", 1): 0.2, ("qwen2.5-7b", 4): 0.35}
_SPLIT = (("qwen2.5-7b", 8), ("qwen2.5-3b", 4), ("qwen2.5-3b", 8), ("qwen2.5-1.5b", 4), ("qwen2.5-1.5b", 8))


def _on_gpus(config: TrainConfig, model: str, gpus: int, split: bool) -> TrainConfig:
    config = replace(config, model=MODELS[model], sharding="fsdp2" if gpus > 1 else "auto")
    place = (model, gpus, "split") if split else (model, gpus)
    if place in _ADAPTERS:
        # ours: adapters want about ten times the rate
        config = replace(config, lora_rank=64, lora_alpha=64.0, lr=1e-5, critic_lr=1e-4)
    if (model, gpus) in _FEWER_TOKENS:
        config = replace(config, microbatch_tokens=2 * MAX_TOTAL_TOKENS)
    if place in _SHARED_CRITIC and config.critic == "own":
        config = replace(config, critic="shared")
    if not split:
        return replace(config, engine_memory_share=_ENGINE_SHARE.get((model, gpus), 0.4))
    return replace(
        config,
        engine_gpus="own",
        engine_memory_share=0.85,
        source="async",
        max_staleness=1,
        correction="truncated_is",  # for the share of the episodes that older weights played
    )


def hardware_preset(model: str, task: str, algorithm: str, gpus: int, *, split: bool = False) -> TrainConfig:
    """The settings that a name stands for; the parts as the grammar has them."""
    name = preset_name(model, task, algorithm, gpus, split=split)
    config = _with_algorithm(_on_task(_COMMON, task, "grpo" in algorithm), algorithm)
    return replace(_on_gpus(config, model, gpus, split), run_dir=Path("runs") / name)


def preset_name(model: str, task: str, algorithm: str, gpus: int, *, split: bool = False) -> str:
    return f"{model}-{task}-{algorithm}-{gpus}gpu{'-split' if split else ''}"


def _describe(model: str, task: str, algorithm: str, gpus: int, config: TrainConfig) -> str:
    data = "NQ and HotpotQA" if task == "nq" else "medical multiple choice"
    what = "adapters" if config.lora_rank else "all weights"
    where = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    if config.engine_gpus == "own":
        where = f"{gpus // 2} GPUs learn, {gpus // 2} sample"
    return f"{algorithm} with {MODELS[model]} on {data}: {what}, {where} of 80 GB."


def hardware_presets() -> dict[str, tuple[str, TrainConfig]]:
    """All names with their descriptions and settings."""
    found = {}
    places = [(model, gpus, False) for model in MODELS for gpus in GPUS] + [(*place, True) for place in _SPLIT]
    for model, gpus, split in places:
        for task in ("nq", "med"):
            for algorithm in ALGORITHMS:
                config = hardware_preset(model, task, algorithm, gpus, split=split)
                name = preset_name(model, task, algorithm, gpus, split=split)
                found[name] = (_describe(model, task, algorithm, gpus, config), config)
    return found


def gpus_of(name: str) -> int | None:
    """The number of GPUs that a preset's name asks for; None where it names none."""
    for part in name.split("-"):
        if part.endswith("gpu") and part[:-3].isdigit():
            return int(part[:-3])
    return None
