"""Memory that a run will need on each GPU, from its settings alone: what `train.py PRESET --dry-run` prints.

A run has phases, and each thing lies in memory during some of them:

    start     modules are placed; before they are split over ranks each is whole for a moment
    sampling  the engine plays episodes; weights and the optimiser stay where they are
    backward  forward and backward of a micro-batch; vLLM sleeps unless it samples at the same time
    step      the optimiser's step; activations are gone, its intermediate results are there
    engine    a GPU of vLLM's own, where it has one

The peak is the fullest phase. Bytes follow the program: `learner`, `models`, `sharding`, `token_scores`,
`rollout.vllm`. Weights, gradients and optimiser are exact; activations are counted from the operations that save
something for backward (after Korthikanti et al., arXiv 2205.05198, section 4, worked out anew for gated feed-forward
parts, grouped keys, and attention that keeps no scores); what allocators, CUDA and NCCL keep is a flat reserve.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sorl_algos.algorithms import GradientNorm, GradientRatio
from sorl_algos.architectures import Architecture
from sorl_algos.config import TrainConfig

GB = 10**9
PHASES = ("start", "sampling", "backward", "step", "engine")
LEARNING = ("backward", "step")
ALWAYS = ("sampling", "backward", "step")
FULL = 4  # bytes of float32: weights that learn, gradients, each of Adam's two moments
# CUDA's context and libraries, NCCL's buffers, vLLM's graphs (which do not sleep), and gaps between blocks.
RESERVE_BYTES = 4 * GB
# Chunks of logits that exist at one time in `token_scores`: logits, probabilities, and their cast for the products.
_CHUNKS = 2.5
_LOGITS_AT_ONCE = 2**25  # token_scores.LOGITS_AT_ONCE
# What vLLM itself needs beside weights and cache: activations of the longest prefill, logits of a batch.
VLLM_WORKING_BYTES = 2 * GB
_ENGINE_ROWS = 256  # that an engine decodes at one time


@dataclass(frozen=True, slots=True)
class Item:
    """Something in memory: its bytes on one GPU, the phases in which it is there, and how to make it smaller."""

    name: str
    bytes: float
    phases: tuple[str, ...]
    remedy: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """What lies on one GPU. ``host_bytes``: main memory of a machine that holds all ranks, index not included."""

    items: tuple[Item, ...]
    gpu_bytes: float
    host_bytes: float
    cache_tokens: float
    """Tokens whose keys and values vLLM can hold on one GPU."""

    def total(self, phase: str) -> float:
        return sum(item.bytes for item in self.items if phase in item.phases)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(phase for phase in PHASES if any(phase in item.phases for item in self.items))

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak_bytes(self) -> float:
        return self.total(self.peak_phase)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.gpu_bytes

    def refusal(self) -> str:
        """What is wrong with a run that does not fit: its fullest phase, the largest item there, what helps."""
        phase = self.peak_phase
        there = [item for item in self.items if phase in item.phases and item.remedy]
        largest = max(there, key=lambda item: item.bytes)
        return (
            f"does not fit: {self.peak_bytes / GB:.1f} GB a GPU are needed ({phase}), there are "
            f"{self.gpu_bytes / GB:.1f} GB; the largest item is {largest.name} with {largest.bytes / GB:.1f} GB: "
            f"{largest.remedy}"
        )


@dataclass(frozen=True, slots=True)
class Hardware:
    """GPUs of one machine and the memory of each; ``index_bytes``: of the index and its encoder on each GPU.

    ``processor``: no GPU at all, one process in so much main memory.
    """

    gpus: int
    gpu_bytes: float
    index_bytes: float = 0.0
    processor: bool = False

    def __post_init__(self) -> None:
        if self.gpus < 1 or not self.gpu_bytes > 0:
            raise ValueError(f"{self.gpus} GPUs with {self.gpu_bytes / GB:.1f} GB; at least one with some memory")


def ranks_of(config: TrainConfig, gpus: int) -> int:
    """Processes that train: one a GPU, or one for two GPUs where vLLM has its own.

    Raises:
        ValueError: GPUs that cannot be halved, or questions that cannot be shared out.
    """
    own = config.engine == "vllm" and config.engine_gpus == "own"
    if own and (gpus < 4 or gpus % 2):
        raise ValueError(f"engine_gpus 'own' takes every second GPU and needs at least 4 of them, not {gpus}")
    ranks = gpus // 2 if own else gpus
    if config.questions_per_update % ranks:
        raise ValueError(f"questions_per_update ({config.questions_per_update}) cannot be shared by {ranks} ranks")
    return ranks


def estimate(config: TrainConfig, shape: Architecture, hardware: Hardware) -> Budget:
    """The memory of a run on each of its GPUs.

    Raises:
        ValueError: settings that cannot be shared out among the GPUs, or a cache too small for one sequence.
    """
    ranks = ranks_of(config, hardware.gpus)
    sharded = ranks > 1 and config.sharding == "fsdp2"
    plan = _Plan(config, shape, ranks, sharded)
    engine, cache_tokens = _engine_items(plan, hardware)
    items = [*_weight_items(plan), *engine, *_activation_items(plan)]
    if hardware.index_bytes:
        items.append(Item("index and encoder", hardware.index_bytes, ("start", *ALWAYS), "search on the CPU"))
    phases = dict.fromkeys(phase for item in items for phase in item.phases)
    reserve = ("reserve (libraries)", GB) if hardware.processor else ("reserve (CUDA, NCCL, gaps)", RESERVE_BYTES)
    items.append(Item(*reserve, tuple(phases), ""))
    return Budget(tuple(items), hardware.gpu_bytes, _host_bytes(plan), cache_tokens)


@dataclass(frozen=True, slots=True)
class _Plan:
    config: TrainConfig
    shape: Architecture
    ranks: int
    sharded: bool

    @property
    def split(self) -> int:
        """Over how many ranks each weight is split."""
        return self.ranks if self.sharded else 1

    @property
    def width(self) -> int:
        """Bytes of a number in the products."""
        return 2 if self.config.dtype == "bfloat16" else FULL

    @property
    def critic(self) -> str:
        return self.config.critic if self.config.algorithm_row().needs_critic else "none"

    @property
    def own_critic(self) -> bool:
        """Is it a second model? With adapters it is a second adapter."""
        return self.critic == "own" and not self.config.lora_rank

    @property
    def adapter(self) -> int:
        config = self.config
        return self.shape.adapter_parameters(config.lora_rank, config.lora_targets) if config.lora_rank else 0

    @property
    def policy_trainable(self) -> int:
        """Parameters that the policy's optimiser moves, those of a critic on its trunk left out."""
        return self.adapter or self.shape.parameters

    @property
    def critic_trainable(self) -> int:
        if self.critic == "none":
            return 0
        head = self.shape.value_head_parameters
        if self.own_critic:
            return self.shape.trunk_parameters + head
        return head + (self.adapter if self.critic == "own" else 0)

    @property
    def micro_tokens(self) -> int:
        """Tokens of the largest micro-batch, padding included."""
        config = self.config
        most = min(config.microbatch_sequences, max(1, config.minibatch_sequences // self.ranks))
        tokens = most * config.max_total_tokens
        return tokens if config.microbatch_tokens is None else min(tokens, config.microbatch_tokens)

    @property
    def frozen_width(self) -> int:
        """Bytes of a weight of the policy's model: float32 unless it stays frozen (`run.Run`)."""
        return self.width if self.config.lora_rank else FULL


# --- Weights, gradients, optimiser --------------------------------------------------------------------------


def _weight_items(plan: _Plan) -> Iterable[Item]:
    """Weights that learn, their gradients and Adam's moments are float32: 16 bytes a parameter (Rajbhandari et al.,
    arXiv 1910.02054, section 3.1, less the half-precision copies: those are made for each product and dropped)."""
    config, shape, split = plan.config, plan.shape, plan.split
    help_weights = "train adapters (--lora-rank 64), or use more GPUs with --sharding fsdp2"
    if not config.lora_rank:
        help_critic = "--critic shared puts the values on the policy's trunk; or train adapters, or use more GPUs"
    else:
        help_critic, help_weights = "use a lower rank or fewer --lora-targets", "use a smaller model"
    policy = shape.parameters * plan.frozen_width + plan.adapter * FULL
    yield Item("policy: weights", policy / split, ALWAYS, help_weights)
    # Data parallelism keeps its buckets beside the gradients.
    gradients = FULL * (2 if plan.ranks > 1 and not plan.sharded else 1)
    moments = 2 * FULL if config.optimizer == "adamw" else 0
    trained = plan.policy_trainable
    yield Item("policy: gradients", trained * gradients / split, LEARNING, help_weights)
    if moments:
        yield Item("policy: optimiser", trained * moments / split, ALWAYS, help_weights)
    if plan.critic != "none":
        values = plan.critic_trainable
        yield Item("critic: weights", values * FULL / split, ALWAYS, help_critic)
        yield Item("critic: gradients", values * gradients / split, LEARNING, help_critic)
        yield Item("critic: optimiser", values * 2 * FULL / split, ALWAYS, help_critic)
    whole_reference = config.needs_reference and not config.lora_rank
    if whole_reference:
        remedy = "without KL (--kl-reward-coef 0 --kl-loss-coef 0) there is none; with adapters it is the base"
        yield Item("reference", shape.parameters * FULL / split, ALWAYS, remedy)
    if moments:
        most = max(trained, plan.critic_trainable if plan.own_critic else 0)
        note = "torch's multi-tensor AdamW holds one more tensor of each weight's size"
        yield Item("optimiser step: scratch", most * FULL / split, ("step",), help_weights, note)
    if isinstance(config.algorithm_row().normalisation, (GradientNorm, GradientRatio)):
        remedy = "use --normalisation coefficient_ratio, which needs no gradient of its own"
        yield Item("normalisation: gradient of C", trained * FULL / split, LEARNING, remedy)
    # `sharding.shard` moves a module to the GPU whole, then splits it; one after the other.
    copies = [policy, shape.trunk_parameters * FULL * plan.own_critic, shape.parameters * FULL * whole_reference]
    at_start = max(sum(copies[:number]) / split + copy for number, copy in enumerate(copies))
    yield Item("weights being placed", at_start, ("start",), "use a smaller model, or adapters")


def _host_bytes(plan: _Plan) -> float:
    """Main memory while all ranks load: every rank reads whole models before they are split or moved; and the copy of
    its weights that vLLM keeps there while it sleeps."""
    config, shape = plan.config, plan.shape
    policy = shape.parameters * plan.frozen_width
    critic = shape.trunk_parameters * FULL * plan.own_critic
    reference = shape.parameters * FULL * (config.needs_reference and not config.lora_rank)
    asleep = shape.parameters * plan.width if config.engine == "vllm" and config.engine_gpus == "shared" else 0
    return plan.ranks * (max(policy + critic + reference, asleep) + 2 * GB)


# --- Engine -------------------------------------------------------------------------------------------------


def _engine_items(plan: _Plan, hardware: Hardware) -> tuple[list[Item], float]:
    """vLLM takes its share of the GPU whole: weights, working memory, and all that is left for keys and values. The
    tokens that fit the cache come second."""
    config, shape = plan.config, plan.shape
    per_token = shape.cache_bytes_per_token(plan.width)
    weights = shape.parameters * plan.width
    if config.engine == "hf":
        rows = min(_ENGINE_ROWS, max(1, config.episodes_per_update // plan.ranks))
        cache = rows * config.max_total_tokens * per_token
        items = [Item("engine hf: keys and values", cache, ("sampling",), "fewer --questions-per-update, or vLLM")]
        apart = config.lora_rank or config.dtype != "float32" or plan.sharded or config.source == "async"
        if apart:  # `run.Run`: a copy in the precision of the products
            items.append(Item("engine hf: weights", weights, ALWAYS, "use --engine vllm, which sleeps in between"))
        return items, rows * config.max_total_tokens
    if hardware.processor:  # VLLMEngine: a cache of 1 GiB, nothing sleeps
        return [
            Item("vLLM: weights", weights, ALWAYS, "use --engine hf"), Item("vLLM: KV cache", 2**30, ALWAYS, "")
        ], 2**30 / per_token  # fmt: skip
    own = config.engine_gpus == "own"
    share = config.engine_memory_share * hardware.gpu_bytes
    spare = share - weights - VLLM_WORKING_BYTES
    if spare < config.max_total_tokens * per_token:
        needed = (weights + VLLM_WORKING_BYTES + config.max_total_tokens * per_token) / hardware.gpu_bytes
        advice = f"raise --engine-memory-share above {needed:.2f}" if needed < 0.95 else "take GPUs with more memory"
        raise ValueError(
            f"does not fit: vLLM's share of a GPU ({share / GB:.1f} GB) holds its weights ({weights / GB:.1f} GB) and "
            f"{VLLM_WORKING_BYTES / GB:.0f} GB of working memory, but not the keys and values of one sequence "
            f"({config.max_total_tokens} tokens); {advice}"
        )
    # While the policy learns vLLM sleeps, unless it samples at the same time.
    phases = ("engine",) if own else ALWAYS if config.source == "async" else ("sampling",)
    remedy = "give vLLM less (--engine-memory-share), or GPUs of its own (--engine-gpus own)"
    return [
        Item("vLLM: weights", weights, phases, remedy),
        Item("vLLM: working memory", VLLM_WORKING_BYTES, phases, ""),
        Item("vLLM: KV cache", spare, phases, remedy, f"{spare / per_token:,.0f} tokens"),
    ], spare / per_token


# --- Activations --------------------------------------------------------------------------------------------


def residual_width(config: TrainConfig, *, sharded: bool) -> int:
    """Bytes of a number between the layers: of the weights' precision, in which the table of words answers. That is
    float32 where whole float32 weights are cast for each product, bf16 where layers are gathered in bf16 or the base
    is frozen in it."""
    return 2 if config.dtype == "bfloat16" and (sharded or config.lora_rank) else FULL


def layer_bytes_per_token(shape: Architecture, config: TrainConfig, *, sharded: bool) -> int:
    """What one layer keeps of one token for its backward pass.

    Kept are, of hidden size: what enters each of two norms (in float32 always), the normalised numbers before the
    norm's weight, and what enters the products (with autocast once for each of q, k, v, gate, up); of the size of the
    queries: q, the answer of attention, and k and v spread over all heads; of the inner size: gate, silu(gate), up and
    their product. And a few numbers of float32: one a norm, one a head.
    """
    hidden, inner, few = shape.hidden_size, shape.intermediate_size, 4 * (2 + shape.heads)
    if config.dtype == "float32":
        return 4 * (6 * hidden + 4 * shape.query_size + 4 * inner) + few
    products = 2 * (4 * shape.query_size + 4 * inner)
    if residual_width(config, sharded=sharded) == FULL:
        return 2 * (4 + 4) * hidden + 2 * 5 * hidden + products + few
    return 2 * (4 + 2 + 2) * hidden + products + few


def kept_bytes(shape: Architecture, config: TrainConfig, tokens: int, *, sharded: bool, checkpointing: bool) -> float:
    """What the trunk keeps of a micro-batch from the forward pass for the backward pass.

    Without checkpointing every layer keeps what it needs; with it only what entered it (Chen et al., arXiv 1604.06174).
    """
    width = residual_width(config, sharded=sharded)
    # what enters the last norm (in float32), its numbers before the norm's weight, and the actions picked of the result
    ends = tokens * shape.hidden_size * (FULL + 2 * width)
    if checkpointing:
        return tokens * shape.layers * shape.hidden_size * width + ends
    return shape.layers * _layer_bytes(shape, config, tokens, sharded=sharded) + ends


def working_bytes(
    shape: Architecture, config: TrainConfig, tokens: int, *, sharded: bool, checkpointing: bool
) -> float:
    """What one layer takes while the backward pass goes through it: the gradients of its activations, about as large
    as these, and with checkpointing the activations, made again."""
    return (2 if checkpointing else 1) * _layer_bytes(shape, config, tokens, sharded=sharded)


def _layer_bytes(shape: Architecture, config: TrainConfig, tokens: int, *, sharded: bool) -> int:
    casts = 0
    if config.dtype == "bfloat16" and residual_width(config, sharded=sharded) == FULL:
        # autocast: the cast of each weight is kept with its product
        casts = 2 * sum(inputs * outputs for inputs, outputs in shape.linear_shapes.values())
    return tokens * layer_bytes_per_token(shape, config, sharded=sharded) + casts


def _activation_items(plan: _Plan) -> Iterable[Item]:
    config, shape, tokens, on = plan.config, plan.shape, plan.micro_tokens, plan.config.gradient_checkpointing
    kept, working = (
        {flag: reckon(shape, config, tokens, sharded=plan.sharded, checkpointing=flag) for flag in (True, False)}
        for reckon in (kept_bytes, working_bytes)
    )
    remedy = "use a smaller --microbatch-tokens (at least --max-total-tokens)"
    remedy = remedy if on else f"turn on --gradient-checkpointing, or {remedy}"
    other = f"{'without' if on else 'with'} checkpointing {(kept[not on] + working[not on]) / GB:.1f} GB"
    yield Item("activations: policy", kept[on] + working[on], ("backward",), remedy, f"{tokens:,} tokens; {other}")
    if plan.critic == "own":  # a second pass, whose graph is there together with the first
        yield Item("activations: critic", kept[on], ("backward",), remedy)
    # `token_scores`: a chunk of logits at a time, the head cast for the products, its gradient in float32.
    chunk = _CHUNKS * FULL * min(_LOGITS_AT_ONCE, tokens * shape.vocabulary)
    head = shape.table_parameters * ((0 if plan.width == FULL else plan.width) + (0 if config.lora_rank else FULL))
    whole = _CHUNKS * FULL * tokens * shape.vocabulary
    note = f"in chunks; all at once {(whole + head) / GB:.1f} GB"
    yield Item("logits and head", chunk + head, ("backward",), "use a smaller --microbatch-tokens", note)
    if plan.sharded:
        yield Item("gathered by FSDP", _gathered(plan), LEARNING[:1], "train adapters, or use a smaller model")


def _gathered(plan: _Plan) -> float:
    """Whole weights on each rank while they are used: two layers (the next one is fetched ahead) and what lies outside
    of layers, which stays through a forward; the gradients of as much, in the products' precision and once more in
    float32 where they are summed over ranks."""
    shape, width = plan.shape, plan.width
    outside = shape.parameters - shape.layers * shape.layer_parameters
    if plan.own_critic:
        outside += shape.table_parameters
    return 2 * shape.layer_parameters * width + outside * width + (shape.layer_parameters + outside) * (width + FULL)
